"""The interface of gradient engines: they answer for each record of the batch that was just run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp._refusals import UnsupportedModelError
from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.gradients.batches import SampleBatch

__all__ = [
    "ALONE",
    "AbstractGradientEngine",
    "Around",
    "Forward",
    "UncoveredParameterError",
    "UnsupportedModelError",
    "as_unsupported",
    "number_of_records",
    "without_alone",
]

Forward: TypeAlias = Callable[[Any], Any]

# Is entered with the recorder of a part of a batch and the places of its samples.
Around: TypeAlias = Callable[[Any, Tensor], AbstractContextManager[object]]

ALONE = "Or run each record alone with engine='one_by_one' (slow)."
"""The last cure of what cannot be taken apart into records."""


def without_alone(refusal: str) -> str:
    """Return a refusal without that cure, which manual optimization does not have.

    Example:
        >>> without_alone(f"Layer net.0 is frozen. {ALONE}")
        'Layer net.0 is frozen.'
    """
    return refusal.replace(ALONE, "").rstrip()


class UncoveredParameterError(UnsupportedModelError):
    """A parameter is used where no engine can see it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"Parameters {list(names)} received a gradient but no gradient per record. They are used "
            "outside the forward() of the module that owns them (for a parameter directly on the "
            "LightningModule: call self(x)), their module is in eval mode or compiled, or its "
            f"layer is not called as a module, or training_step differentiates a gradient (a penalty "
            "on it: clip the weights after the step instead). Move them into a separate layer. "
            f"{ALONE}",
            topic="unseen-use",
        )


class as_unsupported:
    """Turn what code for gradients per record raises into a refusal that names the layer.

    Args:
        name: of the layer in the model.
        layer: whose gradients they are.
    """

    def __init__(self, name: str, layer: nn.Module) -> None:
        self._name, self._layer = name, layer

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(
            error, MemoryError | torch.OutOfMemoryError
        ):
            return
        name, kind = self._name, type(error).__name__
        if isinstance(error, UnsupportedModelError):
            if name in error.text:
                return
            raise UnsupportedModelError(f"{name}: {error.text}", topic=error.topic) from None
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(self._layer).__name__}): per-record gradients cannot be "
            f"computed from its calls ({kind}). Give its parameters to layers of "
            "torch.nn that are called with one tensor, records first, or freeze it with "
            f"requires_grad_(False). {ALONE}",
            topic="unsupported-layer",
        ) from None  # torch's own words tell sizes of a batch, which is private


def number_of_records(rows_seen: Collection[int]) -> int:
    """Return n from the numbers of rows that the layers saw; 0 if there are none.

    Raises:
        UnsupportedModelError: if they differ, since rows are not records then.
    """
    if len(set(rows_seen)) > 1:
        raise UnsupportedModelError(
            "Some layers see more rows than there are records (the model folds another dimension "
            "into the batch, or is not batch-first), so a record's gradient cannot be bounded. "
            "Keep records in the first dimension of every layer's input, one row each. Position ids "
            f"without a row for each record train with engine='auto'. {ALONE}",
            topic="rows-and-records",
        )
    return max(rows_seen, default=0)


class AbstractGradientEngine(ABC):
    """Watches a model's ordinary forward and backward passes, and keeps what each record did.

    Between :meth:`attach` and :meth:`detach` it may hang hooks on the model, while it does not
    :meth:`rest`; afterwards nothing of it is left there, nor on copies that were made of the model.
    """

    name: str

    has_products: ClassVar[bool] = False
    """True if :meth:`along` answers."""

    keeps_compiled = False
    """True if it is right about models of which frozen modules run compiled: it counts all uses."""

    one_record: ClassVar[bool] = False
    """True if records run alone, one after the other."""

    isolates: ClassVar[bool] = False
    """True if records cannot mix in ``training_step``, by construction."""

    @abstractmethod
    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        """Start watching.

        Args:
            module: the whole model.
            params: the parameters that are trained, in the order of flat vectors.

        Raises:
            UnsupportedModelError: naming the layers that cannot be handled, and the cure.
        """

    @abstractmethod
    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        """Run the backward pass of a loss, in the place of ``loss.backward()``.

        Args:
            loss: the mean over the records of the batch.
            keep_graph: the graph is going to be used once more.
            combined: the gradients will be combined with others at a point nearby, which takes
                what they are made from.
        """

    def run(self, forward: Forward, batch: SampleBatch, around: Around | None = None) -> Any:
        """Run the forward pass of a batch, watched; return what it returns for the whole batch.

        Args:
            forward: of what ``training_step`` takes as a batch.
            batch: goes in.
            around: is entered around each part of the batch that runs together, by engines that run
                parts of it.
        """
        return forward(batch.value)

    def repeating(self) -> AbstractContextManager[None]:
        """Let checkpoints of a watched model run parts of it again, in somebody else's pass."""
        return nullcontext()

    def outputs_of_layers(self) -> Collection[Any]:
        """Return the graph nodes that made the outputs of trained layers in the last forward pass.

        Full backward hooks on modules show by themselves where their outputs are.
        """
        return ()

    @abstractmethod
    def take(self, scale: float) -> AbstractPerSampleGradients:
        """Hand over, once, the per-sample gradients of the last backward pass.

        The loss must have been the mean over the records of the batch.

        Args:
            scale: what to multiply with, to undo a division of the loss.

        Raises:
            UnsupportedModelError: if a parameter that was used has no gradient per record.
        """

    def along(
        self,
        run_again: Callable[[], Tensor],
        direction: Tensor,
        weights: tuple[float, float],
    ) -> AbstractPerSampleGradients:
        """Return w g_i + w' H_i u of each record, from one more run.

        Args:
            run_again: runs the batch and returns the loss, the mean over the records.
            direction: u, flat.
            weights: w and w'.

        Raises:
            UnsupportedModelError: if the model has no such products.
        """
        raise UnsupportedModelError(
            f"The engine {self.name!r} has no Hessian-vector products.", topic="hessian-products"
        )

    @abstractmethod
    def drop(self) -> None:
        """Forget forward passes without a backward one (``training_step`` returned None)."""

    def rest(self) -> None:  # noqa: B027 (an engine without hooks has none to take off)
        """Take all hooks off the model until :meth:`wake`; what was seen is kept."""

    def wake(self) -> None:  # noqa: B027
        """Watch the model again."""

    @abstractmethod
    def detach(self) -> None:
        """Stop watching and leave the model as it was. May be called twice."""
