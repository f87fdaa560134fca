"""What a process and its threads hold: the runtime, the current device, the current streams.

The current device and the current streams belong to a thread. They live in a `Context` that is
bound to the runtime of the process, so that tests can put another runtime in its place. A file of
its own because streams, devices and memory all stand on it.

Two switches of the environment are read when a context begins: NEURON_LAUNCH_BLOCKING=1 has every
submission wait, and raise what fails, where it is made; NEURON_STREAMS_TRACE_SUBMISSIONS=1 puts the
place of submission into the message of a failure. TORCH_LOGS="+neuron_streams" logs submissions.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from neuron_streams import _dynamo
from neuron_streams._runtime import process
from neuron_streams._runtime.port import Failure, Runtime
from neuron_streams.errors import AcceleratorError
from neuron_streams.placement import follow

if TYPE_CHECKING:
    from neuron_streams.lane import StreamState
    from neuron_streams.stream import NeuronStream

__all__ = ["Context", "DeviceLike", "Here", "context", "held", "index_of", "raise_first", "replace"]

log = logging.getLogger("neuron_streams")

DeviceLike: TypeAlias = "torch.device | str | int | None"


class Here:
    """What belongs to one thread.

    `streams` has what was set per device; `stream` is the current stream of the current device, or
    None where nobody has asked yet; `entered` is the stack of contexts to be left again.
    """

    __slots__ = ("device", "entered", "stream", "streams")

    def __init__(self) -> None:
        self.device = 0
        self.stream: NeuronStream | None = None
        self.streams: dict[int, NeuronStream] = {}
        self.entered: list[tuple[object, int, int, NeuronStream | None]] = []

    def go(self, device: int) -> None:
        """Make a device current."""
        before, self.device = self.device, device
        self.stream = self.streams.get(device)
        if before != device:
            follow(device)

    def enter(self, owner: object, stream: NeuronStream, index: int) -> None:
        """Make a stream of device `index` current until `owner` is left."""
        streams, before = self.streams, self.device
        self.entered.append((owner, before, index, streams.get(index)))
        streams[index] = self.stream = stream
        if before != index:
            self.device = index
            follow(index)

    def leave(self, owner: object, mine: bool = True) -> bool:
        """Put back what the thread had when it last entered `owner`; False if it has not.

        `mine` is whether the thread is the calling one.

        Mostly that is the top of the stack. Generators and tasks may leave in another order: then
        each puts back what it found, as in torch.cuda.
        """
        entered = self.entered
        at = len(entered) - 1
        while at >= 0 and entered[at][0] is not owner:
            at -= 1
        if at < 0:
            return False
        _, device, index, before = entered.pop(at)
        if before is None:
            self.streams.pop(index, None)
        else:
            self.streams[index] = before
        self.stream = self.streams.get(device)
        if device != self.device:
            self.device = device
            if mine:
                follow(device)
        return True


class _Threads(threading.local):
    def __init__(self) -> None:
        self.here = Here()


class Context:
    """All that hangs on one runtime: threads' current things, default streams, live streams."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.count = runtime.device_count()
        self.threads = _Threads()
        self.lock = threading.RLock()
        self.defaults: dict[int, NeuronStream] = {}
        self.states: weakref.WeakValueDictionary[int, StreamState] = weakref.WeakValueDictionary()
        self.told: dict[int, dict[int, int]] = {}  # device: lane: failures seen up to this value
        self.blocking = _switched_on("NEURON_LAUNCH_BLOCKING")
        self.tracing = _switched_on("NEURON_STREAMS_TRACE_SUBMISSIONS")
        self.logging = log.isEnabledFor(logging.DEBUG)
        self.watched = self.blocking or self.tracing or self.logging
        _contexts.add(self)

    @property
    def thread(self) -> Here:
        """What belongs to the calling thread."""
        return self.threads.here


def _switched_on(name: str) -> bool:
    return os.environ.get(name, "0").strip() not in ("", "0")


class _Held:
    """The context of the process: an attribute, so that every module sees it change."""

    __slots__ = ("context",)

    def __init__(self) -> None:
        self.context: Context | None = None


held = _Held()
_contexts: weakref.WeakSet[Context] = weakref.WeakSet()
_lock = threading.RLock()
_forking = False


def context() -> Context:
    """The context of the process's runtime; starts both at first use."""
    found = held.context
    return found if found is not None else begin(None)


def begin(wanted: Runtime | str | None) -> Context:
    """Start the runtime of this process, or check that it is the one wanted."""
    runtime = process.start(wanted)
    with _lock:
        _watch_forks()
        register()
        found = held.context
        if found is None or found.runtime is not runtime:
            found = held.context = Context(runtime)
        return found


def replace(runtime: Runtime | None) -> Runtime | None:
    """Swap the process's runtime and start with fresh streams; returns the old one (tests)."""
    old = process.replace(runtime)
    held.context = None
    if runtime is not None:
        begin(None)
    return old


def register() -> None:
    """Make "neuron" a device of torch, once. Never at import: at the first use of anything."""
    module = sys.modules["neuron_streams"]
    if getattr(torch, "neuron", None) is module:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(
            f"neuron_streams: the device slot PrivateUse1 of this process is taken by {name!r}, "
            "and torch has one; use neuron_streams in a process of its own"
            + (" (native torch-neuronx has torch.neuron.Stream)" if name == "neuron" else "")
        )
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from neuron_streams import accelerator, ops

    _setup_privateuseone_for_python_backend("neuron", module)
    ops.register()
    accelerator.take_over()
    _dynamo.prepare()


class _Forked:
    """Stands for the runtime in the child of a fork, where its threads are not."""

    def close_lane(self, lane: int) -> None:
        """Destructors call it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(process.FORKED)


def _watch_forks() -> None:
    global _forking
    if not _forking:
        _forking = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it
    held.context = None
    for found in list(_contexts):
        found.runtime = cast("Runtime", _Forked())
        for state in found.states.values():
            state.last = None  # which would answer without asking the runtime


def index_of(device: DeviceLike, *, optional: bool = True) -> int:
    """The device index that an argument means; where it names none, that of the current device.

    Raises:
        ValueError: it is no device of ours, or it names none and that is not `optional`.
        AcceleratorError: there is no such device.
    """
    index = device if type(device) is int else _index_in(device)
    if index is None:
        if not optional:
            raise ValueError(
                f"Expected a neuron device with a specified index or an integer, but got: {device}"
            )
        return context().threads.here.device
    if not 0 <= index < context().count:
        raise AcceleratorError(
            f"invalid device ordinal: there is no neuron:{index}, the devices are "
            f"neuron:0 to neuron:{context().count - 1}"
        )
    return index


def _index_in(device: object) -> int | None:
    if device is None or isinstance(device, int):
        return None if device is None else int(device)  # True is device 1, as in torch
    if isinstance(device, str):
        device = _parse(device)
    if isinstance(device, torch.device) and device.type in ("neuron", "privateuseone"):
        return device.index
    index = getattr(device, "idx", None)  # a context of `device`, as torch.cuda takes one
    if not isinstance(index, int):
        raise ValueError(f"Expected a neuron device, but got: {device}")
    return index


def _parse(device: str) -> torch.device:
    context()  # torch knows the name only after registration
    return torch.device(device)


def raise_first(failures: Iterable[Failure]) -> None:
    """Raise the first cause with the traceback that it was born with, and name the others."""
    found = list(failures)
    if found:
        process.linger()
        first, *others = found
        _note(first.error, _where(first))
        for number, other in enumerate(others):
            log.error("also failed, %s: %r", _where(other), other.error)
            if number < MOST_NOTES:
                _note(first.error, f"also failed, {_where(other)}: {other.error!r}")
        if len(others) > MOST_NOTES:
            _note(first.error, f"also failed: {len(others) - MOST_NOTES} more, see the log")
        raise first.error.with_traceback(first.traceback)


MOST_NOTES = 8
SUBMITTED = " submitted at "  # between a command's name and the place, if that is traced


def _where(failure: Failure) -> str:
    return f"in {failure.what!r}, command {failure.ticket.value} of lane {failure.ticket.lane}"


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)
    elif SUBMITTED in text and text not in str(error):  # Python 3.10 has no notes
        error.args = (f"{error} ({text})", *error.args[1:])
