"""A recorded call of a function, run once more for each record: the gradients of its parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_dp.gradients.base import ALONE, UnsupportedModelError
from lightning_dp.gradients.bilinear import AbstractFolding
from lightning_dp.gradients.function_call import FunctionCall, Given
from lightning_dp.gradients.guessed_places import guesses, share_of_each
from lightning_dp.gradients.hessian import Dual
from lightning_dp.gradients.layouts import Layout
from lightning_dp.gradients.parts import Part

__all__ = ["Found", "per_record", "per_record_along"]

_RECURRENT = (" lstm()", " gru()", " rnn_tanh()", " rnn_relu()")
_FIX = " lightning_dp.fix(model) puts a layer of Opacus in its place, whose records are kept apart."


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


def per_record(call: FunctionCall, gradients: Sequence[Tensor | None]) -> list[Found]:
    """Return the gradients per record of every part, from those of the outputs.

    The function runs once more for each record, as a batch of one, with its own entries of what
    holds records and all of the rest. What comes out must be what the record had in the outputs.

    Raises:
        UnsupportedModelError: if it is not, or if torch.func cannot run the function.
    """
    call.check_unchanged()
    if not call.n:  # of no row there is nothing
        empty = [each.tensor.new_zeros(0, *each.tensor.shape) for each in call.parts]
        return _found(call, {}, empty)
    _refuse_freed(call)
    _refuse_rows_in_totals(call)
    backs = _records_first(call, gradients)
    problems: list[Exception] = []
    for own in guesses(call):
        try:
            outputs, found = _run(call, own, backs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            problems.append(error)
            continue
        share = share_of_each(call, [i for i, _ in backs], outputs)
        if share is not None:
            return _found(call, own, found if share == 1 else [share * each for each in found])
    raise _refusal(call, problems)


def _refuse_freed(call: FunctionCall) -> None:
    """Refuse what torch's sharding has let go of: the function cannot run once more with it."""
    if any(each.tensor.numel() and not _has_memory(each.tensor) for each in call.given):
        raise UnsupportedModelError(
            f"{call.name} used a sharded parameter that is not whole any longer when the backward "
            "pass comes there. Use it in the forward() of the module that has it.",
            topic="sharded",
        )


def _refuse_rows_in_totals(call: FunctionCall) -> None:
    """Refuse a mean over rows that do not come from the records, joined with a mean over these.

    Whose rows they are is not known, and with a share of that mean for each record, gradients
    would follow the number of the others.
    """
    if any(each.total is not None for each in call.given) and any(
        each.part is not None and each.part.has_rows for each in call.given
    ):
        raise UnsupportedModelError(
            f"{call.name} brings the loss of the records together with one of rows that do not "
            "come from them (noise, negatives), and whose these are is not known. Make them like "
            "the records' tensor (torch.randn_like(x)), or take the loss of each record with its row "
            f"first, and then the mean. {ALONE}",
            topic="rows-and-records",
        )


def per_record_along(
    call: FunctionCall, gradients: Sequence[Dual | None], weights: tuple[float, float]
) -> list[Found]:
    """Return w c_i + w' ċ_i of every part, with ċ the derivative along a direction.

    Raises:
        UnsupportedModelError: as :func:`per_record`; also if a part is no linear function of the
            parameters, whose own derivative changes along the direction.
    """
    for each in call.parts:
        if each.part is not None and not each.part.is_linear:
            raise UnsupportedModelError(
                f"{call.name}: what is computed from the parameters before it meets the records is "
                "no linear function of them, and has no Hessian-vector products here. Use an "
                "estimator without Hessians.",
                topic="hessian-products",
            )
    values = [None if each is None else each[0] for each in gradients]
    backs = _records_first(call, values)
    changes = dict(_records_first(call, [None if e is None else e[1] for e in gradients]))
    for own in guesses(call):
        try:
            outputs, found = _run(call, own, backs, changes)
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
        if share_of_each(call, [i for i, _ in backs], outputs) == 1:
            half = len(found) // 2
            total = [
                weights[0] * value + weights[1] * change
                for value, change in zip(found[:half], found[half:], strict=True)
            ]
            return _found(call, own, total)
    raise _refusal(call, [])


def _records_first(
    call: FunctionCall, gradients: Sequence[Tensor | None]
) -> list[tuple[int, Tensor]]:
    return [
        (
            i,
            back.expand(call.n, *back.shape)
            if layout is None
            else layout.records_first(back, call.n),
        )
        for i, (back, layout) in enumerate(zip(gradients, call.layouts, strict=True))
        if back is not None
    ]


def _of_each_record(call: FunctionCall) -> Tensor:
    """Return the values of which the only output is the mean over the records, one for each.

    Raises:
        UnsupportedModelError: if it is neither a mean nor a sum over the records.
    """
    if len(call.outputs) == 1 and call.outputs[0].is_floating_point():
        try:
            outputs, _ = _run(
                call, {}, [(0, call.outputs[0].expand(call.n, *call.outputs[0].shape))]
            )
        except (RuntimeError, ValueError, IndexError, TypeError):
            raise _refusal(call, []) from None
        if (share := share_of_each(call, [0], outputs)) is not None:
            return outputs[0] * (share * call.n)
    raise _refusal(call, [])


def _found(call: FunctionCall, own: Mapping[int, Layout], rows: Sequence[Tensor]) -> list[Found]:
    found = [
        Found(each.part, each_rows, own.get(each.place))
        for each, each_rows in zip(call.parts, rows, strict=True)
        if each.part is not None
    ]
    return found if call.folding is None else [_of_owners(each, call.folding) for each in found]


def _of_owners(found: Found, folding: AbstractFolding) -> Found:
    """Return the gradients of records, from those of rows."""
    rows = found.gradients if found.own is None else found.own.in_whole(found.gradients)
    return Found(found.part, folding.sums(rows))


@contextmanager
def _without_slow_batching() -> Iterator[None]:
    """Inside, torch does not warn that it goes through the records one by one for some operation."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


def _run(
    call: FunctionCall,
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
    inputs, in_dims = _of_records(call, own, backs, changes)
    wanted = [i for i, _ in backs]

    def of_record(tensors: list[Tensor], back: list[Tensor], *derivatives: Any) -> Any:
        if not derivatives:
            outputs, pull = _pull(call, tensors, wanted)
            return outputs, pull(back)[0]
        return _pull_along(call, wanted, tensors, back, *derivatives)

    with call.surroundings.again(), torch.enable_grad(), _without_slow_batching():
        try:
            outputs, found = vmap(of_record, tuple(in_dims), randomness="different")(*inputs)
        except RuntimeError:
            outputs, found = _one_by_one(call, of_record, inputs, in_dims)
    dense = (each.to_dense() if each.is_sparse else each for each in found)
    return [each.detach() for each in outputs], [each.detach() for each in dense]


def _of_records(
    call: FunctionCall,
    own: Mapping[int, Layout],
    backs: Sequence[tuple[int, Tensor]],
    changes: Mapping[int, Tensor] | None,
) -> tuple[list[Any], list[Any]]:
    """Return what a run takes, records first, and which of it holds them: 0, or None for a constant."""
    if any(each.is_lost for each in call.given):
        raise ValueError("A tensor holds records nobody knows where.")
    layouts = {each.place: each.layout or own.get(each.place) for each in call.given}
    totals = {each.place: each.total for each in call.given if each.total is not None}

    def split(place: int, tensor: Tensor) -> Tensor:
        layout = layouts[place]
        return tensor if layout is None else layout.records_first(tensor, call.n)

    batched = [
        split(each.place, each.tensor)
        if (total := totals.get(each.place)) is None
        else _of_each_record(total)
        for each in call.given
    ]
    is_split = {place for place, layout in layouts.items() if layout is not None} | set(totals)
    dims = [0 if each.place in is_split else None for each in call.given]
    inputs: list[Any] = [batched, [back for _, back in backs]]
    in_dims: list[Any] = [dims, 0]
    if changes is not None:
        places = [each.place for each in call.given]
        moved = [i for i, place in enumerate(places) if place in call.moved]
        inputs += [
            {i: split(places[i], call.moved[places[i]]) for i in moved},
            {k: changes[i] for k, (i, _) in enumerate(backs) if i in changes},
        ]
        in_dims += [{i: dims[i] for i in moved}, 0]
    return inputs, in_dims


def _pull_along(
    call: FunctionCall,
    wanted: Sequence[int],
    tensors: list[Tensor],
    back: list[Tensor],
    moved: dict[int, Tensor],
    changes: dict[int, Tensor],
) -> Any:
    """Return outputs, and the gradients of the parts followed by their derivatives."""

    def gradients(now: dict[int, Tensor], backs: dict[int, Tensor]) -> Any:
        inside = [now.get(i, each) for i, each in enumerate(tensors)]
        outputs, pull = _pull(call, inside, wanted)
        return pull([backs.get(k, each) for k, each in enumerate(back)])[0], outputs

    here = {i: tensors[i] for i in moved}, {k: back[k] for k in changes}
    found, derivatives, outputs = jvp(  # type: ignore[misc]
        gradients, here, (moved, changes), has_aux=True
    )
    return outputs, [*found, *derivatives]


def _one_by_one(
    call: FunctionCall, of_record: Callable[..., Any], inputs: Sequence[Any], in_dims: Sequence[Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Do the same in a loop, for functions that cannot run for all records at once."""
    leaves, spec = tree_flatten(list(inputs))
    dims = [
        dim
        for each, given in zip(in_dims, inputs, strict=True)
        for dim in ([each] * len(given) if each == 0 else _values(each))
    ]
    found = []
    for record in range(call.n):
        own = [
            each if dim is None else each[record] for each, dim in zip(leaves, dims, strict=True)
        ]
        found.append(of_record(*tree_unflatten(own, spec)))
    outputs, gradients = zip(*found, strict=True)
    return (
        [torch.stack(each) for each in zip(*outputs, strict=True)],
        [torch.stack(each) for each in zip(*gradients, strict=True)],
    )


def _pull(call: FunctionCall, tensors: Sequence[Tensor], wanted: Sequence[int]) -> Any:
    """Run the function on one record; return outputs and the way back to the parts."""
    of_parts = [i for i, each in enumerate(call.given) if each.part is not None]

    def run(parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        now = list(tensors)
        for i, part in zip(of_parts, parts, strict=True):
            now[i] = part
        outputs = call.called_with(now)
        kept = [outputs[i] for i in wanted]
        return kept, kept

    _, pull, outputs = vjp(  # type: ignore[misc]
        run, [tensors[i] for i in of_parts], has_aux=True
    )
    return outputs, pull


def _refusal(call: FunctionCall, problems: Sequence[Exception]) -> UnsupportedModelError:
    kinds = ", ".join(map(_kind, call.given))
    why = f" ({type(problems[0]).__name__})" if problems else ""
    fix = _FIX if call.name.endswith(_RECURRENT) else ""
    return UnsupportedModelError(
        f"{call.name} was called with {kinds}, and cannot be run record by record with the same "
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
