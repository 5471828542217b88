"""Scripts that several processes run are not modules of tests."""

collect_ignore_glob = ["*jobs.py", "sharded_*.py"]
