"""One call of a function in which a parameter meets records, and its derivative for each record."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import jvp, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_dp._precision import has_float64
from lightning_dp.gradients.base import ALONE, UnsupportedModelError
from lightning_dp.gradients.hessian import Dual
from lightning_dp.gradients.layouts import Layout, name_of_function
from lightning_dp.gradients.parts import Part
from lightning_dp.gradients.surroundings import Surroundings

__all__ = ["Found", "FunctionCall", "Given"]

_RECURRENT = (" lstm()", " gru()", " rnn_tanh()", " rnn_relu()")
_FIX = " lightning_dp.fix(model) puts a layer of Opacus in its place, whose records are kept apart."


@dataclass(frozen=True)
class Given:
    """A tensor that a function was called with.

    Args:
        place: among the leaves of the arguments.
        tensor: cut off from the graph.
        part: if it was computed from parameters alone.
        layout: of the records that it holds; None for a constant, and for a part.
        version: of the tensor when the function had been called.
        total: the call that made it a sum over the records, where it holds them no longer.
        is_lost: it was computed from records, and in which place it holds whose is not known.
    """

    place: int
    tensor: Tensor
    part: Part | None
    layout: Layout | None
    version: int
    total: FunctionCall | None = None
    is_lost: bool = False


@dataclass(frozen=True)
class Found:
    """The gradients per record with respect to a part, of one call.

    Args:
        part: is used.
        gradients: shape (n, *part's shape).
        own: None if every record uses all of the part; else where each record has its entries, and
            gradients are there for these alone.
    """

    part: Part
    gradients: Tensor
    own: Layout | None = None


@dataclass
class FunctionCall:
    """A function with its arguments, until the backward pass comes to its outputs.

    Args:
        function: of torch.
        leaves: of ``(args, kwargs)``; tensors are in ``given``.
        spec: puts the leaves together again.
        given: the tensors among the leaves.
        outputs: its tensors, cut off from the graph.
        layouts: the places of the records in the outputs.
        edges: of the outputs; None for those without a gradient.
        sources: the graph nodes that made the tensors among the arguments; those of parts first.
        part_sources: those that made the parts.
        n: the number of records.
        surroundings: for running it again.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    given: list[Given]
    outputs: list[Tensor]
    layouts: list[Layout | None]
    edges: list[GradientEdge | None]
    sources: set[Any]
    part_sources: set[Any]
    n: int
    surroundings: Surroundings
    moved: dict[int, Tensor] = field(default_factory=dict)  # along a direction: derivatives

    @property
    def name(self) -> str:
        """The names of the parameters and of the function."""
        names = sorted({name for each in self.parts for name in each.part.names})  # type: ignore[union-attr]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more} in {name_of_function(self.function)}()"

    @property
    def parts(self) -> list[Given]:
        """The tensors that come from parameters alone."""
        return [each for each in self.given if each.part is not None]

    def check_unchanged(self) -> None:
        """Raise UnsupportedModelError if a tensor was overwritten after the call."""
        if any(each.tensor._version != each.version for each in self.given):
            raise UnsupportedModelError(
                f"A tensor that met {self.name} was overwritten afterwards. Do not change tensors in "
                "place between layers.",
                topic="overwritten-tensors",
            )

    def keep_own(self, storage: int) -> None:
        """Copy the tensors of a storage that is about to be overwritten, after checking them."""
        self.check_unchanged()

        def is_there(tensor: Tensor) -> bool:
            return tensor.untyped_storage().data_ptr() == storage

        for i, each in enumerate(self.given):
            if is_there(each.tensor):
                copy = each.tensor.clone()
                self.given[i] = replace(each, tensor=copy, version=copy._version)
        self.outputs = [each.clone() if is_there(each) else each for each in self.outputs]

    def per_record(self, gradients: Sequence[Tensor | None]) -> list[Found]:
        """Return the gradients per record of every part, from those of the outputs.

        The function runs once more for each record, as a batch of one, with its own entries of what
        holds records and all of the rest. What comes out must be what the record had in the outputs.

        Raises:
            UnsupportedModelError: if it is not, or if torch.func cannot run the function.
        """
        self.check_unchanged()
        self._refuse_freed()
        self._refuse_rows_in_totals()
        backs = self._records_first(gradients)
        problems: list[Exception] = []
        for own in self._assignments():
            try:
                outputs, found = self._run(own, backs)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                problems.append(error)
                continue
            share = self._share([i for i, _ in backs], outputs)
            if share is not None:
                return self._found(own, found if share == 1 else [share * each for each in found])
        raise self._refusal(problems)

    def _refuse_freed(self) -> None:
        """Refuse what torch's sharding has let go of: the function cannot run once more with it."""
        if any(each.tensor.numel() and not _has_memory(each.tensor) for each in self.given):
            raise UnsupportedModelError(
                f"{self.name} used a sharded parameter that is not whole any longer when the backward "
                "pass comes there. Use it in the forward() of the module that has it.",
                topic="sharded",
            )

    def _refuse_rows_in_totals(self) -> None:
        """Refuse a mean over rows that do not come from the records, joined with a mean over these.

        Whose rows they are is not known, and with a share of that mean for each record, gradients
        would follow the number of the others.
        """
        if any(each.total is not None for each in self.given) and any(
            each.part is not None and each.part.has_rows for each in self.given
        ):
            raise UnsupportedModelError(
                f"{self.name} brings the loss of the records together with one of rows that do not "
                "come from them (noise, negatives), and whose these are is not known. Make them like "
                "the records' tensor (torch.randn_like(x)), or take the loss of each record with its row "
                f"first, and then the mean. {ALONE}",
                topic="rows-and-records",
            )

    def along(self, gradients: Sequence[Dual | None], weights: tuple[float, float]) -> list[Found]:
        """Return w c_i + w' ċ_i of every part, with ċ the derivative along a direction.

        Raises:
            UnsupportedModelError: as :meth:`per_record`; also if a part is no linear function of the
                parameters, whose own derivative changes along the direction.
        """
        for each in self.parts:
            if each.part is not None and not each.part.is_linear:
                raise UnsupportedModelError(
                    f"{self.name}: what is computed from the parameters before it meets the records is "
                    "no linear function of them, and has no Hessian-vector products here. Use an "
                    "estimator without Hessians.",
                    topic="hessian-products",
                )
        values = [None if each is None else each[0] for each in gradients]
        backs = self._records_first(values)
        changes = dict(self._records_first([None if e is None else e[1] for e in gradients]))
        for own in self._assignments():
            try:
                outputs, found = self._run(own, backs, changes)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            if self._share([i for i, _ in backs], outputs) == 1:
                half = len(found) // 2
                total = [
                    weights[0] * value + weights[1] * change
                    for value, change in zip(found[:half], found[half:], strict=True)
                ]
                return self._found(own, total)
        raise self._refusal([])

    def _records_first(self, gradients: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
        return [
            (
                i,
                back.expand(self.n, *back.shape)
                if layout is None
                else layout.records_first(back, self.n),
            )
            for i, (back, layout) in enumerate(zip(gradients, self.layouts, strict=True))
            if back is not None
        ]

    def of_each_record(self) -> Tensor:
        """Return the values of which the only output is the mean over the records, one for each.

        Raises:
            UnsupportedModelError: if it is neither a mean nor a sum over the records.
        """
        if len(self.outputs) == 1 and self.outputs[0].is_floating_point():
            try:
                outputs, _ = self._run(
                    {}, [(0, self.outputs[0].expand(self.n, *self.outputs[0].shape))]
                )
            except (RuntimeError, ValueError, IndexError, TypeError):
                raise self._refusal([]) from None
            if (share := self._share([0], outputs)) is not None:
                return outputs[0] * (share * self.n)
        raise self._refusal([])

    def _found(self, own: Mapping[int, Layout], rows: Sequence[Tensor]) -> list[Found]:
        return [
            Found(each.part, each_rows, own.get(each.place))
            for each, each_rows in zip(self.parts, rows, strict=True)
            if each.part is not None
        ]

    def _assignments(self) -> Iterator[dict[int, Layout]]:
        """Yield guesses of which parts and constants hold entries for each record, none first.

        Of a guess that is wrong something else than the recorded output comes out.
        """
        yield {}
        first = next((each for each in self.given if each.layout is not None), None)
        if first is None or first.layout is None:
            return
        layout, dims = first.layout, first.tensor.dim()
        # Not a parameter itself: its rows would belong to places in the batch, and to no record.
        others = [
            each
            for each in self.given
            if each.layout is None and (each.part is None or each.part.param is None)
        ]
        tried: list[dict[int, Layout]] = []
        for rows in dict.fromkeys((layout, replace(layout, outer=1, inner=1))):
            # Aligned from the last dimension, as entries meet; from the first; then any one.
            aligned = {
                each.place: replace(rows, dim=rows.dim + each.tensor.dim() - dims)
                for each in others
                if rows.dim + each.tensor.dim() - dims >= 0
            }
            tried.append(aligned)
            for dim in range(max((each.tensor.dim() for each in others), default=0)):
                tried.append({each.place: replace(rows, dim=dim) for each in others})
        for guess in tried:
            fitting = {
                each.place: guess[each.place]
                for each in others
                if each.place in guess and guess[each.place].fits(each.tensor, self.n)
            }
            if fitting:
                yield fitting
            if len(fitting) > 1:
                yield from ({place: layout} for place, layout in fitting.items())

    def _run(
        self,
        own: Mapping[int, Layout],
        backs: Sequence[tuple[int, Tensor]],
        changes: Mapping[int, Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return each record's outputs, and its gradients of the parts.

        Args:
            own: parts and constants that hold entries for each record.
            backs: gradients of outputs.
            changes: derivatives of these along a direction; those of the gradients follow them then.
        """
        if any(each.is_lost for each in self.given):
            raise ValueError("A tensor holds records nobody knows where.")
        layouts = {each.place: each.layout or own.get(each.place) for each in self.given}
        wanted = [i for i, _ in backs]

        totals = {each.place: each.total for each in self.given if each.total is not None}

        def split(place: int, tensor: Tensor) -> Tensor:
            layout = layouts[place]
            return tensor if layout is None else layout.records_first(tensor, self.n)

        batched = [
            split(each.place, each.tensor)
            if (total := totals.get(each.place)) is None
            else total.of_each_record()
            for each in self.given
        ]
        is_split = {place for place, layout in layouts.items() if layout is not None} | set(totals)
        dims = [0 if each.place in is_split else None for each in self.given]
        inputs: list[Any] = [batched, [back for _, back in backs]]
        in_dims: list[Any] = [dims, 0]
        if changes is not None:
            places = [each.place for each in self.given]
            moved = [i for i, place in enumerate(places) if place in self.moved]
            inputs += [
                {i: split(places[i], self.moved[places[i]]) for i in moved},
                {k: changes[i] for k, i in enumerate(wanted) if i in changes},
            ]
            in_dims += [{i: dims[i] for i in moved}, 0]

        def of_record(tensors: list[Tensor], back: list[Tensor], *along: Any) -> Any:
            if not along:
                outputs, pull = self._pull(tensors, wanted)
                return outputs, pull(back)[0]
            return self._pull_along(wanted, tensors, back, *along)

        with self.surroundings.again(), torch.enable_grad():
            try:
                outputs, found = vmap(of_record, tuple(in_dims), randomness="different")(*inputs)
            except RuntimeError:
                outputs, found = self._one_by_one(of_record, inputs, in_dims)
        dense = (each.to_dense() if each.is_sparse else each for each in found)
        return [each.detach() for each in outputs], [each.detach() for each in dense]

    def _pull_along(
        self,
        wanted: Sequence[int],
        tensors: list[Tensor],
        back: list[Tensor],
        moved: dict[int, Tensor],
        changes: dict[int, Tensor],
    ) -> Any:
        """Return outputs, and the gradients of the parts followed by their derivatives."""

        def gradients(now: dict[int, Tensor], backs: dict[int, Tensor]) -> Any:
            inside = [now.get(i, each) for i, each in enumerate(tensors)]
            outputs, pull = self._pull(inside, wanted)
            return pull([backs.get(k, each) for k, each in enumerate(back)])[0], outputs

        here = {i: tensors[i] for i in moved}, {k: back[k] for k in changes}
        found, derivatives, outputs = jvp(  # type: ignore[misc]
            gradients, here, (moved, changes), has_aux=True
        )
        return outputs, [*found, *derivatives]

    def _one_by_one(
        self, of_record: Callable[..., Any], inputs: Sequence[Any], in_dims: Sequence[Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Do the same in a loop, for functions that cannot run for all records at once."""
        leaves, spec = tree_flatten(list(inputs))
        dims = [
            dim
            for each, given in zip(in_dims, inputs, strict=True)
            for dim in ([each] * len(given) if each == 0 else _values(each))
        ]
        found = []
        for record in range(self.n):
            own = [
                each if dim is None else each[record]
                for each, dim in zip(leaves, dims, strict=True)
            ]
            found.append(of_record(*tree_unflatten(own, spec)))
        outputs, gradients = zip(*found, strict=True)
        return (
            [torch.stack(each) for each in zip(*outputs, strict=True)],
            [torch.stack(each) for each in zip(*gradients, strict=True)],
        )

    def _pull(self, tensors: Sequence[Tensor], wanted: Sequence[int]) -> Any:
        """Run the function on one record; return outputs and the way back to the parts."""
        of_parts = [i for i, each in enumerate(self.given) if each.part is not None]

        def run(parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            now = list(tensors)
            for i, part in zip(of_parts, parts, strict=True):
                now[i] = part
            outputs = self.called_with(now)
            kept = [outputs[i] for i in wanted]
            return kept, kept

        _, pull, outputs = vjp(  # type: ignore[misc]
            run, [tensors[i] for i in of_parts], has_aux=True
        )
        return outputs, pull

    def called_with(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function with other tensors; return its tensors, as they are recorded."""
        leaves = list(self.leaves)
        for each, tensor in zip(self.given, tensors, strict=True):
            leaves[each.place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        if (target := in_place_target(self.function, args, kwargs)) is not None:
            copy = target.clone()
            result = self.function(copy, *args[1:], **kwargs)
            return [copy if result is None else result]
        return [
            each
            for each in tree_flatten(self.function(*args, **kwargs))[0]
            if isinstance(each, Tensor)
        ]

    def _share(self, wanted: Sequence[int], outputs: Sequence[Tensor]) -> float | None:
        """Return the share of its outputs that each record has in the recorded ones; None if they differ.

        1 where an output holds the records, or their sum; 1/n of a mean over them. Up to rounding, and
        without regard to records with non-finite outputs; it depends on the function and the guess.
        """
        shares = set()
        for i, output in zip(wanted, outputs, strict=True):
            layout, recorded = self.layouts[i], self.outputs[i]
            if layout is None:
                rows = recorded.reshape(1, -1)
                total = _wide(output).sum(0).reshape(1, -1).to(recorded.dtype)
                if _agree(rows, total / self.n):
                    shares.add(1 / self.n)
                elif _agree(rows, total):
                    shares.add(1.0)
                else:
                    return None
                continue
            rows = layout.records_first(recorded, self.n)
            if rows.shape != output.shape or not _agree(rows.flatten(1), output.flatten(1)):
                return None
            shares.add(1.0)
        return shares.pop() if len(shares) == 1 else None

    def _refusal(self, problems: Sequence[Exception]) -> UnsupportedModelError:
        kinds = ", ".join(map(_kind, self.given))
        why = f" ({type(problems[0]).__name__})" if problems else ""
        fix = _FIX if self.name.endswith(_RECURRENT) else ""
        return UnsupportedModelError(
            f"{self.name} was called with {kinds}, and cannot be run record by record with the same "
            f"result{why}. Let the parameters meet the records in a function that treats each record by "
            "itself, with the records in one dimension, before anything but a sum or a mean is taken "
            f"over them.{fix} {ALONE}",
            topic="unsupported-layer",
        )


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().size() > 0


def _kind(given: Given) -> str:
    """Return what a tensor is, in words that hold for every batch: its sizes may tell of the records."""
    if given.part is not None and given.part.param is not None:
        return f"a parameter of shape {tuple(given.tensor.shape)}"
    where = "" if given.layout is None else f" (records in dimension {given.layout.dim})"
    return f"a tensor of {given.tensor.dim()} dimensions{where}"


def _values(dims: Any) -> list[Any]:
    return list(dims.values()) if isinstance(dims, dict) else list(dims)


@cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    """Return the position of the argument ``inplace``; None for functions without it."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of functions that are not written in Python
        return None
    return names.index("inplace") if "inplace" in names else None


def in_place_target(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the tensor that a function changes; None for one that makes a new one."""
    name = name_of_function(function)
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    is_in_place |= name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    if not is_in_place and (place := _place_of_inplace(function)) is not None:
        is_in_place = bool(kwargs.get("inplace", args[place] if len(args) > place else False))
    if is_in_place and args and isinstance(args[0], Tensor):
        return args[0]
    return None


def _wide(tensor: Tensor) -> Tensor:
    """Return float64 where the device has that: what is compared is compared by few digits."""
    if not has_float64(tensor.device.type):
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _agree(recorded: Tensor, found: Tensor) -> bool:
    """True if the entries of all finite rows are equal, relative to the largest of their row."""
    if not recorded.numel():
        return True
    has_digits = recorded.is_floating_point() or recorded.is_complex()
    tolerance = torch.finfo(recorded.dtype).eps ** 0.5 if has_digits else 0.0
    recorded, found = _wide(recorded), _wide(found)
    largest = recorded.abs().amax(1, keepdim=True)
    is_equal = (recorded - found).abs() <= tolerance * largest
    return bool((is_equal | ~torch.isfinite(largest)).all())
