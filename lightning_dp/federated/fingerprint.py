"""Modules of two processes, compared: what is trained goes over the wire, the rest does not."""

from __future__ import annotations

import json
import logging
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.federated.messages import MessageError

__all__ = ["check_fingerprint", "fingerprint"]

_log = logging.getLogger("lightning_dp.federated")
_SHOWN = 3
_CURE = (
    "Build the same module everywhere: load its frozen weights from one file, or seed its "
    "construction with torch.manual_seed."
)


def fingerprint(module: nn.Module) -> str:
    """Names, shapes and dtypes of what is trained, and check sums of what is not."""
    params = list(module.named_parameters())
    described = {
        "trained": [[name, _kind(p)] for name, p in params if p.requires_grad],
        "frozen": [[name, _check_sum(p)] for name, p in params if not p.requires_grad],
        "buffers": [[name, _check_sum(buffer)] for name, buffer in module.named_buffers()],
    }
    return json.dumps(described)


def check_fingerprint(of_the_server: str, here: str) -> None:
    """Refuse a server whose module is another one.

    Buffers that differ are said in the log only: some are computed, and machines round.

    Raises:
        MessageError: naming parameters that differ.
    """
    theirs, ours = _read(of_the_server), _read(here)
    if other := _other_order(theirs["trained"], ours["trained"]):
        raise MessageError(f"The trained parameters are not the server's: {other}. {_CURE}")
    if other := _differing(theirs["frozen"], ours["frozen"]):
        raise MessageError(
            f"The frozen parameters {other} are not those of the server's module, so what it trains "
            f"means something else here. {_CURE}"
        )
    if other := _differing(theirs["buffers"], ours["buffers"]):
        _log.warning("The buffers %s are not those of the server's module. %s", other, _CURE)


_Described = list[tuple[str, str]]


def _read(text: str) -> dict[str, _Described]:
    try:
        found: Any = json.loads(text)
        return {
            part: [(str(name), str(value)) for name, value in found[part]]
            for part in ("trained", "frozen", "buffers")
        }
    except (ValueError, TypeError, KeyError):
        raise MessageError("The server's description of its module cannot be read.") from None


def _other_order(theirs: _Described, ours: _Described) -> str:
    """Return where two lists of parameters differ in kind or order; other names are no matter."""
    if len(theirs) != len(ours):
        return f"{len(ours)} tensors, and {len(theirs)} at the server"
    is_permuted = sorted(name for name, _ in theirs) == sorted(name for name, _ in ours)
    for (name, kind), (there, kind_there) in zip(ours, theirs, strict=True):
        if kind != kind_there or (is_permuted and name != there):
            return f"{name} ({kind}), where the server has {there} ({kind_there})"
    return ""


def _differing(theirs: _Described, ours: _Described) -> str:
    here, there = dict(ours), dict(theirs)
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _check_sum(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{_kind(tensor)} {zlib.crc32(values.numpy().tobytes()):08x}"
