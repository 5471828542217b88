"""The public names: complete, at home where they say, documented, and imported only when asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dp

ROOT = Path(__file__).parents[1]

# What the package promises to keep. Everything else may move or change in any version.
PUBLIC = {
    "lightning_dp": """
        DifferentialPrivacy PrivacyConfig PrivacyWarning
        AbstractEstimator MeanGradient Diff2 Storm CubicNewton Query Term
        AbstractSchedule Constant Exponential StepDecay Polynomial Cosine DynamicGD DynamicMomentum
        FromInfluence
        AbstractPostProcessor LaplacianSmoothing Momentum DPAdamW
        Flat Automatic PerGroup AdaptiveQuantile
        AbstractSampling BatchPlan Checks Poisson FullBatch CyclicPoisson FixedOrder UserLevel
        TruncatedPoisson RandomAllocation
        IndependentNoise BandedNoise LambdaCGD Workload suggest_batches
        fix losses_of_records rows_of_records About
        PLDAccountant StreamingRDPAccountant ApproximateDP ZCDP
    """,
    "lightning_dp.callbacks": """
        DifferentialPrivacy PrivacyAdvice PrivacyLogger PrivacyReportFiles
        PrivateSingleDeviceStrategy PrivateDDPStrategy
    """,
    "lightning_dp.accounting": """
        Gaussian PoissonGaussian ApproximateDP ZCDP
        PLDAccountant StreamingRDPAccountant
        epsilon delta epsilon_text TradeOff trade_off calibrate
        sweep_history recover_journal to_dp_event
    """,
    "lightning_dp.report": "PrivacyReport",
    "lightning_dp.strategies": "PrivateSingleDeviceStrategy PrivateDDPStrategy",
    "lightning_dp.search": "Search Trial",
    "lightning_dp.plan": """
        Suggestion TrainingPlan learning_rate plan_training suggest weight_size
    """,
    "lightning_dp.plotting": "plot_schedule",
    "lightning_dp.metrics": "PrivacyBudget",
    "lightning_dp.audit": "audit check_isolation",
    "lightning_dp.federated": """
        AsyncClient AsyncPlan AsyncServer ClientPrivacy InverseRootSteps PolynomialSizes Quorum
    """,
    "lightning_dp.federated.local": "LocalRecords",
    "lightning_dp.federated.flower": "client_app server_app",
}
NAMES = [(home, name) for home, names in PUBLIC.items() for name in names.split()]
AGAIN = {  # at home elsewhere, too, where the API reference has them
    ("lightning_dp.callbacks", "DifferentialPrivacy"),
    *(("lightning_dp.strategies", f"Private{kind}Strategy") for kind in ("SingleDevice", "DDP")),
    *(("lightning_dp", kind) for kind in ("PLDAccountant", "StreamingRDPAccountant")),
    *(("lightning_dp", kind) for kind in ("ApproximateDP", "ZCDP")),
}


# What needs lightning-dp[federated] and Python 3.11.
WITHOUT = set() if importlib.util.find_spec("flwr") else {"lightning_dp.federated.flower"}


def test_the_list_is_what_the_modules_export():
    for home in PUBLIC.keys() - WITHOUT:
        assert sorted(importlib.import_module(home).__all__) == sorted(PUBLIC[home].split())


def test_a_public_name_says_what_it_is():
    for home, name in NAMES:
        if home not in WITHOUT:
            thing = getattr(importlib.import_module(home), name)
            text = vars(thing)["__doc__"] if inspect.isclass(thing) else thing.__doc__
            assert text, f"{name}: no docstring, or an inherited one"
            assert not text.startswith(f"{name}("), "a dataclass wrote it itself"


def test_the_api_reference_has_each_of_them_and_no_other():
    kept = [p for p in (ROOT / "docs" / "api").glob("*.md") if p.name != "internals.md"]
    pages = "".join(path.read_text("utf-8") for path in kept)
    entries = re.findall(r"^\.\. auto(?:class|exception|function):: (\S+)$", pages, flags=re.M)
    assert pages.count(":: lightning_dp") == len(entries)
    assert sorted(entries) == sorted(f"{home}.{name}" for home, name in set(NAMES) - AGAIN)


def test_pages_show_public_names_only():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text("utf-8")
        code = "".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S))
        for home, names in re.findall(r"^from (lightning_dp[\w.]*) import (.+)$", code, flags=re.M):
            assert {(home, name.strip()) for name in names.split(",")} <= set(NAMES), page


STAGES = """
import sys
def show(): print(*{name.partition(".")[0] for name in sys.modules})
import lightning_dp as p; dir(p); show()
from lightning_dp.accounting import *; epsilon(PoissonGaussian(1.0, 0.01), 1e-5); show()
from lightning_dp import Diff2, Exponential, FullBatch, Momentum; show()
p.accounting.epsilon; print(p.__version__); p.metrics.PrivacyBudget; show()
"""


@pytest.mark.slow  # imports in fresh processes
def test_a_name_loads_what_it_needs_only_and_public_modules_need_no_import_of_their_own():
    done = subprocess.run(
        [sys.executable, "-c", STAGES], capture_output=True, text=True, check=True
    )
    package, accounting, root, version, metrics = map(str.split, done.stdout.splitlines())
    assert not {"torch", "lightning", "pytorch_lightning", "opacus", "flwr", "numpy"} & {*package}
    assert "scipy" in accounting and not {"torch", "lightning", "opacus"} & {*accounting}
    assert "torch" in root
    assert not {"lightning", "pytorch_lightning", "opacus", "flwr"} & {*root}
    assert "torchmetrics" in metrics
    assert version == [lightning_dp.__version__] == [importlib.metadata.version("lightning-dp")]
    homes = {home.partition(".")[2].partition(".")[0] for home in PUBLIC} - {""}
    assert homes <= set(dir(lightning_dp))


def test_the_callback_can_be_imported_from_the_root():
    names: dict[str, object] = {}
    exec("from lightning_dp import *", names)
    assert names["DifferentialPrivacy"] is lightning_dp.callbacks.DifferentialPrivacy


def test_a_name_that_is_not_there_is_an_ordinary_error():
    with pytest.raises(ImportError, match="Diff3"):
        exec("from lightning_dp import Diff3")
    with pytest.raises(AttributeError, match=r"module 'lightning_dp' has no attribute 'Diff3'"):
        lightning_dp.Diff3  # noqa: B018
    assert importlib.import_module("lightning_dp._validate").__name__ == "lightning_dp._validate"
