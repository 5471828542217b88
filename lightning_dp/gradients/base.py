"""The interface of gradient engines, and their refusals of what cannot be taken apart into records."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from lightning_dp._refusals import RefusedRun, UnsupportedModelError
from lightning_dp._world import is_sharded
from lightning_dp.gradients.batches import SampleBatch

__all__ = [
    "ALONE",
    "OTHER_ROWS",
    "UNANSWERED",
    "AbstractGradientEngine",
    "AbstractPerSampleGradients",
    "Around",
    "Forward",
    "OtherRowsError",
    "UncoveredParameterError",
    "UnsupportedModelError",
    "as_unsupported",
    "is_flat_sharded",
    "is_fully_sharded",
    "number_of_records",
    "refuse_complex",
    "refuse_sharded",
    "refuse_special",
    "refuse_without_records",
    "without_alone",
]

Forward: TypeAlias = Callable[[Any], Any]

# Is entered with the recorder of a part of a batch and the places of its samples.
Around: TypeAlias = Callable[[Any, Tensor], AbstractContextManager[object]]

ALONE = "Or run each record alone with engine='one_by_one' (slow), if one alone has a useful loss."
"""The last cure of what cannot be taken apart into records."""

UNANSWERED = (
    "{} gave no gradient for a chunk that has records (training_step returned no loss, nothing was "
    "back-propagated, or the loss does not depend on trained layers), and noise alone in its place "
    "would tell which records do that. Let the package zero records whose gradients are not finite: "
    "return the loss as it is, and don't skip batches."
)
OTHER_ROWS = (
    "the model saw more or fewer rows than the batch has records, so a record's gradient cannot be "
    "bounded. The collate_fn must make exactly one row of each record, and the model must keep "
    f"records in the first dimension. {ALONE}"
)


class AbstractPerSampleGradients(ABC):
    """The gradients of the records of one chunk, held in whatever form an engine likes."""

    @property
    @abstractmethod
    def count(self) -> int:
        """n, the number of records."""

    @abstractmethod
    def norms(self) -> Tensor:
        """L2 norm of each record's gradient over all parameters, shape (n,)."""

    def norms_by_parameter(self) -> Tensor:
        """L2 norm of each record's gradient for each trained parameter, shape (n, parameters)."""
        raise UnsupportedModelError(
            f"{type(self).__name__} has norms of whole gradients only, and clipping=PerGroup(...) needs "
            "those of each parameter. Use another rule, or another engine.",
            topic="engines",
        )

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``sum_i weights[i] * g_i`` as a flat vector; may be asked for once, after the norms.

        A record of weight 0 contributes exactly 0, also when its gradient is not finite. Weights of
        shape (n, parameters) are one for each record and parameter, where the norms are known so.
        """

    def sums_by_parameter(self, weights: Tensor) -> Iterator[Tensor]:
        """Yield it in parts, flat and in order, each in memory that the next one may use again."""
        yield self.weighted_sum(weights)

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        """Add it to a flat vector, with no other vector of the model's size where an engine can."""
        onto.add_(self.weighted_sum(weights))

    def restrict(self, coordinates: Tensor) -> AbstractPerSampleGradients:
        """Each record's gradient at some coordinates only: sorted, distinct places of flat vectors.

        The result holds n vectors of their number in memory.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be restricted to coordinates.")

    def discard(self) -> None:  # noqa: B027 (most hold no memory that others use again)
        """Give back what is used again, where no sum is going to be asked for."""

    @abstractmethod
    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> AbstractPerSampleGradients:
        """Per record: ``weight * g_i + sum_k weight_k * other_k_i``, before any clipping.

        The others are of the same records, taken at other points by the same engine. The memory of
        this object may be used for the result.
        """


class AbstractGradientEngine(ABC):
    """Watches a model's ordinary forward and backward passes, and keeps what each record did.

    Outside of :meth:`watching` nothing of it is on the model, nor on copies that were made of it.

    Args:
        module: the whole model.
        params: trained, in the order of flat vectors.

    Raises:
        UnsupportedModelError: naming the layers that cannot be handled, and the cure.
    """

    name: str

    has_products: ClassVar[bool] = False
    """True if :meth:`along` answers."""

    one_record: ClassVar[bool] = False
    """True if records run alone, one after the other."""

    takes_shards: ClassVar[bool] = False
    """True if each process may hold a part of each parameter; then ``units`` are an argument, too."""

    isolates = False
    """True if records cannot mix in ``training_step``, by construction."""

    loss_scale = 1.0
    """Of each record's own loss, for an engine that goes back from it; divided out again."""

    has_asked = True
    """False if it is known that ``training_step`` asked for no record's value in the latest pass."""

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self._module, self._params = module, tuple(params)

    @property
    def runs_parts(self) -> bool:
        """True if records run alone, but parts of a batch together (``around`` of :meth:`run`)."""
        return self.isolates and not self.one_record

    @abstractmethod
    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        """Run the backward pass of a loss, the mean over the records, as ``loss.backward()`` does.

        Args:
            loss: of the last forward pass.
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
        with self.watching():
            return forward(batch.value)

    def watching(self) -> AbstractContextManager[None]:
        """Inside, forward passes of the model are seen."""
        return nullcontext()

    def repeating(self) -> AbstractContextManager[None]:
        """Let checkpoints of a watched model run parts of it again, in somebody else's pass."""
        return nullcontext()

    def outputs_of_layers(self) -> Collection[Any]:
        """Return the graph nodes that made the outputs of trained layers in the last forward pass."""
        return ()

    _found: Callable[[float], AbstractPerSampleGradients] | None = None  # of a backward pass

    def take(self, scale: float) -> AbstractPerSampleGradients:
        """Hand over, once, the per-sample gradients of the last backward pass, times ``scale``.

        Raises:
            UnsupportedModelError: if a parameter that was used has no gradient per record.
        """
        found, self._found = self._found, None
        if found is None:
            raise RefusedRun(
                f"{type(self).__name__}.backward() must come before take().", topic="out-of-order"
            )
        return found(scale)

    def along(
        self, run_again: Callable[[], Tensor], direction: Tensor, weights: tuple[float, float]
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

    def drop(self) -> None:
        """Forget forward passes without a backward one (``training_step`` returned None)."""
        self._found = None


# -- refusals -------------------------------------------------------------------------------------


def without_alone(refusal: str) -> str:
    """Return a refusal without that cure, which manual optimization does not have.

    Example:
        >>> without_alone(f"Layer net.0 is frozen. {ALONE}")
        'Layer net.0 is frozen.'
    """
    return refusal.replace(ALONE, "").rstrip()


class OtherRowsError(UnsupportedModelError):
    """The model saw another number of rows than the chunk has records."""

    def __init__(self) -> None:
        super().__init__(f"{OTHER_ROWS[0].upper()}{OTHER_ROWS[1:]}", topic="rows-and-records")


class UncoveredParameterError(UnsupportedModelError):
    """A parameter is used where no engine can see it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"Parameters {list(names)} received a gradient but no gradient per record. They are used "
            "outside the forward() of the module that owns them (for a parameter directly on the "
            "LightningModule: call self(x)), their module is compiled, or its layer is not called as "
            "a module, or training_step differentiates a gradient (a penalty on it: clip the weights "
            f"after the step instead). Move them into a separate layer. {ALONE}",
            topic="unseen-use",
        )


def as_unsupported(error: Exception, name: str, layer: nn.Module) -> Exception:
    """Return what code for gradients per record raised as a refusal that names the layer.

    It is to be raised ``from None``: torch's own words tell sizes of a batch, which is private.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return error
    if isinstance(error, UnsupportedModelError):
        is_named = name in error.text
        text = f"{name}: {error.text}"
        return error if is_named else UnsupportedModelError(text, topic=error.topic)
    return UnsupportedModelError(
        f"{name or 'The module'} ({type(layer).__name__}): per-record gradients cannot be "
        f"computed from its calls ({type(error).__name__}). Give its parameters to layers of "
        "torch.nn that are called with one tensor, records first, or freeze it with "
        f"requires_grad_(False). {ALONE}",
        topic="unsupported-layer",
    )


def number_of_records(rows_seen: Collection[int]) -> int:
    """Return n from the numbers of rows that the layers saw, which must agree; 0 if there are none."""
    if len(set(rows_seen)) > 1:
        raise UnsupportedModelError(
            "Some layers see more rows than there are records (the model folds another dimension "
            "into the batch, or is not batch-first), so a record's gradient cannot be bounded. "
            "Keep records in the first dimension of every layer's input, one row each. Position ids "
            f"without a row for each record train with engine='auto'. {ALONE}",
            topic="rows-and-records",
        )
    return max(rows_seen, default=0)


def refuse_sharded(module: nn.Module) -> None:
    """Refuse models of which each process holds a part: forward passes use other parameters."""
    named = module.named_parameters()
    names = [name for name, param in named if type(param.data).__name__ == "DTensor"]
    names += [
        name
        for name, part in module.named_modules()
        if is_fully_sharded(part) or is_flat_sharded(part)
    ]
    if names:
        raise UnsupportedModelError(
            f"{_some(names)} of the model are sharded (fully_shard, FSDP or another use of DTensor): "
            "its layers use other tensors than its parameters, so per-record gradients cannot be "
            "computed this way. Shard it by fully_shard() in configure_model, under Lightning's "
            "ModelParallelStrategy and engine='layers', or leave it whole: strategy='ddp'.",
            topic="sharded",
        )


def is_fully_sharded(part: nn.Module) -> bool:
    """Tell whether ``fully_shard`` (FSDP2) shards a module."""
    return _is_of_fsdp("FSDPModule", part)


def is_flat_sharded(part: nn.Module) -> bool:
    """Tell whether a module is a ``FullyShardedDataParallel`` (FSDP1)."""
    return _is_of_fsdp("FullyShardedDataParallel", part)


def _is_of_fsdp(name: str, part: nn.Module) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)  # imported if it is one
    return kind is not None and isinstance(part, kind)


def refuse_special(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Refuse trained modules of TorchScript and parameters of special classes (quantised ones, say)."""
    for name, part in module.named_modules():
        is_trained = any(param.requires_grad for param in part.parameters())
        if is_trained and isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{name or 'The module'} is a module of TorchScript (torch.jit), and hooks do not see "
                "into the graph that runs. Train the nn.Module it was made from, and script that after "
                "the fit; or freeze its parameters: for p in module.parameters(): "
                "p.requires_grad_(False).",
                topic="torchscript",
            )
    trained = {id(param) for param in params}
    named = [(name, param) for name, param in module.named_parameters() if id(param) in trained]
    kinds = {
        name: type(param.data).__name__
        for name, param in named
        if not (is_lazy(param) or is_sharded(param)) and type(param.data) is not Tensor
    }
    if kinds:
        raise UnsupportedModelError(
            f"{_some(list(kinds))} are trained and of the class {', '.join(sorted({*kinds.values()}))}, "
            "whose gradients per record are not known. Freeze them with requires_grad_(False) and train "
            "plain parameters next to them (LoRA), or make them plain tensors.",
            topic="special-parameters",
        )


def refuse_complex(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Refuse trained complex parameters: their gradients take conjugates, which no rule does."""
    trained = {id(param) for param in params}
    named = module.named_parameters()
    names = [name for name, param in named if id(param) in trained and param.is_complex()]
    if names:
        raise UnsupportedModelError(
            f"{_some(names)} are complex. Leave the engine at 'auto', or keep their real and imaginary "
            "parts in one real parameter, torch.view_as_real(weight), and use "
            "torch.view_as_complex(parameter) in forward().",
            topic="special-parameters",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"Parameters {[name or 'the module' for name in names[:5]]}{more}"


def _dimensions(layer: nn.Module) -> int:
    """Return how many dimensions the input has at least, of records in the first one."""
    if isinstance(layer, nn.Linear | nn.Bilinear | nn.GroupNorm | nn.RNNCellBase):
        return 2
    if isinstance(layer, _ConvNd | _ConvTransposeNd):
        return 2 + len(layer.kernel_size)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return 1 + len(layer.normalized_shape)
    for places, kind in enumerate((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), 1):
        if isinstance(layer, kind):
            return 2 + places
    return 1


def refuse_without_records(name: str, layer: nn.Module, given: Any) -> None:
    """Refuse a call of a layer whose first input has no dimension for records."""
    if isinstance(given, Tensor) and given.dim() < (least := _dimensions(layer)):
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) was called with a tensor of "
            f"{given.dim()} dimensions, where {least} are needed, the first for the records. "
            "Call it once with all records of the batch, without a loop over them; for one record, "
            f"with x.unsqueeze(0). {ALONE}",
            topic="rows-and-records",
        )
