"""The privacy report: what may be claimed about a run, as an object, as files, and checked by a command.

``python -m lightning_dp.report PATH`` prints the report of a checkpoint, a journal, a report file or
a folder of these, and checks that they agree.
"""

from lightning_dp.report.content import PrivacyReport
from lightning_dp.report.files import read_report, write_report
from lightning_dp.report.of_run import report

__all__ = ["PrivacyReport", "read_report", "report", "write_report"]
