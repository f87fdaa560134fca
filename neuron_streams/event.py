"""Events: one frozen ticket each. Recording again takes another ticket; waits keep the old one."""

from __future__ import annotations

import ctypes
from typing import NoReturn

import torch
from typing_extensions import Self

from neuron_streams import surface
from neuron_streams._runtime.port import Marker, Ticket
from neuron_streams.context import raise_first
from neuron_streams.errors import ForeignError, UnsupportedError
from neuron_streams.lane import StreamState, weakly
from neuron_streams.stream import NeuronStream, as_stream, current_stream

__all__ = ["Event"]


class Event(torch.Event):
    """A point in the work of a stream, to wait for and to measure from.

    Args:
        enable_timing: keep the moment at which each record completes.
        blocking: how `synchronize` waits in CUDA; here every wait sleeps, so it changes nothing.
        interprocess: refused, since tickets mean nothing to another process.
        external: matters only while a graph is captured, so it changes nothing.

    Host: returns at once. Source: torch.cuda.Event.
    """

    __slots__ = (
        "__dict__",
        "_marker",
        "_since",
        "_state",
        "_ticket",
        "_timed",
        *weakly(torch.Event),
    )

    _ticket: Ticket | None
    _state: StreamState | None
    _marker: Marker | None
    _since: int
    _timed: bool
    ipc_handle = surface.Absent("torch.cuda.Event")
    from_ipc_handle = surface.Absent("torch.cuda.Event")

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Self:
        if interprocess:
            raise UnsupportedError(
                "Event(interprocess=True): a Neuron event cannot cross processes; "
                "synchronize it, then send the data with torch.multiprocessing"
            )
        made = super().__new__(cls)
        made._ticket = made._state = made._marker = None
        made._timed = enable_timing
        return made

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        pass  # torch.Event is built in __new__

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle or copy an event; record another one")

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """The device of the first record; None before it."""
        return None if self._state is None else torch.device("neuron", self._state.device)

    @property
    def event_id(self) -> int:  # type: ignore[override]
        """0 before the first record, then a number that no other living event has."""
        return 0 if self._state is None else id(self)

    @property
    def cuda_event(self) -> int:
        """`event_id` under the name that code for CUDA reads; no pointer to a CUDA event."""
        return self.event_id

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.event_id)

    def record(self, stream: torch.Stream | None = None) -> None:
        """Take the place behind all work submitted so far to a stream (None: the current one).

        Raises:
            RuntimeError: the event was recorded on another device before.

        Host: returns at once. Stream: nobody. Source: torch.cuda.Event.record.
        """
        if type(stream) is NeuronStream:
            state = stream._state
        else:
            state = (current_stream() if stream is None else as_stream(stream))._state
        if self._state is not state:
            self._check_device(state)
        if self._timed:
            self._marker = Marker(timed=True, name="event")
            self._ticket = state.submit(self._marker)
        else:
            self._ticket = state.ticket() if state.waits else state.last or state.ticket()
        self._since = state.seen
        self._state = state

    def _check_device(self, state: StreamState) -> None:
        if self._state is not None and self._state.device != state.device:
            raise RuntimeError(
                f"Event device {self._state.device} does not match recording stream's device "
                f"{state.device}."
            )

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make work submitted to a stream (None: the current one) from now on wait for the event.

        Host: returns at once. Stream: waits. Source: torch.cuda.Event.wait.
        """
        (current_stream() if stream is None else as_stream(stream)).wait_event(self)

    def query(self) -> bool:
        """Whether the newest record has completed; True for an unrecorded event.

        Host: returns at once. Source: torch.cuda.Event.query.
        """
        state = self._state
        if state is None:
            return True
        lane, value = self._ticket  # type: ignore[misc]
        return state.context.runtime.completed(lane) >= value

    def synchronize(self) -> None:
        """Wait until the newest record has completed; an unrecorded event is not waited for.

        Raises:
            the first cause of each failure before the record, once per event; of failures that
            were raised before the record, none.

        Host: waits, asleep. Stream: nobody. Source: torch.cuda.Event.synchronize.
        """
        state, ticket = self._state, self._ticket
        if state is None or ticket is None:
            return
        runtime = state.context.runtime
        runtime.wait(ticket)
        since, self._since = self._since, max(self._since, ticket.value)
        raise_first(state.see(ticket, since))

    def elapsed_time(self, end_event: Event) -> float:  # type: ignore[override]
        """Milliseconds from the completion of this event to that of another.

        Raises:
            ValueError: one of them has no timing, or was never recorded.
            RuntimeError: one of them has not completed, or they are on two devices.

        Host: returns at once. Source: torch.cuda.Event.elapsed_time.
        """
        as_event(end_event)
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        start, end = self._marker, end_event._marker
        if start is None or end is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if start.at is None or end.at is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self.device != end_event.device:
            raise RuntimeError(
                f"elapsed_time: the events are on {self.device} and {end_event.device}, whose "
                "clocks cannot be compared; record both on one device"
            )
        return (end.at - start.at) * 1e3

    def __repr__(self) -> str:
        if self._ticket is None:
            return "<neuron_streams.Event uninitialized>"
        done = "completed" if self.query() else "pending"
        return f"<neuron_streams.Event lane={self._ticket.lane} value={self._ticket.value} {done}>"


def as_event(event: object) -> Event:
    """One of ours; a foreign one is refused with a sentence."""
    if isinstance(event, Event):
        return event
    raise ForeignError(
        f"a Neuron event is expected, but got {type(event).__name__}; "
        "make one with neuron_streams.Event()"
    )
