"""Streams: in-order lists of commands on a device, spelled as in torch.cuda.

A stream is a view of a lane, whose objects share a `StreamState`. `external` has ids and handles.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from typing_extensions import Self

from neuron_streams._runtime.port import Buffer, Command, Ticket
from neuron_streams.context import DeviceLike, Here, context, held, index_of, raise_first
from neuron_streams.device import check_sync
from neuron_streams.errors import ForeignError, UnsupportedError
from neuron_streams.lane import StreamState, weakly

if TYPE_CHECKING:
    from neuron_streams.event import Event

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

    _state: StreamState

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Self:
        found = context()
        if kwargs:
            from neuron_streams.external import state_of

            return cls._of(*state_of(found, device, **kwargs))
        clamped = min(LEAST_PRIORITY, max(GREATEST_PRIORITY, operator.index(priority)))
        state = StreamState(found, index_of(device), clamped)
        return cls._of(state, state.lane << 1 | 1)

    @classmethod
    def _of(cls, state: StreamState, stream_id: int) -> Self:
        made = super().__new__(
            cls, stream_id=stream_id, device_index=state.device, device_type=DEVICE_TYPE
        )
        made._state = state
        return made

    def __init__(self, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> None:
        pass  # torch.Stream is built in __new__

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle or copy a stream; a process or thread makes its own")

    @property
    def priority(self) -> int:
        """From 0 (least) to -3 (greatest)."""
        return self._state.priority

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

        Only the event's newest record counts, as it stands at this call; an unrecorded event makes
        nobody wait. Host: returns at once. Stream: waits. Source: torch.cuda.Stream.wait_event.
        """
        try:
            ticket = event._ticket  # type: ignore[attr-defined]
        except AttributeError:
            from neuron_streams.event import as_event

            ticket = as_event(event)._ticket
        if ticket is not None:
            self._state.wait(ticket)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Make work submitted from now on wait for all work submitted to another stream so far.

        Host: returns at once. Stream: waits. Source: torch.cuda.Stream.wait_stream.
        """
        other = stream._state if type(stream) is NeuronStream else as_stream(stream)._state
        self._state.wait(other.ticket() if other.waits else other.last or other.ticket())

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Record an event here, a new one if none is given; returns it. Host: returns at once."""
        from neuron_streams.event import Event, as_event

        recorded = Event() if event is None else as_event(event)
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        """Whether all work submitted so far has completed. Host: returns at once."""
        return self._state.done()

    def synchronize(self) -> None:
        """Wait until all work submitted so far has completed.

        Raises:
            the first cause of each failure on this stream that it has not raised before.

        Host: waits. Stream: nobody. Source: torch.cuda.Stream.synchronize.
        """
        state = self._state
        check_sync()
        ticket = state.ticket()
        state.context.runtime.wait(ticket)
        raise_first(state.failures(ticket))

    def _submit(
        self, command: Command, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> Ticket:
        return self._state.submit(command, reads, writes)

    def __enter__(self) -> Self:
        context().threads.here.enter(self, self, self._state.device)
        return self

    def __exit__(  # type: ignore[override]
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> Literal[False]:
        if not context().threads.here.leave(self):
            raise RuntimeError("Stream.__exit__: this thread has not entered the stream")
        return False

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NeuronStream)
            and self._state is other._state
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


def as_stream(stream: object) -> NeuronStream:
    """One of ours, whatever torch calls it; a foreign one is refused with a sentence."""
    if isinstance(stream, NeuronStream):
        return stream
    if isinstance(stream, torch.Stream) and stream.device_type == DEVICE_TYPE:
        return NeuronStream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
    raise ForeignError(
        f"a Neuron stream is expected, but got {type(stream).__name__}; "
        "make one with neuron_streams.Stream()"
    )


def default_stream(device: DeviceLike = None) -> NeuronStream:
    """The stream of a device that is current until another is set; its id is 0.

    Host: returns at once. Source: torch.cuda.default_stream.
    """
    found = context()
    index = index_of(device)
    made = found.defaults.get(index)
    if made is None:
        with found.lock:
            made = found.defaults.get(index)
            if made is None:
                made = NeuronStream._of(StreamState(found, index, 0), 0)
                found.defaults[index] = made
    return made


def current_stream(device: DeviceLike = None) -> NeuronStream:
    """The calling thread's current stream on a device. Host: returns at once.

    Source: torch.cuda.current_stream.
    """
    found = held.context
    if device is not None or found is None:
        index = index_of(device)
        return context().threads.here.streams.get(index) or default_stream(index)
    here = found.threads.here
    stream = here.stream
    if stream is None:
        stream = here.stream = default_stream(here.device)
    return stream


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream, and its device, current for the calling thread; None changes nothing.

    Host: returns at once. Source: torch.cuda.set_stream.
    """
    if stream is not None:
        ours = as_stream(stream)
        here = context().threads.here
        here.streams[ours._state.device] = ours
        here.go(ours._state.device)


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
        self._here: Here | None = None

    def __enter__(self) -> None:
        stream = self.stream
        if stream is not None:
            found = held.context or context()
            here = self._here = found.threads.here
            here.enter(self, stream, stream._state.device)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        if self.stream is None:
            return False
        found = held.context or context()
        if not found.threads.here.leave(self) and self._here is not None:
            self._here.leave(self, mine=False)
        return False


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context in which a stream is current: `with neuron_streams.stream(s): ...`.

    Host: returns at once. Stream: nobody. Source: torch.cuda.stream.
    """
    return StreamContext(stream)
