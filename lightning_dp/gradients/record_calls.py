"""The calls in which parameters meet samples, where every sample runs alone under vmap.

``torch.func.vmap`` runs a function of one sample for all samples at once, and knows of every tensor
whether each sample has its own. Ordinary autograd goes around it. Where such a tensor meets what is
computed from parameters, and nowhere else, a gradient per sample arises. There, and only there,
something is recorded:

- a function of the table (:data:`~lightning_dp.gradients.rules.FUNCTIONS`): its activations v and the
  gradient u of its output, from which the rule makes norms and sums;
- any other function: the gradient of a copy of the parameter for each sample.

The parameters themselves never enter the graph of a sample's loss, so that one which is found there
was missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bilinear import Folding
from lightning_dp.gradients.layer_calls import Call, KeptInputs, copied, dual_of
from lightning_dp.gradients.rules import BY_POSITION, FUNCTIONS, FunctionUse, Rule

__all__ = [
    "MISSING",
    "CallRecorder",
    "DifferentPaths",
    "WritesIntoNew",
    "is_sample",
    "numbered",
    "outside",
    "rows",
]

# -- vmap -----------------------------------------------------------------------------------------

# Its private names: whether a tensor is inside of it, and what is behind that, is not public.
_functorch: Any = torch._C._functorch

_NAMES = (
    *("_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "get_unwrapped"),
    *("is_batchedtensor", "is_functorch_wrapped_tensor", "maybe_get_bdim", "maybe_get_level"),
    *("pop_dynamic_layer_stack", "push_dynamic_layer_stack"),
    "_set_vmap_fallback_warning_enabled",
)
MISSING = tuple(name for name in _NAMES if not hasattr(_functorch, name))
"""The names that this torch lacks; with any, the engine cannot be used."""

is_sample: Callable[[Tensor], bool] = getattr(_functorch, "is_batchedtensor", torch.is_tensor)
"""Return whether each sample has its own values of a tensor."""


@contextmanager
def level_of_samples(n: int) -> Iterator[int]:
    """Enter a level of vmap over n samples that draw different random numbers; yield its number."""
    _functorch._set_vmap_fallback_warning_enabled(False)  # of what is slow; an error for some
    level: int = _functorch._vmap_increment_nesting(n, "different")
    try:
        yield level
    finally:
        _functorch._vmap_decrement_nesting()


class outside:
    """Leave the innermost level for a while: tensors of all samples are ordinary ones there."""

    def __enter__(self) -> None:
        self._layer = _functorch.pop_dynamic_layer_stack()

    def __exit__(self, *_: object) -> None:
        _functorch.push_dynamic_layer_stack(self._layer)


def wrapped(tensor: Tensor, level: int) -> Tensor:
    """Return what one sample sees of a tensor of shape (n, ...): shape (...)."""
    seen: Tensor = _functorch._add_batch_dim(tensor, 0, level)
    return seen


def is_foreign(tensor: Tensor, level: int) -> bool:
    """Return whether a tensor is inside of another function transform than the level."""
    inside: bool = _functorch.is_functorch_wrapped_tensor(tensor)
    return inside and _functorch.maybe_get_level(tensor) != level


def rows(tensor: Tensor) -> Tensor:
    """Return the values of all samples, shape (n, ...), of a tensor that :func:`is_sample`."""
    behind: Tensor = _functorch.get_unwrapped(tensor)
    dim = _functorch.maybe_get_bdim(tensor)
    return behind if dim == 0 else behind.movedim(dim, 0)


# -- the recorder ---------------------------------------------------------------------------------

Function: TypeAlias = Callable[..., Any]


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# What asks a tensor about itself, not about its values.
_QUESTIONS = _names(
    "size dim numel is_floating_point is_complex __len__ __hash__ stride element_size ndimension "
    "is_contiguous get_device is_signed nelement __set__ __delete__ register_hook storage_offset "
    "is_pinned retain_grad"
)
_BRANCHES = _names("__bool__ is_nonzero __contains__ equal allclose")
# What leaves torch: Python's numbers, lists and texts, and NumPy's arrays.
_VALUES = _BRANCHES | _names(
    "__int__ __float__ __index__ __complex__ item tolist numpy __array__ _is_all_true"
)
_TEXTS = _names("__format__ __repr__ __str__")
_DIFFERENTIATE = _names("grad backward requires_grad_")
_NEW = _names(
    "zeros_like ones_like empty_like full_like clone new_zeros new_ones new_empty new_full "
    "new_tensor"
)
_IN_PLACE = _names(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __iand__ __ior__ "
    "__ixor__ __ipow__"
)
_OF_THE_WHOLE_CALL = _names("linear embedding layer_norm rms_norm conv1d conv2d conv3d group_norm")
_HAS_GRADIENT = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_NODE: Any = vars(torch._C.TensorBase)["grad_fn"].__get__
_SHOWN = "<of one record>"

_INSIDE = (
    "training_step differentiates inside (a penalty on a gradient, backward(), autograd.grad), which "
    "cannot be seen for each record."
)
_OF_NODES = (
    "training_step asks a tensor for its grad_fn (a module's old backward hook does, say), which no "
    "record has by itself."
)
_OWN_RULE = (
    "An autograd Function has its own rule for torch.vmap, which sees all records at once and could mix "
    "them."
)
_SAVED = (
    "training_step sets saved_tensors_hooks, which see the tensors of all records at once and could mix "
    "them."
)
_TRANSFORMED = (
    "Trained parameters are used inside of a function transform (torch.func, torch.vmap)."
)
_WRITTEN = (
    "Records are written into {}, which outlives the step or is shared by all records, so that one "
    "record's numbers reach another's."
)
_LATER = (
    "The value that a metric's forward returns is used in training_step; it can only be logged."
)


class DifferentPaths(BaseException):
    """Samples would take different branches; no error, so that no ``except Exception`` catches it.

    The labels are the number of each sample's branch; ``are_numbers`` if what left torch differs.
    """

    def __init__(self, labels: Sequence[int], *, are_numbers: bool = False) -> None:
        super().__init__()
        self.labels, self.are_numbers = labels, are_numbers


class WritesIntoNew(BaseException):
    """Samples are written into a tensor that the model made for itself: each needs its own."""


class CallRecorder(TorchFunctionMode):
    """Sees every function that a group of samples calls, and records where parameters meet them.

    Args:
        n: the number of samples.
        composites: takes the place of functions, by name, unless it returns NotImplemented.
        own_memory: tensors that the model makes without samples are made for each of them, since it
            writes samples into one.
        along: parameters are dual numbers.
    """

    def __init__(
        self,
        n: int,
        composites: Mapping[str, Function],
        *,
        own_memory: bool = False,
        along: bool = False,
    ) -> None:
        super().__init__()
        self._composites = composites
        self.n, self.calls, self.along = n, list[Call](), along
        self._own_memory, self._level = own_memory, 0
        self._seen: list[ReferenceType[Tensor]] = []
        self.packed = WeakTensorKeyDictionary()
        self._made = WeakTensorKeyDictionary()  # of parameters and constants, by a rule
        self._logged_only: set[int] = set()
        self.has_asked = False
        """True if numbers, or shapes that can depend on values, have left torch."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter vmap, where :meth:`sample` makes what one sample sees, but not yet this mode."""
        with level_of_samples(self.n) as self._level:
            yield

    def sample(self, tensor: Tensor) -> Tensor:
        """Return what each sample sees of a tensor of shape (n, ...): shape (...)."""
        seen = wrapped(tensor, self._level)
        self._seen.append(ref(seen))
        return seen

    @property
    def samples_left(self) -> list[Tensor]:
        """The tensors of single samples that somebody still has, when all else of the pass is gone."""
        return [left for each in self._seen if (left := each()) is not None]

    def only_logged(self, value: Tensor) -> Tensor:
        """Let no function of the model use a value that is not there yet."""
        self._logged_only.add(id(value))
        return value

    # -- every function --------------------------------------------------------------------

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name == "__get__" and is_sample(args[0]):
            if func == _HAS_GRADIENT:
                return rows(args[0]).requires_grad
            if func == _NODE and rows(args[0]).grad_fn is not None:
                raise UnsupportedModelError(_OF_NODES, topic="unseen-use")
        if name in _QUESTIONS:
            if self.packed:
                self._split_by_length(func, args, _tensors(args, kwargs))
            return func(*args, **(kwargs or {}))
        result = self._called(func, name, args, kwargs or {})
        if isinstance(result, Tensor):
            if is_sample(result):
                self._seen.append(ref(result))
        elif isinstance(result, list | tuple):
            self._seen += [ref(x) for x in result if isinstance(x, Tensor) and is_sample(x)]
        return result

    def _called(self, func: Function, name: str, args: Any, kwargs: Any) -> Any:
        samples, parts, tensors = False, False, _tensors(args, kwargs)
        foreign = False
        for x in tensors:
            if is_foreign(x, self._level):
                foreign = True
            elif is_sample(x):
                samples = True
            elif x.requires_grad:
                parts = True
        if self._logged_only and any(id(x) in self._logged_only for x in tensors):
            raise UnsupportedModelError(_LATER, topic="metrics")
        parts = parts and torch.is_grad_enabled()
        if foreign:
            if parts:
                raise UnsupportedModelError(_TRANSFORMED, topic="unseen-use")
            return func(*args, **kwargs)
        if not samples:
            return self._without_samples(func, name, args, kwargs, tensors, parts)
        if name in _TEXTS and (args[0].is_floating_point() or args[0].is_complex()):
            return _SHOWN
        if (hooks := _saved_tensors_hooks(False)) and not _is_torchs(hooks[0]):
            raise UnsupportedModelError(_SAVED, topic="unseen-use")
        if name == "custom_function_call" and not args[0].generate_vmap_rule:
            raise UnsupportedModelError(_OWN_RULE, topic="unseen-use")
        if name in _DIFFERENTIATE and False not in args[1:]:  # requires_grad_(False)
            raise UnsupportedModelError(_INSIDE, topic="unseen-use")
        if self.packed:
            self._split_by_length(func, args, tensors)
        if name in _VALUES or name in _TEXTS:
            return self._value(func, name, args)
        if _is_in_place(name) and isinstance(args[0], Tensor) and not is_sample(args[0]):
            self._refuse_writing(args[0])
        if name in self._composites:
            found = self._composites[name](self, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if parts:
            return self._meet(func, name, args, kwargs)
        return self._of_samples(func, args, kwargs)

    def _without_samples(
        self, func: Function, name: str, args: Any, kwargs: Any, tensors: list[Tensor], parts: bool
    ) -> Any:
        if parts and name == "embedding" and (use := FUNCTIONS[name](*args, **kwargs)) is not None:
            # Constant indices (positions) meet the samples soon: the rule is cheaper than copies.
            each = use.input.expand(self.n, *use.input.shape)
            return self._by_rule(func, name, args, kwargs, use, each)
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if _is_in_place(name) and not self._own_memory:  # random numbers, one for each sample
                raise WritesIntoNew from None
            if not parts or _is_in_place(name):
                raise
            return self._copied(func, args, kwargs)
        if parts and any(map(is_sample, _tensors((result,), {}))):  # it drew for each sample
            return self._copied(func, args, kwargs)
        use = FUNCTIONS[name](*args, **kwargs) if parts and name in FUNCTIONS else None
        if use is not None and use.rule in BY_POSITION and not use.input.requires_grad:
            v = use.input.expand(self.n, *use.input.shape)
            self._made[result] = result.grad_fn, use, KeptInputs((v,))
        is_new = not tensors or name in _NEW
        if self._own_memory and is_new and isinstance(result, Tensor) and not is_sample(result):
            if result.requires_grad:
                return self.own(result)
            with outside():
                own = result.unsqueeze(0).repeat(self.n, *[1] * result.dim())
            return self.sample(own)
        return result

    def _refuse_writing(self, target: Tensor) -> None:
        """Begin again with new tensors for each sample; refuse what even so is shared by all."""
        if not self._own_memory and not target.requires_grad:
            raise WritesIntoNew
        what = "what is computed from parameters" if target.requires_grad else "a tensor"
        raise UnsupportedModelError(_WRITTEN.format(what), topic="kept-records")

    # -- functions of samples alone --------------------------------------------------------

    def _of_samples(self, func: Function, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception:
            return self._one_at_a_time(func, args, kwargs)

    def _one_at_a_time(self, func: Function, args: Any, kwargs: Any) -> Any:
        """Call a function that vmap does not know for each sample by itself."""
        shared = [x for x in _tensors(args, kwargs) if not is_sample(x)]
        versions = [x._version for x in shared]
        with outside():
            rows_of_each = [partial(_row, i=i) for i in range(self.n)]
            found = [func(*_map(own, args), **_map(own, kwargs)) for own in rows_of_each]
        if [x._version for x in shared] != versions:
            raise UnsupportedModelError(_WRITTEN.format("a tensor"), topic="kept-records")
        return args[0] if _is_in_place(func.__name__) else self._joined(found)

    def _joined(self, found: Sequence[Any]) -> Any:
        """Return what all samples have, or each its own; they are split where that has other shapes."""
        first = found[0]
        if isinstance(first, Tensor):
            self.split_by([tuple(each.shape) for each in found])
            with outside():
                joined = torch.stack(list(found))
            return wrapped(joined, self._level)
        if isinstance(first, list | tuple) and any(isinstance(x, Tensor) for x in first):
            self.split_by([len(each) for each in found])
            columns = [self._joined(column) for column in zip(*found, strict=True)]
            return type(first)(columns) if type(first) in (list, tuple) else type(first)(*columns)
        self.split_by([_key(each) for each in found])
        return first

    def _value(self, func: Function, name: str, args: Any) -> Any:
        """Return the value that all samples have; else split them by it."""
        self.has_asked = True
        if self.n > 1 and name in ("item", "__bool__", "__int__", "__float__", "__index__"):
            behind = rows(args[0]).detach().flatten()
            if len(behind) == self.n and bool((behind == behind[0]).all()):
                return func(behind[0])
        with outside():
            of_each = [[_row(x, i) for x in args] for i in range(self.n)]
            found = [func(*each) for each in of_each]
        self.split_by([_key(each) for each in found], are_numbers=name not in _BRANCHES)
        return found[0]

    def split_by(self, keys: Sequence[Any], *, are_numbers: bool = False) -> None:
        """Split the samples by what each of them has, if it is not the same.

        Raises:
            DifferentPaths: with a number for each.
        """
        self.has_asked, labels = True, numbered(keys)
        if max(labels, default=0):
            raise DifferentPaths(labels, are_numbers=are_numbers)

    def _split_by_length(self, func: Function, args: Any, tensors: Sequence[Tensor]) -> None:
        """Split the samples by their lengths if a function looks at how a sequence is packed."""
        for each in tensors:
            known: Any = self.packed.get(each)  # type: ignore[no-untyped-call]
            if known is not None and known.is_told_by(func, args):
                self.split_by(known.lengths)

    # -- parameters meet samples -----------------------------------------------------------

    def _meet(self, func: Function, name: str, args: Any, kwargs: Any) -> Any:
        use = FUNCTIONS[name](*args, **kwargs) if name in FUNCTIONS else None
        if use is not None and is_sample(use.input) and not any(map(is_sample, _parts_of(use))):
            return self._by_rule(func, name, args, kwargs, use, rows(use.input))
        return self._copied(func, args, kwargs)

    def _by_rule(
        self, func: Function, name: str, args: Any, kwargs: Any, use: FunctionUse, v: Tensor
    ) -> Any:
        """Call a function of the table for all samples at once, and record its activations."""
        given, is_first, b = use.input, not v.requires_grad, 0
        if use.rule not in BY_POSITION and given.dim() >= use.layer.weight.dim():
            b = v.shape[1]  # rows of the rule that each sample has
            v = v.flatten(0, 1)
        parts = [x for x in _parts_of(use) if x.requires_grad]
        with outside():
            alias = {id(x): self._cut_off(x, is_leaf=is_first) for x in parts}
        args, kwargs = _map(lambda x: alias.get(id(x), x), (args, kwargs))
        if name in _OF_THE_WHOLE_CALL and args and given is args[0]:
            with outside():
                flat = v.reshape(-1, v.shape[-1]) if name == "linear" else v
                raw = func(flat, *args[1:], **kwargs)
                edge = get_gradient_edge(raw)  # stays in the graph when somebody writes into a view
                out = raw.view(*v.shape[:-1], raw.shape[-1]) if name == "linear" else raw
                shape: Sequence[int] = out.shape
                out = out.unflatten(0, (self.n, b)) if b else out
        else:
            result = func(*args, **kwargs)
            with outside():
                out = rows(result)
                if out._is_view():  # whose node leaves the graph when somebody writes into it
                    out = out.clone()
            edge = get_gradient_edge(out)
            shape = (self.n * b, *out.shape[2:]) if b else out.shape
        folding = methodcaller("unflatten", 0, (self.n, b)) if b > 1 else None
        self.record(use.rule, use.layer, v, edge, shape, is_first=is_first, folding=folding)
        return wrapped(out, self._level)

    def record(
        self,
        rule: Rule,
        layer: Any,
        v: Tensor,
        edge: GradientEdge,
        shape: Sequence[int],
        *,
        is_first: bool,
        folding: Folding | None = None,
    ) -> None:
        """Keep the activations of a call for its rule; the arguments are those of :class:`Call`."""
        inputs = KeptInputs((v if self.along else v.detach(),))
        self.calls.append(Call(rule, layer, inputs, edge, is_first, folding, shape))

    def _copied(self, func: Function, args: Any, kwargs: Any) -> Any:
        """Call any function with a copy of what comes from parameters for each sample."""
        if _is_in_place(func.__name__) and not is_sample(args[0]):
            self._refuse_writing(args[0])
        args, kwargs = _map(self._copy, (args, kwargs))
        return self._of_samples(func, args, kwargs)

    def _copy(self, x: Tensor) -> Tensor:
        return x if is_sample(x) or not x.requires_grad else self.own(x)

    def own(self, part: Tensor) -> Tensor:
        """Return a copy of what is computed from parameters, for each sample."""
        with outside():
            value, moved = self._split(part)
            leaf = value.detach().expand(self.n, *part.shape).requires_grad_()
            edge = get_gradient_edge(leaf)
            if moved is not None:
                leaf = dual_of(leaf, moved.expand(self.n, *part.shape).detach())
        node, use, inputs = self._made.get(part, (None, None, None))  # type: ignore[no-untyped-call]
        if node is part.grad_fn and use is not None:  # what made it has a rule: the first time step
            call = Call(use.rule, use.layer, copy(inputs), edge, is_first=True)
        else:
            call = Call(copied, part, KeptInputs(()), edge, is_first=True)
        self.calls.append(call)
        return self.sample(leaf)

    def alias(self, part: Tensor) -> Tensor:
        """Return the value of a part, cut off from its graph."""
        with outside():
            return self._cut_off(part)

    def _cut_off(self, part: Tensor, *, is_leaf: bool = False) -> Tensor:
        """Do the same, outside; a leaf gives the output a gradient, and has none that is asked for."""
        value, moved = self._split(part)
        alias = value.detach()
        if is_leaf:
            alias.requires_grad_()
        return alias if moved is None else dual_of(alias, moved.detach())

    def _split(self, part: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.along:
            return part, None
        value, moved = forward_ad.unpack_dual(part)  # type: ignore[no-untyped-call]
        return value, moved


_saved_tensors_hooks: Callable[..., Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)


def _is_torchs(hook: Any) -> bool:
    """Return whether a hook is of an activation checkpoint, or of what keeps tensors on the host."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "torch"


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name[-1] == "_" and name[-2] != "_")


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for x in args:  # flat arguments are the usual case
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += _tensors(x, ())
    for x in kwargs.values() if kwargs else ():
        if isinstance(x, Tensor | list | tuple):
            found += _tensors((x,), ())
    return found


def _map(function: Callable[[Tensor], Any], x: Any) -> Any:
    if isinstance(x, Tensor):
        return function(x)
    if type(x) in (list, tuple):
        return type(x)(_map(function, each) for each in x)
    if isinstance(x, dict):
        return {key: _map(function, each) for key, each in x.items()}
    return x


def _parts_of(use: FunctionUse) -> list[Tensor]:
    found = (getattr(use.layer, name, None) for name in ("weight", "bias"))
    return [each for each in found if isinstance(each, Tensor)]


def numbered(keys: Sequence[Any]) -> list[int]:
    """Return a number for each key, from 0 on, the same for equal ones."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _row(x: Any, i: int) -> Any:
    """Return what one sample has of an argument."""
    return rows(x)[i] if isinstance(x, Tensor) and is_sample(x) else x


def _key(value: Any) -> Any:
    """Return something that is equal for equal values."""
    return repr(value.tolist()) if hasattr(value, "tolist") else repr(value)
