"""The accelerator that tests train on: the one at hand, or a pretended one where there is none.

The pretended one tells tensors of another device apart, as a GPU does.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils import cpp_extension

__all__ = [
    "DEVICE",
    "IS_PRETENDED",
    "Pretended",
    "built",
    "register",
    "there",
    "why_not",
    "without_float64",
]

# Of the pretended device, compiled; set by the test that starts a process with it.
LIBRARY = os.environ.get("LIGHTNING_DP_PRETENDED_DEVICE")
IS_PRETENDED = LIBRARY is not None
_PRETENDED = "pretend"
_SOURCE = Path(__file__).parent / "device.cpp"
_WORKS_WITH = (2, 13)  # what C++ sees of torch differs from release to release
_LIBRARIES = ("c10", "torch", "torch_cpu")


def _at_hand() -> str | None:
    """Return the type of the device: of this machine's, if none is pretended; None without one."""
    if IS_PRETENDED:
        return _PRETENDED
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator.type


DEVICE: Any = _at_hand()


def why_not() -> str | None:
    """Return why there is no device here; None if it can be built."""
    if shutil.which("g++") is None:
        return "the pretended device is C++, and no g++ is installed"
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < _WORKS_WITH:
        return (
            f"the pretended device is written for torch {'.'.join(map(str, _WORKS_WITH))} and later"
        )
    return None


def built(folder: Path) -> Path:
    """Compile the device, unless this source and this torch were compiled into the folder before."""
    source = _SOURCE.read_bytes() + torch.__version__.encode()
    library = folder / f"device-{hashlib.sha256(source).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # of several test processes one compiles
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    headers = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    here = Path(torch.__file__).parent / "lib"
    unfinished = library.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", "-w"]
        + [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        + [f"-I{folder}" for folder in headers]
        + [str(_SOURCE), f"-L{here}", *(f"-l{name}" for name in _LIBRARIES)]
        + ["-o", str(unfinished)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"The pretended device does not compile:\n{done.stderr[:5000]}"
    unfinished.rename(library)


def register(library: Path) -> None:
    """Make the device known to this process, before its first backward pass."""
    global _loaded
    _loaded = ctypes.CDLL(str(library))
    _loaded.start()
    torch.utils.rename_privateuse1_backend(_PRETENDED)
    torch._register_device_module(_PRETENDED, _Module(_loaded))
    torch.utils.generate_methods_for_privateuse1_backend()
    for name in _IN_LOWER_PRECISION:
        _operators.impl(name, partial(_in_lower_precision, name), "AutocastPrivateUse1")


@contextmanager
def without_float64() -> Iterator[None]:
    """Refuse float64 on the device, inside, as Apple's does."""
    _loaded.allow_float64(0)
    try:
        yield
    finally:
        _loaded.allow_float64(1)


_loaded: Any = None
_operators = torch.library.Library("aten", "IMPL")
_IN_LOWER_PRECISION = ("linear", "addmm", "mm", "bmm", "matmul", "conv2d")


def _in_lower_precision(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator as autocast does."""
    lower = torch.get_autocast_dtype(_PRETENDED)

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.to(lower) if is_float else value

    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    ):
        named = {key: cast(value) for key, value in kwargs.items()}
        return getattr(torch.ops.aten, name)(*map(cast, args), **named)


class _Module:
    """``torch.pretend``: what torch and Lightning ask of a kind of device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    class device:
        def __init__(self, index: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *unused: object) -> None: ...

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: object) -> None: ...

    def synchronize(self, device: object = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        torch.ops.pretend.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: object = 0) -> Tensor:
        state: Tensor = torch.ops.pretend.rng_state()
        return state

    def set_rng_state(self, state: Tensor, device: object = 0) -> None:
        torch.ops.pretend.set_rng_state(state)

    def get_device_name(self, device: object = 0) -> str:
        return "a pretended device"

    def memory_allocated(self, device: object = None) -> int:
        return int(self._library.bytes_held())

    def max_memory_allocated(self, device: object = None) -> int:
        return int(self._library.bytes_at_peak())

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self._library.forget_peak()


def there() -> dict[str, Any]:
    """Return the arguments that bring a Trainer to the device."""
    if not IS_PRETENDED:
        return {"accelerator": DEVICE, "devices": 1}
    strategy = SingleDeviceStrategy(torch.device(DEVICE, 0))
    return {"accelerator": Pretended(), "strategy": strategy, "devices": 1}


class Pretended(Accelerator):
    """Lightning's side of it."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(_PRETENDED, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return _PRETENDED
