"""The callback that makes a Trainer train privately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.base import AbstractAccountant, Relation
from lightning_dp.accounting.events import AbstractExternal
from lightning_dp.callbacks.privacy_advice import PrivacyAdvice
from lightning_dp.callbacks.privacy_logger import PrivacyLogger
from lightning_dp.callbacks.privacy_report_files import PrivacyReportFiles
from lightning_dp.clipping import Clipping, Flat
from lightning_dp.config import About, Checks, EngineName, PrivacyConfig
from lightning_dp.estimators import AbstractEstimator
from lightning_dp.noise import AbstractNoise, IndependentNoise
from lightning_dp.postprocessing import AbstractPostProcessor
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import AbstractSampling, Poisson, UserLevel
from lightning_dp.schedules import AbstractSchedule, Constant

if TYPE_CHECKING:
    from lightning_dp.report import PrivacyReport


class DifferentialPrivacy(Callback):
    """Differentially private training of an unchanged LightningModule.

    Each step draws a Poisson batch, clips each record's gradient, adds noise to the sum and gives
    the result to the model's own optimizer. ε is logged as ``privacy/epsilon``, and training stops
    before the step that would exceed ``target_epsilon``.

    The guarantee is (ε, δ)-differential privacy of the released weights with respect to one record
    of the training set, under ``relation``. It does not cover what the module itself logs from
    training data, nor choices made on private validation data; :meth:`report` lists this.

    Args:
        target_epsilon: ε > 0 that is never exceeded. Alone, the noise is calibrated for the steps
            that the Trainer will make.
        target_delta: δ in (0, 1); choose it well below 1 / N.
        max_grad_norm: C > 0, the clip norm of one record's gradient (default 1.0).
        clipping: the rule that bounds a record's gradient: ``Flat()`` (default), ``Automatic()``,
            ``PerGroup({pattern: C})`` or ``AdaptiveQuantile()``.
        noise_multiplier: z >= 0; the noise on the sum has standard deviation z·C. The scale of
            ``noise_schedule``. 0 trains without privacy (ε is inf).
        noise_schedule: how the noise changes over steps; default constant.
        estimator: forms the query of each step; default DP-SGD's mean of clipped gradients.
        postprocessing: applied to the private gradient, in order.
        sampling: ``Poisson()``, ``TruncatedPoisson(limit)``, ``FullBatch()``, ``RandomAllocation()``,
            ``CyclicPoisson(bands)`` or ``FixedOrder()``.
        noise: ``IndependentNoise()`` (default); noise that remembers, ``BandedNoise(bands)`` with
            ``CyclicPoisson(bands)`` or ``FixedOrder()``, ``LambdaCGD(lam)`` with ``FixedOrder()``.
        unit: the unit of privacy: ``UserLevel(ids=..., most_rows=k)`` for users with all their rows;
            by default each row of the data set, a record.
        augmentations: K >= 1, times that each record of a batch is read; the mean of its K gradients
            is clipped. ε does not depend on it, and ``__getitem__`` makes another view each time.
        relation: "add_remove", "replace_one", or "zero_out" (for ``FixedOrder()``).
        accountant: computes ε.
        engine: computes gradients per record: "layers" (the whole batch at once, by the types of its
            layers; "bookkeeping" is its old name), "records" (every record alone, all at once under
            ``torch.func.vmap``), "ghost" (two backward passes, of which nothing is kept but norms:
            least memory), "one_by_one" (each record alone through ``collate_fn`` and
            ``training_step``: slowest), "hooks" (Opacus' own, to compare with); "auto" takes the
            first of "layers", "records" and "one_by_one" that covers the model.
        ledger_dir: folder of the privacy journal, on this machine; default
            ``<default_root_dir>/privacy``. A relative one begins where the process is now.
        checks: the checks of a fit, and your declarations in their place:
            ``Checks(gradient_edits="centred per layer")``; see :class:`lightning_dp.Checks`.
        private_optimizer: where ``configure_optimizers`` gives several (manual optimization), the one
            that is trained on the records: its place, or the dotted path of a module whose
            parameters it holds ("discriminator"). The others are public: their steps may use
            released and synthetic values only, and are not charged.
        advice: print advice about noise and batches before the first step, and a judgement of the
            releases after the last; from public numbers and releases alone. Costs one vector of the
            model's size.
        count_clipped: also release, noised, how many records of each batch were clipped; logged as
            ``privacy/share_clipped``. Charged with the gradient as one event, whose noise has a
            0.5 % larger norm.
        other_releases: other releases about the same records, with the guarantee that is stated
            for each: ``[ApproximateDP(0.5, 1e-7, relation="add_remove", what="table of
            ages")]``. It counts in ε and in the budget, is in the journal, and the report
            names it in your words. One that several trainings declare counts once in their sum.
        about: names and owners of the data (its name, the meaning of a record), for the
            report; see :class:`lightning_dp.About`.
        secure_noise: draw noise and batches from AES-256 in counter mode (of ``cryptography``) instead
            of PCG64 seeded by the operating system, sum in float64, and round what is released
            to 2^-20 of the noise, so that its low bits reveal nothing.
        seed: repeatable noise and batches, for tests; the report says that nothing is private.
        isolation_probe: earlier spelling of ``checks=Checks(dry_run=...)``; goes with the next version.
        loss_graph_check: of ``checks=Checks(loss_graph=...)``.
        spot_checks: of ``checks=Checks(comparisons=...)``.
        gradient_edits: of ``checks=Checks(gradient_edits=...)``.
        public_state: of ``checks=Checks(public_state=...)``.

    Example:
        >>> privacy = DifferentialPrivacy(target_epsilon=3.0, target_delta=1e-5)
        >>> privacy.epsilon, privacy.steps
        (0.0, 0)

        Then ``L.Trainer(max_epochs=20, callbacks=[privacy]).fit(model, datamodule)``.
    """

    def __init__(
        self,
        target_epsilon: float | None = None,
        *,
        target_delta: float,
        max_grad_norm: float | None = None,
        clipping: Clipping | None = None,
        noise_multiplier: float | None = None,
        noise_schedule: AbstractSchedule | None = None,
        estimator: AbstractEstimator | None = None,
        postprocessing: Sequence[AbstractPostProcessor] = (),
        sampling: AbstractSampling | None = None,
        noise: AbstractNoise | None = None,
        unit: UserLevel | None = None,
        augmentations: int = 1,
        relation: Relation = "add_remove",
        accountant: AbstractAccountant | None = None,
        engine: EngineName = "auto",
        ledger_dir: str | None = None,
        checks: Checks | None = None,
        private_optimizer: int | str | None = None,
        advice: bool = True,
        count_clipped: bool = False,
        other_releases: Sequence[AbstractExternal] = (),
        about: About | None = None,
        secure_noise: bool = False,
        seed: int | None = None,
        isolation_probe: bool | None = None,
        loss_graph_check: bool | None = None,
        spot_checks: bool | None = None,
        gradient_edits: str | None = None,
        public_state: Sequence[str] | None = None,
    ) -> None:
        self._run = PrivateRun(
            PrivacyConfig(
                target_delta=target_delta,
                target_epsilon=target_epsilon,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                clipping=Flat() if clipping is None else clipping,
                noise_schedule=Constant() if noise_schedule is None else noise_schedule,
                estimator=estimator,
                postprocessing=postprocessing,
                sampling=Poisson() if sampling is None else sampling,
                noise=IndependentNoise() if noise is None else noise,
                unit=unit,
                augmentations=augmentations,
                relation=relation,
                accountant=PLDAccountant() if accountant is None else accountant,
                engine=engine,
                ledger_dir=ledger_dir,
                checks=Checks() if checks is None else checks,
                private_optimizer=private_optimizer,
                advice=advice,
                count_clipped=count_clipped,
                other_releases=other_releases,
                about=about,
                secure_noise=secure_noise,
                seed=seed,
                isolation_probe=isolation_probe,
                loss_graph_check=loss_graph_check,
                spot_checks=spot_checks,
                gradient_edits=gradient_edits,
                public_state=public_state,
            )
        )
        self._visible = (PrivacyLogger(), PrivacyAdvice(), PrivacyReportFiles())

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the Trainer's strategy private, before anything asks it for data.

        What users see of the run is the work of callbacks that the strategy calls:
        :class:`PrivacyLogger`, :class:`PrivacyAdvice` and :class:`PrivacyReportFiles`.
        """
        from lightning_dp.strategies.strategy import install  # all that trains

        if stage == "fit":
            install(trainer, self._run, *self._visible)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Refuse launchers that copy the process here as well: :meth:`setup` ran in the copies only."""
        from lightning_dp.strategies.checks import check_launcher

        if trainer.state.fn == TrainerFn.FITTING and isinstance(exception, Exception):
            try:
                check_launcher(trainer.strategy)
            except MisconfigurationException as refusal:
                raise refusal from None  # not with what the copies said

    def on_init_end(self, *_: object, **__: object) -> NoReturn:
        """Refuse ``transformers.Trainer``, which says this to its callbacks; Lightning never does."""
        from lightning_dp.isolation.requirements import MisconfigurationError

        raise MisconfigurationError(
            "DifferentialPrivacy was given to transformers.Trainer, which chooses the batches, divides "
            "the loss and steps by itself, so no ε would hold. Put the model into a LightningModule and "
            "give the callback to lightning.Trainer(callbacks=[...]).",
            topic="transformers-trainer",
        )

    @property
    def config(self) -> PrivacyConfig:
        """The arguments, checked; :func:`lightning_dp.audit.audit` takes it."""
        return self._run.config

    @property
    def epsilon(self) -> float:
        """ε spent so far at ``target_delta``, ``other_releases`` included; inf without noise."""
        return self._run.epsilon

    def epsilon_at(self, delta: float) -> float:
        """ε spent so far at another δ."""
        return self._run.epsilon_at(delta)

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier of the latest step (before it, the first); None if not calibrated."""
        return self._run.noise_multiplier

    @property
    def steps(self) -> int:
        """Noised steps charged so far."""
        return self._run.steps

    def report(self) -> PrivacyReport:
        """Return the claims that this run allows; ``print`` it, or take ``to_dict()``."""
        from lightning_dp.report.run_report import report_of_run

        return report_of_run(self._run)
