"""Devices: which there are, which is current, how to wait for one, and what they are like."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

from neuron_streams._context import DeviceLike, begin, context, core, has_name, index_of, lazy_call
from neuron_streams._runtime import process
from neuron_streams.errors import AcceleratorError

__all__ = [
    "DeviceLike",
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_sync_debug_mode",
    "init",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "set_device",
    "set_sync_debug_mode",
    "synchronize",
]


def init(runtime: str | None = None) -> None:
    """Start the runtime and register the device "neuron"; everything else calls it by itself.

    Args:
        runtime: `"auto"`, `"emulated"`, `"manual"` or `"nrt"`; None asks NEURON_STREAMS_RUNTIME.

    Raises:
        RuntimeError: another runtime is in use already, or the runtime cannot be had here.

    Host: waits for the runtime to start. Source: torch.cuda.init; `runtime` is added.
    """
    begin(runtime)


def is_initialized() -> bool:
    """Whether anything of neuron_streams has been used in this process. Host: returns at once."""
    return process.is_started()


def is_available() -> bool:
    """Whether the device can be used here, which this does not begin.

    Always, since the CPU plays it where none is, but where another package has the name "neuron".
    """
    return has_name()


def device_count() -> int:
    """How many devices the runtime has; NEURON_STREAMS_DEVICE_COUNT sets it when emulated."""
    return context().count


def current_device() -> int:
    """The index of the calling thread's current device. Host: returns at once."""
    context()
    current: int = core().current_device()
    return current


def set_device(device: DeviceLike) -> None:
    """Make a device current for the calling thread; a negative index changes nothing.

    Raises:
        ValueError: it names no index, or is no device of ours.

    Host: returns at once. Source: torch.cuda.set_device.
    """
    if isinstance(device, int) and device < 0:
        return
    core().set_device(index_of(device, optional=False))


def _exchange_device(device: int) -> int:
    """Make a device current and return the index of the one before; -1 for a negative index."""
    if device < 0:
        return -1
    before = current_device()
    core().set_device(index_of(device))
    return before


_maybe_exchange_device = _exchange_device


class _DeviceGuard:
    """`device` for an index that is known; Dynamo and Inductor use it."""

    def __init__(self, index: int) -> None:
        self.idx = index
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(_exchange_device(self.idx))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        _maybe_exchange_device(self._before.pop())
        return False


class device(_DeviceGuard):  # noqa: N801  (torch.cuda spells it so)
    """Make a device current inside a `with`; None or a negative index changes nothing.

    Host: returns at once. Source: torch.cuda.device.
    """

    def __init__(self, device: DeviceLike) -> None:
        nothing = device is None or (isinstance(device, int) and device < 0)
        super().__init__(-1 if nothing else index_of(device))


class device_of(device):  # noqa: N801  (torch.cuda spells it so)
    """Make the device of a tensor current inside a `with`; one on the host changes nothing.

    Host: returns at once. Source: torch.cuda.device_of.
    """

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.get_device() if obj.device.type == "neuron" else -1)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    """Make the stream with these ids current for the calling thread; Dynamo uses it."""
    from neuron_streams._stream import Stream, set_stream

    set_stream(Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


def synchronize(device: DeviceLike = None) -> None:
    """Wait until everything submitted to a device has completed, on all of its streams.

    Raises:
        the first cause of each failure on the device that no `synchronize` of it raised before.

    Host: waits. Stream: nobody. Source: torch.cuda.synchronize.
    """
    context()
    core().synchronize_device(index_of(device))


_SYNC_MODES = ("default", "warn", "error")


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Have calls that wait for a stream without saying so in their name warn or raise.

    These are `Stream.synchronize` and everything that reads a tensor's values: `cpu`, `item`,
    `tolist`, a blocking `to("cpu")`. `Event.synchronize` and `synchronize` never do, as in CUDA.

    Args:
        debug_mode: 0 or "default" (neither), 1 or "warn", 2 or "error". For the whole process.

    Raises:
        RuntimeError: it is none of these.

    Host: returns at once. Source: torch.cuda.set_sync_debug_mode.
    """
    if debug_mode in _SYNC_MODES:
        debug_mode = _SYNC_MODES.index(str(debug_mode))
    if debug_mode not in (0, 1, 2):
        raise RuntimeError(
            "invalid value of debug_mode, expected one of `default`, `warn`, `error` or 0, 1, 2, "
            f"but got: {debug_mode!r}"
        )
    core().set_sync_debug_mode(int(debug_mode))


def get_sync_debug_mode() -> int:
    """0, 1 (warn) or 2 (error); see `set_sync_debug_mode`. Host: returns at once."""
    mode: int = core().get_sync_debug_mode()
    return mode


def is_current_stream_capturing() -> bool:
    """False: there is no graph capture. Source: torch.cuda.is_current_stream_capturing."""
    return False


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Whether a device reaches another's memory: all do, but none is its own peer."""
    return _known(device) != _known(peer_device)


def _known(device: DeviceLike) -> int:
    """`index_of`, but with the error of the functions that torch.cuda checks by itself."""
    try:
        return index_of(device)
    except AcceleratorError as error:
        told = str(error).removeprefix("invalid device ordinal: ")
        raise AssertionError(f"Invalid device id: {told}") from None


class DeviceProperties(NamedTuple):
    """What is known of a device. `total_memory` in bytes: of the host where the CPU plays it."""

    name: str
    total_memory: int
    multi_processor_count: int


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Name, memory in bytes and core count of a device. Source: torch.cuda."""
    _known(device)
    found = context()
    memory = found.port.capacity(index_of(device))
    return DeviceProperties(f"NeuronCore ({found.runtime.name})", memory, 1)


def get_device_name(device: DeviceLike = None) -> str:
    """The name of a device. Source: torch.cuda.get_device_name."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """(0, 0): the CPU has no NeuronCore version. Source: torch.cuda.get_device_capability."""
    _known(device)
    return (0, 0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What torch.autocast("neuron") can cast to; torch asks for it."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: every NeuronCore computes in bfloat16, and so does the CPU that plays one."""
    return True


def _sleep(cycles: int) -> None:
    """Keep the compute unit busy for `cycles` nanoseconds, on the current stream (for tests).

    Host: returns at once. Stream: sleeps. Source: torch.cuda._sleep, whose cycles are GPU clocks.
    """
    from neuron_streams._stream import current_stream

    current_stream()._submit(core().Sleep(operator.index(cycles) * 1e-9))


def _is_in_bad_fork() -> bool:
    """torch.manual_seed asks this of every device module."""
    return process.in_bad_fork()


def _lazy_init() -> None:
    """Torch calls it before it makes or moves a tensor to the device."""
    context()


def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:  # noqa: A002
    """Call a function now, or at the first use if that has not come yet.

    `seed` and `seed_all`, which CUDA takes, change nothing: calls run in their order.
    """
    lazy_call(callable)
