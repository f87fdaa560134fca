"""Streams: in-order lists of commands on a device, spelled as in torch.cuda.

A stream is a view of a lane of the runtime, which lives in the extension together with what each
thread has as current. `_external` has ids and handles.
"""

from __future__ import annotations

import ctypes
import operator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeGuard

import torch
from typing_extensions import Self

from neuron_streams._context import DeviceLike, context, core, index_of
from neuron_streams._runtime.port import Command, Ticket
from neuron_streams.errors import ForeignError, UnsupportedError

if TYPE_CHECKING:
    from neuron_streams._event import Event

__all__ = [
    "NeuronStream",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "set_stream",
    "stream",
]

LEAST_PRIORITY, GREATEST_PRIORITY = 0, -3
DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1

_wait_event = torch.Stream.wait_event
_wait_stream = torch.Stream.wait_stream


def weakly(base: type) -> tuple[str, ...]:
    """The slot that makes subclasses of a class of torch weakly referable, if it lacks one."""
    return () if base.__weakrefoffset__ else ("__weakref__",)


class NeuronStream(torch.Stream):
    """An in-order queue of work on a device.

    Work on one stream runs in the order of submission; work on different streams in any order that
    events allow. Streams are never handed out twice.

    Args:
        device: where; None is the current device.
        priority: 0 (least) to -3 (greatest), clamped; a more urgent stream is served first.
        stream_id, device_index, device_type: instead of these, the ids of a living stream.

    Host: returns at once. Source: torch.cuda.Stream.
    """

    __slots__ = ("__dict__", "_state", *weakly(torch.Stream))

    _state: Any  # the extension's StreamState

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Self:
        context()
        if kwargs:
            from neuron_streams._external import state_of

            return cls._of(*state_of(device, **kwargs))
        clamped = min(LEAST_PRIORITY, max(GREATEST_PRIORITY, operator.index(priority)))
        state = core().open_stream(index_of(device), clamped)
        return cls._of(state, state.id)

    @classmethod
    def _of(cls, state: Any, stream_id: int) -> Self:
        made = super().__new__(
            cls, stream_id=stream_id, device_index=state.device, device_type=DEVICE_TYPE
        )
        made._state = state
        state.own(made)
        return made

    def __init__(self, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> None:
        pass  # torch.Stream is built in __new__

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None:
            state.disown(id(self))

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle or copy a stream; a process or thread makes its own")

    @property
    def priority(self) -> int:
        """From 0 (least) to -3 (greatest)."""
        priority: int = self._state.priority
        return priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """(least, greatest) priority: lower numbers are served first."""
        return (LEAST_PRIORITY, GREATEST_PRIORITY)

    @property
    def native_handle(self) -> int:
        """What `get_stream_from_external` takes; 0 for a default stream."""
        return self.stream_id & ~1

    @property
    def cuda_stream(self) -> int:
        """`native_handle` under the name that code for CUDA reads; no pointer to a CUDA stream."""
        return self.native_handle

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.native_handle)

    def __cuda_stream__(self) -> NoReturn:
        """Raises UnsupportedError: libraries ask for it to take the answer for a cudaStream_t."""
        raise UnsupportedError(
            "Stream.__cuda_stream__: this is no CUDA stream, and nothing here is a pointer to one; "
            "use native_handle with get_stream_from_external, or torch.cuda on a GPU"
        )

    def is_capturing(self) -> bool:
        """False: there is no graph capture."""
        return False

    def wait_event(self, event: torch.Event) -> None:
        """Make work submitted to this stream from now on wait for an event.

        Only the event's newest record counts, as it stands at this call; an unrecorded event is not
        waited for. Host: returns at once. Stream: waits. Source: torch.cuda.Stream.wait_event.
        """
        if not is_event(event):
            raise foreign_event(event)
        _wait_event(self, event)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Make work submitted from now on wait for all work submitted to another stream so far.

        Host: returns at once. Stream: waits. Source: torch.cuda.Stream.wait_stream.
        """
        if not is_stream(stream):
            raise foreign_stream(stream)
        _wait_stream(self, stream)

    def record_event(self, event: torch.Event | None = None) -> Event:
        """Record an event here, a new one if none is given; returns it. Host: returns at once."""
        from neuron_streams._event import Event

        recorded = Event() if event is None else event
        if not is_event(recorded):
            raise foreign_event(event)
        recorded.record(self)
        return recorded  # type: ignore[return-value]

    def query(self) -> bool:
        """Whether all work submitted so far has completed. Host: returns at once."""
        return super().query()

    def synchronize(self) -> None:
        """Wait until all work submitted so far has completed.

        Raises:
            the first cause of each failure on this stream that it has not raised before.

        Host: waits. Stream: nobody. Source: torch.cuda.Stream.synchronize.
        """
        super().synchronize()

    def _submit(self, command: Command) -> Ticket:
        ticket: Ticket = self._state.submit(command)
        return ticket

    def __enter__(self) -> Self:
        core().enter(self, self._state)
        return self

    def __exit__(  # type: ignore[override]
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> Literal[False]:
        if not core().leave(self):
            raise RuntimeError("Stream.__exit__: this thread has not entered the stream")
        return False

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NeuronStream)
            and self._state.same(other._state)
            and self.stream_id == other.stream_id
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        return NotImplemented

    __gt__ = __le__ = __ge__ = __lt__

    def __hash__(self) -> int:
        return hash((self.native_handle, self._state.device))

    def __repr__(self) -> str:
        return (
            f"<neuron_streams.{type(self).__name__.removeprefix('Neuron')} "
            f"device=neuron:{self._state.device} stream_id={self.stream_id:#x}>"
        )


Stream = NeuronStream


def is_stream(stream: object) -> TypeGuard[torch.Stream]:
    """Whether it is a stream of a Neuron device, whatever torch calls it."""
    return isinstance(stream, torch.Stream) and stream.device_type == DEVICE_TYPE


def is_event(event: object) -> TypeGuard[torch.Event]:
    """Whether it is an event of a Neuron device, whatever torch calls it."""
    return isinstance(event, torch.Event) and (
        hasattr(event, "_timed") or torch.Event.device.__get__(event).type == "neuron"
    )


def as_stream(stream: object) -> NeuronStream:
    """One of ours, whatever torch calls it; a foreign one is refused with a sentence."""
    if isinstance(stream, NeuronStream):
        return stream
    if is_stream(stream):
        return NeuronStream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
    raise foreign_stream(stream)


def foreign_stream(stream: object) -> ForeignError:
    return ForeignError(
        f"a Neuron stream is expected, but got {type(stream).__name__}; "
        "make one with neuron_streams.Stream()"
    )


def foreign_event(event: object) -> ForeignError:
    return ForeignError(
        f"a Neuron event is expected, but got {type(event).__name__}; "
        "make one with neuron_streams.Event()"
    )


def default_stream(device: DeviceLike = None) -> NeuronStream:
    """The stream of a device that is current until another is set; its id is 0.

    Host: returns at once. Source: torch.cuda.default_stream.
    """
    context()
    return _wrapped(core().default_stream(index_of(device)))


def current_stream(device: DeviceLike = None) -> NeuronStream:
    """The calling thread's current stream on a device. Host: returns at once.

    Source: torch.cuda.current_stream.
    """
    return _wrapped(core().current_stream(-1 if device is None else index_of(device)))


def _wrapped(found: Any) -> NeuronStream:
    """A stream object, or one over a state that has none yet."""
    if type(found) is NeuronStream:  # what isinstance asks of torch.Stream's metaclass takes longer
        return found
    if isinstance(found, NeuronStream):
        return found
    made = NeuronStream._of(found, found.id)
    if found.id == 0:  # a default stream: always asked for again
        context().kept.append(made)
    return made


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream, and its device, current for the calling thread; None changes nothing.

    Host: returns at once. Source: torch.cuda.set_stream.
    """
    if stream is not None:
        core().set_stream(as_stream(stream)._state)


class StreamContext:
    """Make a stream current inside a `with`; None changes nothing. See `stream`.

    What is restored is kept per thread and per entry, so that one object may be entered again,
    nested, and by several threads. A thread that leaves what another entered (a generator that
    moved) puts the other's stream back and keeps its own.
    """

    __slots__ = ("_here", "stream")

    def __init__(self, stream: torch.Stream | None) -> None:
        ours = type(stream) is NeuronStream or stream is None
        self.stream: Any = stream if ours else as_stream(stream)
        self._here: Any = None  # what the thread that entered has as current

    def __enter__(self) -> None:
        if self.stream is not None:
            self._here = core().enter(self, self.stream._state)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        if self.stream is not None and not core().leave(self) and self._here is not None:
            self._here.leave(self)
        return False


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context in which a stream is current: `with neuron_streams.stream(s): ...`.

    Host: returns at once. Stream: nobody. Source: torch.cuda.stream.
    """
    return StreamContext(stream)
