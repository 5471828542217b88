"""Accounting is numpy and scipy: it serves those who do not train here."""

from __future__ import annotations

import subprocess
import sys


def test_accounting_works_where_torch_cannot_be_imported() -> None:
    code = """
import sys
for name in ("torch", "lightning", "opacus", "torchmetrics", "flwr"):
    sys.modules[name] = None
import pkgutil, importlib
import lightning_dp.accounting as accounting
for module in pkgutil.iter_modules(accounting.__path__):
    importlib.import_module(f"lightning_dp.accounting.{module.name}")
history = [(accounting.PoissonGaussian(1.0, 0.01), 1000)]
print(round(accounting.epsilon(history, delta=1e-5), 2))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "1.83\n"
