"""Streams: in-order lists of commands on a device, spelled as in torch.cuda.

A stream is a view of a lane; all stream objects of one lane share a `StreamState`. `wait_event` is
remembered there and goes out with the next command, because an empty command per wait would cost
more than the wait; whatever looks at the stream first (record, query, synchronize) makes it count.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import Self

from neuron_streams._runtime.port import Buffer, Command, Marker, Ticket
from neuron_streams.device import Context, DeviceLike, context, index_of, raise_first

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
_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1


def implicit_waits() -> bool:
    """Whether a command waits for the writers of what it reads on other streams by itself."""
    return os.environ.get("NEURON_STREAMS_IMPLICIT_WAITS", "1") != "0"


class StreamState:
    """A lane, the waits that its next command takes along, and which failures were raised."""

    __slots__ = (
        "__weakref__",
        "context",
        "device",
        "implicit",
        "lane",
        "lock",
        "priority",
        "raised",
        "waits",
    )

    def __init__(self, context: Context, device: int, priority: int) -> None:
        self.context = context
        self.device = device
        self.priority = priority
        self.lane = context.runtime.open_lane(device, priority)
        self.lock = threading.Lock()
        self.waits: dict[int, int] = {}  # lane: value; of two waits on a lane the later counts
        self.raised = 0
        self.implicit = implicit_waits()
        context.states[self.lane] = self

    def __del__(self) -> None:
        if hasattr(self, "lane"):
            self.context.runtime.close_lane(self.lane)

    def submit(
        self, command: Command, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> Ticket:
        """Submit a command behind all that the stream waits for; the door to the runtime."""
        lane = self.lane
        with self.lock:
            after = self._take_waits()
            for buffer in reads:
                buffer.named = True
                writer = buffer.writer
                if self.implicit and writer is not None and writer.lane != lane:
                    after.append(writer)
            ticket = self.context.runtime.submit(lane, command, after)
            for buffer in writes:
                buffer.named = True
                buffer.writer = ticket
        return ticket

    def flush(self) -> None:
        """Turn the waits that are only remembered into a command."""
        with self.lock:
            if self.waits:
                self.context.runtime.submit(self.lane, Marker(name="wait"), self._take_waits())

    def _take_waits(self) -> list[Ticket]:
        if not self.waits:
            return []
        waits, self.waits = self.waits, {}
        return [Ticket(lane, value) for lane, value in waits.items()]

    def ticket(self) -> Ticket:
        """The ticket of the last command, remembered waits included."""
        self.flush()
        return Ticket(self.lane, self.context.runtime.submitted(self.lane))

    def wait(self, ticket: Ticket) -> None:
        """Order what is submitted from now on behind a ticket."""
        runtime = self.context.runtime
        if ticket.lane != self.lane and runtime.completed(ticket.lane) < ticket.value:
            with self.lock:
                known = self.waits.get(ticket.lane, 0)
                self.waits[ticket.lane] = max(known, ticket.value)


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

    _state: StreamState
    _saved: dict[int, list[StreamContext]]

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Self:
        found = context()
        if kwargs:
            state = _state_of_ids(found, **kwargs)
        else:
            clamped = min(LEAST_PRIORITY, max(GREATEST_PRIORITY, priority))
            state = StreamState(found, index_of(device), clamped)
        return cls._of(state)

    @classmethod
    def _of(cls, state: StreamState, stream_id: int | None = None) -> Self:
        made = super().__new__(
            cls,
            stream_id=state.lane if stream_id is None else stream_id,
            device_index=state.device,
            device_type=_DEVICE_TYPE,
        )
        made._state = state
        made._saved = {}
        return made

    def __init__(self, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> None:
        pass  # torch.Stream is built in __new__

    @property
    def priority(self) -> int:
        return self._state.priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """(least, greatest) priority: lower numbers are served first."""
        return (LEAST_PRIORITY, GREATEST_PRIORITY)

    def wait_event(self, event: torch.Event) -> None:
        """Make work submitted to this stream from now on wait for an event.

        Only the event's newest record counts, as it stands at this call; an unrecorded event makes
        nobody wait. Host: returns at once. Stream: waits. Source: torch.cuda.Stream.wait_event.
        """
        ticket = as_event(event)._ticket
        if ticket is not None:
            self._state.wait(ticket)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Make work submitted from now on wait for all work submitted to another stream so far.

        Host: returns at once. Stream: waits. Source: torch.cuda.Stream.wait_stream.
        """
        self._state.wait(as_stream(stream)._state.ticket())

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Record an event here, a new one if none is given; returns it. Host: returns at once."""
        if event is None:
            from neuron_streams.event import Event

            event = Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work submitted so far has completed. Host: returns at once."""
        ticket = self._state.ticket()
        return self._state.context.runtime.completed(ticket.lane) >= ticket.value

    def synchronize(self) -> None:
        """Wait until all work submitted so far has completed.

        Raises:
            the first cause of each failure on this stream that it has not raised before.

        Host: waits. Stream: nobody. Source: torch.cuda.Stream.synchronize.
        """
        state = self._state
        runtime = state.context.runtime
        ticket = state.ticket()
        runtime.wait(ticket)
        raised, state.raised = state.raised, max(state.raised, ticket.value)
        raise_first(runtime.failures(ticket, raised))

    def _submit(
        self, command: Command, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> Ticket:
        return self._state.submit(command, reads, writes)

    def __enter__(self) -> Self:
        entered = StreamContext(self)
        entered.__enter__()
        self._saved.setdefault(threading.get_ident(), []).append(entered)
        return self

    def __exit__(  # type: ignore[override]
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> Literal[False]:
        entered = self._saved.get(threading.get_ident())
        if not entered:
            raise RuntimeError("Stream.__exit__: this thread has not entered the stream")
        return entered.pop().__exit__(kind, error, traceback)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NeuronStream) and self._state is other._state

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        return NotImplemented

    __gt__ = __le__ = __ge__ = __lt__

    def __hash__(self) -> int:
        return hash((self._state.lane, self._state.device))

    def __repr__(self) -> str:
        return (
            f"<neuron_streams.Stream device=neuron:{self._state.device} "
            f"stream_id={self.stream_id:#x}>"
        )


Stream = NeuronStream


def _state_of_ids(
    found: Context, stream_id: int, device_index: int, device_type: int = _DEVICE_TYPE
) -> StreamState:
    if device_type != _DEVICE_TYPE:
        raise ValueError(
            f"Stream(device_type={device_type}): not a Neuron stream, whose device_type is "
            f"{_DEVICE_TYPE}"
        )
    if stream_id == 0:
        return default_stream(device_index)._state
    state = found.states.get(stream_id)
    if state is None or state.device != device_index:
        raise RuntimeError(
            f"Stream(stream_id={stream_id}, device_index={device_index}): there is no such stream; "
            "it lives only as long as an object of it"
        )
    return state


def as_stream(stream: object) -> NeuronStream:
    """One of ours, whatever torch calls it; a foreign one is refused with a sentence."""
    if isinstance(stream, NeuronStream):
        return stream
    if isinstance(stream, torch.Stream) and stream.device_type == _DEVICE_TYPE:
        return NeuronStream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
    raise TypeError(
        f"a Neuron stream is expected, but got {type(stream).__name__}; "
        "make one with neuron_streams.Stream()"
    )


def as_event(event: object) -> Event:
    from neuron_streams.event import Event

    if isinstance(event, Event):
        return event
    raise TypeError(
        f"a Neuron event is expected, but got {type(event).__name__}; "
        "make one with neuron_streams.Event()"
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
                made = NeuronStream._of(StreamState(found, index, 0), stream_id=0)
                found.defaults[index] = made
    return made


def current_stream(device: DeviceLike = None) -> NeuronStream:
    """The calling thread's current stream on a device. Host: returns at once.

    Source: torch.cuda.current_stream.
    """
    thread = context().thread
    index = thread.device if device is None else index_of(device)
    found = thread.streams.get(index)
    return default_stream(index) if found is None else found


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream, and its device, current for the calling thread; None changes nothing.

    Host: returns at once. Source: torch.cuda.set_stream.
    """
    if stream is not None:
        ours = as_stream(stream)
        thread = context().thread
        thread.device = ours._state.device
        thread.streams[ours._state.device] = ours


class StreamContext:
    """Make a stream current inside a `with`; None changes nothing. See `stream`.

    What is restored is kept here, per thread and per entry, so that one object may be entered
    again, nested, and by several threads.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = None if stream is None else as_stream(stream)
        self._saved: dict[int, list[tuple[int, NeuronStream | None]]] = {}

    def __enter__(self) -> None:
        ours = self.stream
        if ours is None:
            return
        thread = context().thread
        index = ours._state.device
        saved = (thread.device, thread.streams.get(index))
        self._saved.setdefault(threading.get_ident(), []).append(saved)
        thread.device = index
        thread.streams[index] = ours

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        if self.stream is None:
            return False
        ident = threading.get_ident()
        thread = context().thread
        device, before = self._saved[ident].pop()
        if not self._saved[ident]:
            del self._saved[ident]
        index = self.stream._state.device
        if before is None:
            thread.streams.pop(index, None)
        else:
            thread.streams[index] = before
        thread.device = device
        return False


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context in which a stream is current: `with neuron_streams.stream(s): ...`.

    Host: returns at once. Stream: nobody. Source: torch.cuda.stream.
    """
    return StreamContext(stream)
