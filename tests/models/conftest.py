"""Leaves out a script that only runs where transformers is installed."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("transformers") else ["llama_job.py"]
