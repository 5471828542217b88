"""Scripts that two processes run are not modules of tests."""

collect_ignore_glob = ["*jobs.py"]
