"""Devices: which there are, which is current, and the first use of everything.

The current device and the current streams belong to a thread. They live in a `Context` that is
bound to the runtime of the process, so that tests can put another runtime in its place.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from neuron_streams._runtime import process
from neuron_streams._runtime.port import Failure, Runtime, Sleep, Ticket

if TYPE_CHECKING:
    from neuron_streams.stream import NeuronStream, StreamState

__all__ = [
    "DeviceLike",
    "current_device",
    "device",
    "device_count",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "init",
    "is_available",
    "is_initialized",
    "set_device",
    "synchronize",
]

DeviceLike: TypeAlias = "torch.device | str | int | None"


class _Thread(threading.local):
    """What belongs to a thread: its current device and its current stream on each device."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, NeuronStream] = {}


class Context:
    """All that hangs on one runtime: threads' current things, default streams, live streams."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.count = runtime.device_count()
        self.thread = _Thread()
        self.lock = threading.Lock()
        self.defaults: dict[int, NeuronStream] = {}
        self.states: weakref.WeakValueDictionary[int, StreamState] = weakref.WeakValueDictionary()
        self.told: dict[int, dict[int, int]] = {}  # device: lane: failures seen up to this value


_context: Context | None = None


def context() -> Context:
    """The context of the process's runtime; starts both at first use."""
    found = _context
    if found is not None and not process.in_bad_fork():
        return found
    return _begin(None)


def _begin(wanted: Runtime | str | None) -> Context:
    global _context
    runtime = process.start(wanted)
    register()
    if _context is None or _context.runtime is not runtime:
        _context = Context(runtime)
    return _context


def replace(runtime: Runtime | None) -> Runtime | None:
    """Swap the process's runtime and start with fresh streams; returns the old one (tests)."""
    global _context
    old = process.replace(runtime)
    _context = None
    if runtime is not None:
        _begin(None)
    return old


def register() -> None:
    """Make "neuron" a device of torch, once. Never at import: at the first use of anything."""
    name = torch._C._get_privateuse1_backend_name()
    module = sys.modules["neuron_streams"]
    if getattr(torch, "neuron", None) is module:
        return
    if name != "privateuseone":
        raise RuntimeError(
            f"neuron_streams: the device slot PrivateUse1 of this process is taken by {name!r}, "
            "and torch has one; use neuron_streams in a process of its own"
            + (" (native torch-neuronx has torch.neuron.Stream)" if name == "neuron" else "")
        )
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from neuron_streams import tensor

    _setup_privateuseone_for_python_backend("neuron", module)
    tensor.register_factories()


def init(runtime: str | None = None) -> None:
    """Start the runtime and register the device "neuron"; everything else calls it by itself.

    Args:
        runtime: `"auto"`, `"emulated"`, `"manual"` or `"nrt"`; None asks NEURON_STREAMS_RUNTIME.

    Raises:
        RuntimeError: another runtime is in use already, or the runtime cannot be had here.

    Host: waits for the runtime to start. Source: torch.cuda.init; `runtime` is added.
    """
    _begin(runtime)


def is_initialized() -> bool:
    """Whether anything of neuron_streams has been used in this process. Host: returns at once."""
    return process.is_started()


def is_available() -> bool:
    """Whether streams can be used here: always, since the CPU plays the device where none is."""
    return True


def device_count() -> int:
    """How many devices the runtime has; NEURON_STREAMS_DEVICE_COUNT sets it when emulated."""
    return context().count


def current_device() -> int:
    """The index of the calling thread's current device. Host: returns at once."""
    return context().thread.device


def index_of(device: DeviceLike, *, optional: bool = True) -> int:
    """The device index that an argument means; None is the current device."""
    if device is None:
        if not optional:
            raise ValueError("Expected a neuron device with a specified index, but got: None")
        return current_device()
    if isinstance(device, bool) or not isinstance(device, int):
        if isinstance(device, str):
            device = torch.device(device) if device != "neuron" else _bare()
        if not isinstance(device, torch.device):
            raise TypeError(f"Expected a neuron device, but got: {device!r}")
        if device.type not in ("neuron", "privateuseone"):
            raise ValueError(f"Expected a neuron device, but got: {device}")
        device = current_device() if device.index is None else device.index
    if not 0 <= device < context().count:
        raise RuntimeError(
            f"invalid device ordinal: there is no neuron:{device}, the devices are "
            f"neuron:0 to neuron:{context().count - 1}"
        )
    return device


def _bare() -> torch.device:
    context()  # torch knows the name only after registration
    return torch.device("neuron")


def set_device(device: DeviceLike) -> None:
    """Make a device current for the calling thread; a negative index changes nothing.

    Host: returns at once. Source: torch.cuda.set_device.
    """
    if isinstance(device, int) and device < 0:
        return
    context().thread.device = index_of(device)


class device:  # noqa: N801  (torch.cuda spells it so)
    """Make a device current inside a `with`; None or a negative index changes nothing.

    Host: returns at once. Source: torch.cuda.device.
    """

    def __init__(self, device: DeviceLike) -> None:
        nothing = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if nothing else index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            thread = context().thread
            self.prev_idx, thread.device = thread.device, self.idx

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        if self.idx >= 0:
            context().thread.device = self.prev_idx
        return False


def synchronize(device: DeviceLike = None) -> None:
    """Wait until everything submitted to a device has completed, on all of its streams.

    Raises:
        the first cause of each failure on the device that no `synchronize` of it raised before.

    Host: waits. Stream: nobody. Source: torch.cuda.synchronize.
    """
    found = context()
    index = index_of(device)
    for state in list(found.states.values()):
        if state.device == index:
            state.flush()
    told = found.told.setdefault(index, {})
    failures: list[Failure] = []
    for lane in found.runtime.lanes(index):
        last = Ticket(lane, found.runtime.submitted(lane))
        found.runtime.wait(last)
        failures += found.runtime.failures(last, told.get(lane, 0))
        told[lane] = last.value
    for lane in set(told).difference(found.runtime.lanes(index)):
        del told[lane]
    raise_first(failures)


def raise_first(failures: Iterable[Failure]) -> None:
    """Raise the first cause with the traceback that it was born with."""
    first = next(iter(failures), None)
    if first is not None:
        raise first.error.with_traceback(first.traceback)


class DeviceProperties(NamedTuple):
    """What is known of a device. `total_memory` in bytes: of the host where the CPU plays it."""

    name: str
    total_memory: int
    multi_processor_count: int


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Name, memory in bytes and core count of a device. Source: torch.cuda."""
    import os

    index_of(device)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceProperties(f"NeuronCore ({context().runtime.name})", memory, 1)


def get_device_name(device: DeviceLike = None) -> str:
    """The name of a device. Source: torch.cuda.get_device_name."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """(0, 0): the CPU has no NeuronCore version. Source: torch.cuda.get_device_capability."""
    index_of(device)
    return (0, 0)


def _sleep(cycles: int) -> None:
    """Keep the compute unit busy for `cycles` nanoseconds, on the current stream (for tests).

    Host: returns at once. Stream: sleeps. Source: torch.cuda._sleep, whose cycles are GPU clocks.
    """
    from neuron_streams.stream import current_stream

    current_stream()._submit(Sleep(cycles * 1e-9))


def _is_in_bad_fork() -> bool:
    """torch.manual_seed asks this of every device module."""
    return process.in_bad_fork()


def manual_seed_all(seed: int) -> None:
    """torch.manual_seed tells every device module; there is no device generator to seed."""
