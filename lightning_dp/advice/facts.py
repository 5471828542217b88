"""Named facts for a report, from settings and releases."""

from __future__ import annotations

import math
from itertools import pairwise

from lightning_dp.advice.after import after
from lightning_dp.advice.alternatives import Alternatives
from lightning_dp.advice.before import changes
from lightning_dp.advice.setting import Setting
from lightning_dp.advice.verdict import Verdict, judged
from lightning_dp.signal import Signal, Stretch

__all__ = ["facts"]

_PARTS = 4  # of a run in a report


def facts(setting: Setting | None, signal: Signal | None) -> dict[str, str]:
    """Return facts by their names: public numbers, released ones, and advice.

    Args:
        setting: of the training; None before it began.
        signal: of its releases; None where nobody followed them.
    """
    found: dict[str, str] = {}
    if setting is not None and setting.noise_multiplier > 0 and math.isfinite(setting.clip_norm):
        found["noise in a mean gradient"] = (
            f"{setting.noise_length:.3g} long, z·C·√d/B with d = {setting.size:,}; the gradient is at "
            f"most {setting.clip_norm:g} long"
        )
        alternatives = Alternatives.of(setting)
        if alternatives is not None:
            found["noise over the run"] = (
                f"{alternatives.excess:.2g} times that of full batches with the same budget"
            )
    if signal is not None and signal.whole.steps:
        found.update(_of_releases(signal))
    advice = [] if setting is None else _advice(setting, signal)
    return {**found, **({"advice": " ".join(advice)} if advice else {})}


def _advice(setting: Setting, signal: Signal | None) -> list[str]:
    """Return what the releases say; else what public numbers do."""
    return ([] if signal is None else after(setting, signal)) or changes(setting)


def _of_releases(signal: Signal) -> dict[str, str]:
    count = len(signal.stretches)
    ends = [round(part * count / _PARTS) for part in range(_PARTS + 1)]
    parts = [signal.between(a, b) for a, b in pairwise(ends) if a < b]
    found = {"length of releases": "; ".join(_length(part) for part in parts)}
    verdict, share = judged(signal), signal.whole.share_clipped
    if verdict is not None:
        found["a direction that outlasts the noise"] = _verdict(verdict)
    if share is not None:
        found["share of clipped records"] = (
            f"{share[0]:.3f} ± {share[1]:.3f} (released with this noise, charged with the gradients)"
        )
    return found


def _length(part: Stretch) -> str:
    return f"up to step {part.last_step}: {part.released_length:.4g}, of it noise {part.noise_length:.4g}"


def _verdict(verdict: Verdict) -> str:
    quarters = ", ".join(f"{each:.1f}" for each in verdict.quarters)
    return (
        f"{'yes' if verdict.learns else 'no'}: largest agreement of successive releases "
        f"{verdict.largest:.1f}, noise alone stays below {verdict.threshold:.1f} in 99 of 100 runs; "
        f"by quarters of the run {quarters}"
    )
