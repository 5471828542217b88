"""The privacy report: the claims of a run, as an object, as files, and checked by a command.

``python -m lightning_dp.report PATH`` prints the report of a checkpoint, a journal, a report file or
a folder of these, and checks that they agree.
"""

from lightning_dp.report.content import PrivacyReport

__all__ = ["PrivacyReport"]
