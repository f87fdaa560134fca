"""The C functions of the native worker, and those of libtorch that it is handed.

Calls that only look something up or move it on keep the GIL (PyDLL): letting go of it costs more
than they do. Those that may sleep let go of it (CDLL).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from neuron_streams._runtime import chain, toolchain

__all__ = ["Interval", "Library", "library", "why_not"]

INTERVALS = 1 << 16  # how many busy intervals are remembered
_word, _address = ctypes.c_int64, ctypes.c_void_p
_QUICK: dict[str, tuple[Any, ...]] = {
    "new": (_address, _word),
    "open_lane": (_word, _address, _word, _word, _word, _address),
    "close_lane": (None, _address, _word),
    "submit": (_word, _address, _word, ctypes.c_char_p, _word),
    "complete": (None, _address, _word, _word),
    "cancel": (_word, _address, _address, _word),
    "stop": (None, _address),
    "free": (None, _address),
    "head": (_word, _address, _word, _address),
    "intervals": (_word, _address, _address),
    "share": (_address, _address),
    "point": (None, _address, _address),
    "release": (None, _address),
    "fill": (ctypes.c_int32, _address, _address),
    "use_torch": (None, _address),
}
_SLOW: dict[str, tuple[Any, ...]] = {
    "next": (_address, _address, _address, _address),
    "wait": (_word, _address, _word, _word, _word),
    "wait_for_room": (None, _address, _word, _word),
    "drain": (_word, _address, _word),
    "join": (_word, _address, _word),
    "fill_slowly": (ctypes.c_int32, _address, _address),
}
_TORCH = {
    "empty": "aoti_torch_empty_strided",
    "data": "aoti_torch_get_data_ptr",
    "retain": "aoti_torch_new_tensor_handle",
    "release": "aoti_torch_delete_tensor_object",
    "set_grad_mode": "aoti_torch_grad_mode_set_enabled",
}


class Interval(ctypes.Structure):
    """One command that ran: device, unit, index of its name, seconds."""

    _fields_ = [
        ("device", _word),
        ("unit", _word),
        ("name", _word),
        ("began", ctypes.c_double),
        ("ended", ctypes.c_double),
    ]


class _Torch(ctypes.Structure):
    _fields_ = [*((name, _address) for name in _TORCH), ("uint8", _word)]


class Library:
    """The functions of worker/*.c by the names there, without `ns_`."""

    new: Callable[[int], int]
    open_lane: Callable[[int, int, int, bool, int], int]
    close_lane: Callable[[int, int], None]
    submit: Callable[[int, int, bytes, int], int]
    complete: Callable[[int, int, int], None]
    cancel: Callable[[int, Any, int], int]
    stop: Callable[[int], None]
    free: Callable[[int], None]
    share: Callable[[int], int | None]
    point: Callable[[int, int], None]
    release: Callable[[int], None]
    fill: Callable[[int, int], int]
    next: Callable[[int, int | None, Any], int | None]
    wait: Callable[[int, int, int, int], int]
    wait_for_room: Callable[[int, int, int], None]
    drain: Callable[[int, int], int]
    join: Callable[[int, int], int]

    fill_slowly: Callable[[int, int], int]
    use_torch: Callable[[Any], None]
    _head: Callable[[int, int, Any], int]
    _intervals: Callable[[int, Any], int]

    def __init__(self, path: str) -> None:
        for opened, table in ((ctypes.PyDLL(path), _QUICK), (ctypes.CDLL(path), _SLOW)):
            for name, (result, *arguments) in table.items():
                function = opened[f"ns_{name.removesuffix('_slowly')}"]
                function.restype, function.argtypes = result, arguments
                setattr(self, f"_{name}" if hasattr(type(self), name) else name, function)

    def intervals(self, runtime: int) -> Sequence[Interval]:
        """The newest busy intervals, oldest first."""
        told = (Interval * INTERVALS)()
        return told[: self._intervals(runtime, told)]

    def head(self, runtime: int, lane: int) -> tuple[int, int, int, int]:
        """Key and value of a lane's head, and the lane and value that it waits for; 0 for none."""
        told = (_word * 4)()
        self._head(runtime, lane, told)
        key, value, upstream, awaited = told
        return key, value, upstream, awaited


def why_not() -> str | None:
    """What keeps the native worker from being used here; None if nothing does."""
    if toolchain.c_compiler() is None:
        return "there is no C compiler"
    if not chain.supported():
        return "this torch hands out no tensors through its C ABI"
    missing = [symbol for symbol in _TORCH.values() if not hasattr(chain._libtorch(), symbol)]
    if missing:
        return f"the C ABI of this torch has no {', '.join(missing)}"
    return toolchain.why_no_native()


@functools.cache
def library() -> Library:
    """The library, compiled at first use, with libtorch handed to it. See `why_not` first."""
    native = toolchain.native()
    if native is None:
        raise RuntimeError(f"the native worker cannot be had: {why_not()}")
    made = Library(native._name)
    torch_functions = [chain._address(getattr(chain._libtorch(), s)) for s in _TORCH.values()]
    uint8 = chain._libtorch().aoti_torch_dtype_uint8()
    made.use_torch(ctypes.byref(_Torch(*torch_functions, uint8)))
    return made
