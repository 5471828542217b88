"""Train a small private model, and write the pages of its report: for people, and for engineers.

    python docs/reports/make.py             # trains (half a minute), then writes
    python docs/reports/make.py --render    # writes the pages of the run that is here

The run is its report (``.json``) and its journal. The pages follow from them, and a test compares:
after a change of words in ``lightning_dp/report``, render again.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_dp import About, DifferentialPrivacy
from lightning_dp.report.__main__ import pages
from lightning_dp.report.content import READERS, Page, render
from lightning_dp.report.files import PATTERN, check, read_document

HERE = Path(__file__).parent
QUICKSTART = HERE.parents[1] / "examples" / "quickstart.py"
ABOUT = About(
    data_set="handwritten digits of scikit-learn (UCI Optical Recognition of Handwritten Digits)",
    record="one picture of one digit; each writer wrote many of them",
    controller="nobody: the data are public, and this is an example",
    trained_by="the authors of lightning-dp, for this page",
)


def train() -> None:
    """Train the network of the quickstart, and keep its report and its journal here."""
    example = runpy.run_path(str(QUICKSTART))
    train_set, _ = example["digits"]()
    privacy = DifferentialPrivacy(target_epsilon=3.0, target_delta=1e-5, about=ABOUT)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=20,
            callbacks=[privacy],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        loader = DataLoader(train_set, batch_size=example["BATCH_SIZE"], shuffle=True)
        trainer.fit(example["DigitsCNN"](), loader)
        for old in (*HERE.glob(PATTERN), *HERE.glob("*.journal")):
            old.unlink()
        for made in (*Path(folder).rglob(PATTERN), *Path(folder).rglob("*.journal")):
            (HERE / made.name).write_text(made.read_text("utf-8"), "utf-8")


def rendered() -> Page:
    """Return the page of the run that is here, checked against its journal on the day of its end."""
    (path,) = HERE.glob(PATTERN)
    report = read_document(path)
    assert report.report is not None and report.report.ended is not None
    today = report.report.ended.partition(" ")[0]
    (page,) = pages([check(report, report.journal)], None, {}, today=today)
    return page


def files(page: Page) -> dict[str, str]:
    """Return the files of a page by name: what each reader needs, as Markdown and as HTML."""
    return {
        f"{reader}.{form}": render([page], form, reader)
        for reader in READERS
        for form in ("md", "html")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--render", action="store_true", help="of the run that is here")
    if not parser.parse_args().render:
        train()
    for name, text in files(rendered()).items():
        (HERE / name).write_text(text, "utf-8")
        print(f"{HERE / name}: {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
