"""Files that pytest does not collect where they cannot be imported."""

import importlib.util

# Flower needs Python 3.11, this package 3.10. Collecting doctests imports every module, so on 3.10
# (and without the extra "federated") the adapter's modules would be errors, not skipped tests.
collect_ignore_glob = (
    [] if importlib.util.find_spec("flwr") else ["lightning_dp/federated/flower.py"]
)
