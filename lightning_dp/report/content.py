"""The privacy report: what ran, what it cost, and what the numbers do not speak about."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp.report.facts import AbstractReport, Reader
from lightning_dp.report.html import document
from lightning_dp.report.pages import annex_of, page

__all__ = ["PrivacyReport"]


@dataclass(frozen=True, kw_only=True)
class PrivacyReport(AbstractReport):
    """A privacy statement about what ran.

    ``epsilon`` at ``delta`` is the guarantee of releasing the steps that were made, had their
    number been fixed in advance (as it is when the budget or the Trainer's own end stops the run).
    If a result stopped the run (EarlyStopping, a checkpoint chosen by its score), claim
    ``epsilon_of_plan`` instead: the guarantee of the whole declared plan.

    Args:
        epsilon, delta: spent, over all fits of this ledger.
        epsilon_of_plan: ε had the plan run to its end; None for a plan without an end.
        relation: what neighbouring data sets are.
        steps: noised steps charged.
        target_epsilon: the budget; None without one.
        claims_budget: True if ``epsilon`` is the whole budget from the first step on, since noise
            is chosen at run time; else it is the accountant's of ``events``.
        private: False without noise, or if ``seeded``.
        seeded: True if any part of the run had a test ``seed``: repeatable, and so not private.
        isolation: of the check before the first step that no record changes another's gradient: compared
            on made-up samples, not compared (why), by construction, or opted out.
        gradient_edits: the user's own words for what was done to the private gradient before the
            optimizer used it; None where nothing but Lightning's clipping was allowed.
        public_state: buffers and frozen weights that, by the user's word, callbacks and validation
            write from weights and public numbers alone.
        spot_checks: how many steps were looked at, at how many of these runs of the batch were compared
            in which records are exchanged, and why the others were not.
        guard: how the budget is guarded.
        accountant: which accountant computed the numbers.
        accountant_settings: its settings.
        mechanism: estimator, schedule, post-processing and sampling.
        clip_norms: the estimator's, by their names.
        noise_multiplier: z of the latest step.
        sample_rate, expected_batch_size, num_records: q, B = qN and N; None before a fit.
        learning: what public numbers and releases tell of what was learnt, by name; advice among it.
        about: the user's words about the data, see :class:`lightning_dp.About`.
        started, ended: minutes of the first and the latest charge; None where they are not known.
        stop_reason: why training stopped early; None if it did not.
        not_covered: what the numbers do not speak about.
        versions: of the packages that matter.
        ledger_id: of the ledger whose charges these are.
        journal: the path of its journal; None before a fit.
        events: what was charged: for each run (one fit in one process), events and their counts in
            the order of time.
    """

    def markdown(self, reader: Reader | None = None) -> str:
        """Return a document: page one in plain words, and the annex for engineers.

        Args:
            reader: ``"people"`` for page one alone, ``"engineers"`` for the annex alone.

        Raises:
            ValueError: for another reader.
        """
        return page(self).part_for(reader).markdown()

    def html(self, reader: Reader | None = None) -> str:
        """Return the document as one HTML file; the annex has the picture, if matplotlib is there.

        Args:
            reader: as in :meth:`markdown`.
        """
        return document([page(self).part_for(reader)])

    def __str__(self) -> str:
        return annex_of(self).text()
