"""Words about a private training: before it, from public numbers; after it, from its releases.

All is computed from what is public (settings, sizes, the plan) or was released with noise and charged,
so advice costs no privacy.
"""

from lightning_dp.advice.after import after
from lightning_dp.advice.before import before
from lightning_dp.advice.facts import facts
from lightning_dp.advice.setting import OptimizerSetting, Setting, optimizer_setting
from lightning_dp.advice.verdict import Verdict, judged

__all__ = [
    "OptimizerSetting",
    "Setting",
    "Verdict",
    "after",
    "before",
    "facts",
    "judged",
    "optimizer_setting",
]
