"""libnrt: found, loaded at first use, and told apart by its asynchronous ABI.

The same names have had incompatible signatures, and the header that GitHub shows is that of SDK
2.28 to this day, so the ABI is read off the symbols and checked against the version:

    2.28    runtime 2.30    nrta_error_tracker_create; no lnc_idx; a handle per sequence
    2.29    runtime 2.31    a status pointer and lnc_idx; polling only
    2.30    runtime 2.32+   the same, and eventfds

Source: the runtime's release notes and the pages of its asynchronous API. The position of lnc_idx
and the eventfd prototypes are known from AWS's own callers only; a header for them was not seen.
"""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

from neuron_streams._runtime.nrt.status import LibraryError, Status, check
from neuron_streams._runtime.nrt.structs import (
    ErrorRecord,
    InstanceInfo,
    MemoryStats,
    TensorInfos,
    Version,
)

__all__ = ["Abi", "Library", "Units", "find"]

PLACES = (
    "libnrt.so.1",  # wherever the loader looks
    "/opt/aws/neuron/lib/libnrt.so.1",
    "libnrt.so",
)
_status, _seq, _out = c_int, c_uint64, POINTER(c_void_p)
_COMMON: dict[str, tuple[Any, ...]] = {
    "nrt_init": (_status, c_int, c_char_p, c_char_p),
    "nrt_close": (None,),
    "nrt_get_total_vnc_count": (_status, POINTER(c_uint32)),
    "nrt_get_visible_vnc_count": (_status, POINTER(c_uint32)),
    "nrt_get_version": (_status, POINTER(Version), c_size_t),
    "nrt_get_instance_info": (_status, POINTER(InstanceInfo), c_size_t),
    "nrt_get_vnc_memory_stats": (
        _status,
        c_uint32,
        POINTER(MemoryStats),
        c_size_t,
        POINTER(c_size_t),
    ),
    "nrt_load": (_status, c_char_p, c_size_t, c_int32, c_int32, _out),
    "nrt_unload": (_status, c_void_p),
    "nrt_get_model_tensor_info": (_status, c_void_p, POINTER(POINTER(TensorInfos))),
    "nrt_free_model_tensor_info": (_status, POINTER(TensorInfos)),
    "nrt_tensor_allocate": (_status, c_int, c_int, c_size_t, c_char_p, _out),
    "nrt_tensor_allocate_slice": (_status, c_void_p, c_size_t, c_size_t, c_char_p, _out),
    "nrt_tensor_free": (None, _out),
    "nrt_tensor_read": (_status, c_void_p, c_void_p, c_size_t, c_size_t),
    "nrt_tensor_write": (_status, c_void_p, c_void_p, c_size_t, c_size_t),
    "nrt_allocate_tensor_set": (_status, _out),
    "nrt_destroy_tensor_set": (None, _out),
    "nrt_add_tensor_to_tensor_set": (_status, c_void_p, c_char_p, c_void_p),
    "nrta_is_completed": (_status, _seq, POINTER(c_bool)),
    "nrta_get_sequence": (_status, c_uint32, c_int, c_int, POINTER(_seq)),
}
_TAIL = (c_int, c_void_p, POINTER(_seq))  # queue, status pointer or tracker, sequence
_OF_228: dict[str, tuple[Any, ...]] = {
    "nrta_tensor_write": (_status, c_void_p, c_void_p, c_uint64, c_uint64, *_TAIL),
    "nrta_tensor_read": (_status, c_void_p, c_void_p, c_uint64, c_uint64, *_TAIL),
    "nrta_tensor_copy": (_status, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, *_TAIL),
    "nrta_execute_schedule": (_status, c_void_p, c_void_p, c_void_p, *_TAIL),
    "nrta_get_completion_handle": (_status, _seq, POINTER(c_int)),
    "nrta_error_tracker_create": (_status, c_uint32, _out),
    "nrta_error_tracker_destroy": (None, c_void_p),
    "nrta_error_tracker_get_list": (
        _status,
        c_void_p,
        POINTER(POINTER(ErrorRecord)),
        POINTER(c_size_t),
    ),
}
_OF_229: dict[str, tuple[Any, ...]] = {
    "nrta_tensor_write": (_status, c_void_p, c_void_p, c_uint64, c_uint64, c_int, *_TAIL),
    "nrta_tensor_read": (_status, c_void_p, c_void_p, c_uint64, c_uint64, c_int, *_TAIL),
    "nrta_tensor_copy": (_status, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_int, *_TAIL),
    "nrta_execute_schedule": (_status, c_void_p, c_void_p, c_void_p, *_TAIL),
}
_OF_230: dict[str, tuple[Any, ...]] = {
    **_OF_229,
    "nrta_event_register_seq_id_completion": (_status, _seq, c_int),
    "nrta_event_register_xu_completion": (_status, c_int, c_int, c_int, c_int),
}
# Calls that only look something up or put it into a queue keep the GIL: to let go of it beside a
# busy thread costs milliseconds, and the documentation promises that they never block.
_QUICK = frozenset(
    {
        "nrta_tensor_write",
        "nrta_tensor_read",
        "nrta_tensor_copy",
        "nrta_execute_schedule",
        "nrta_is_completed",
        "nrta_get_sequence",
        "nrt_allocate_tensor_set",
        "nrt_destroy_tensor_set",
        "nrt_add_tensor_to_tensor_set",
    }
)


class Abi(enum.Enum):
    """An asynchronous ABI, by the SDK that brought it."""

    SDK_2_28 = "2.28"
    SDK_2_29 = "2.29"
    SDK_2_30 = "2.30"


class Units(NamedTuple):
    """The numbers of nrta_xu_t: which unit reads, writes, copies and computes."""

    read: int
    write: int
    copy: int
    compute: int


_UNITS = {
    Abi.SDK_2_28: Units(0, 1, 2, 3),
    Abi.SDK_2_29: Units(0, 0, 0, 1),
    Abi.SDK_2_30: Units(0, 0, 0, 1),
}
# The families of nrt_instance_info_t that each target of the compiler is for.
_TARGETS = {
    "trn1": (2,),
    "trn1n": (3,),
    "inf2": (4, 7),
    "trn2": (5, 6, 8, 9, 10, 11, 12, 13),
    "trn3": (14, 15),
}
_PROTOTYPES = {
    Abi.SDK_2_28: _OF_228,
    Abi.SDK_2_29: _OF_229,
    Abi.SDK_2_30: _OF_230,
}


def find() -> str | None:
    """What libnrt would be loaded from, None where it is not: NEURON_STREAMS_LIBNRT alone if set.

    It is loaded to see, since only the loader knows where it looks.
    """
    chosen = os.environ.get("NEURON_STREAMS_LIBNRT")
    for place in (chosen,) if chosen else PLACES:
        try:
            ctypes.CDLL(place)
        except OSError:
            continue
        return place
    return None


class Library:
    """libnrt's functions by their own names, the prototypes being those of its ABI.

    Calls that may wait let go of the GIL. `call(name, ...)` checks the status.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path or find() or _missing()
        try:
            slow, quick = ctypes.CDLL(self.path), ctypes.PyDLL(self.path)
        except OSError as error:
            raise LibraryError(
                f"libnrt cannot be loaded from {self.path} ({error}); install "
                "aws-neuronx-runtime-lib, or name another one in NEURON_STREAMS_LIBNRT"
            ) from error
        self.version = _version_of(slow, self.path)
        self.abi = _abi_of(slow, self.version, self.path)
        self.units = _UNITS[self.abi]
        self.functions: dict[str, Callable[..., Any]] = {}
        for name, (result, *arguments) in {**_COMMON, **_PROTOTYPES[self.abi]}.items():
            try:
                function = getattr(quick if name in _QUICK else slow, name)
            except AttributeError:
                raise LibraryError(
                    f"libnrt {self.version} ({self.path}) has no {name}, which SDK "
                    f"{self.abi.value} has; install a released aws-neuronx-runtime-lib"
                ) from None
            function.restype, function.argtypes = result, arguments
            self.functions[name] = function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.functions[name]
        except KeyError:
            raise AttributeError(name) from None

    def call(self, name: str, *arguments: object, about: str = "") -> None:
        """Call a function that returns a status. Raises NrtError unless that is success."""
        check(self.functions[name](*arguments), f"{name}{about and f' ({about})'}")

    def device_count(self) -> int:
        """How many cores this process may use; 0 where there is no driver."""
        count = c_uint32()
        status = self.functions["nrt_get_visible_vnc_count"](ctypes.byref(count))
        return count.value if status == Status.SUCCESS else 0

    def target(self) -> str | None:
        """What the compiler calls this machine's kind of core; None where it is no known one."""
        info = InstanceInfo()
        self.call("nrt_get_instance_info", ctypes.byref(info), ctypes.sizeof(info))
        return next((name for name, family in _TARGETS.items() if info.family in family), None)

    def memory(self, device: int) -> tuple[int, int]:
        """The bytes in use and the bytes there are, of a core's memory."""
        stats, size = MemoryStats(), c_size_t()
        self.call(
            "nrt_get_vnc_memory_stats",
            device,
            ctypes.byref(stats),
            ctypes.sizeof(stats),
            ctypes.byref(size),
        )
        return stats.bytes_used, stats.bytes_limit


def _missing() -> str:
    chosen = os.environ.get("NEURON_STREAMS_LIBNRT")
    where = f"NEURON_STREAMS_LIBNRT={chosen}" if chosen else ", ".join(PLACES)
    raise LibraryError(
        f"there is no libnrt here (looked for {where}); install aws-neuronx-runtime-lib, or name "
        "the library in NEURON_STREAMS_LIBNRT"
    )


def _version_of(library: ctypes.CDLL, path: str) -> Version:
    function = getattr(library, "nrt_get_version", None)
    if function is None:
        raise LibraryError(
            f"{path} is no libnrt: it has no nrt_get_version; name another library in "
            "NEURON_STREAMS_LIBNRT"
        )
    version = Version()
    function.argtypes = (POINTER(Version), c_size_t)
    check(function(ctypes.byref(version), ctypes.sizeof(version)), "nrt_get_version")
    return version


def _abi_of(library: ctypes.CDLL, version: Version, path: str) -> Abi:
    """The ABI that the symbols show. Raises LibraryError unless the version agrees."""
    tracker = hasattr(library, "nrta_error_tracker_create")
    eventfd = hasattr(library, "nrta_event_register_xu_completion")
    found = f"libnrt {version} ({path})"
    if not hasattr(library, "nrta_execute_schedule"):
        raise LibraryError(
            f"{found} has no asynchronous calls; install aws-neuronx-runtime-lib of SDK 2.28 or "
            "later"
        )
    by_symbols = Abi.SDK_2_28 if tracker else Abi.SDK_2_30 if eventfd else Abi.SDK_2_29
    minor = version.rt_minor if version.rt_major == 2 else 0
    by_version = {30: Abi.SDK_2_28, 31: Abi.SDK_2_29}.get(
        minor, Abi.SDK_2_30 if minor >= 32 else None
    )
    if (tracker and eventfd) or by_symbols is not by_version:
        shown = "both error trackers and eventfds" if tracker and eventfd else by_symbols.value
        said = "no known SDK" if by_version is None else f"SDK {by_version.value}"
        raise LibraryError(
            f"{found}: its symbols show the asynchronous ABI of {shown}, its version that of "
            f"{said}, and to call the wrong one would corrupt memory; install a released "
            "aws-neuronx-runtime-lib (SDK 2.28 or later), or a newer neuron_streams"
        )
    return by_symbols
