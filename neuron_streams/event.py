"""Events: one frozen ticket each. Recording again takes another ticket; waits keep the old one."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Self

from neuron_streams._runtime.port import Marker, Ticket
from neuron_streams.device import raise_first
from neuron_streams.errors import UnsupportedError
from neuron_streams.stream import StreamState, as_stream, current_stream

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

    _ticket: Ticket | None
    _state: StreamState | None
    _marker: Marker | None
    _raised: int
    _timed: bool

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
        made._raised = 0
        made._timed = enable_timing
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # torch.Event is built in __new__

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """The device of the first record; None before it."""
        return None if self._state is None else torch.device("neuron", self._state.device)

    def record(self, stream: torch.Stream | None = None) -> None:
        """Take the place behind all work submitted so far to a stream (None: the current one).

        Raises:
            RuntimeError: the event was recorded on another device before.

        Host: returns at once. Stream: nobody. Source: torch.cuda.Event.record.
        """
        state = (current_stream() if stream is None else as_stream(stream))._state
        if self._state is not None and self._state.device != state.device:
            raise RuntimeError(
                f"Event device {self._state.device} does not match recording stream's device "
                f"{state.device}."
            )
        if self._timed:
            marker = Marker(timed=True, name="event")
            ticket = state.submit(marker)
            self._marker = marker
        else:
            ticket = state.ticket()
        self._raised = state.raised
        self._state, self._ticket = state, ticket

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make work submitted to a stream (None: the current one) from now on wait for the event.

        Host: returns at once. Stream: waits. Source: torch.cuda.Event.wait.
        """
        (current_stream() if stream is None else as_stream(stream)).wait_event(self)

    def query(self) -> bool:
        """Whether the newest record has completed; True for an unrecorded event.

        Host: returns at once. Source: torch.cuda.Event.query.
        """
        state, ticket = self._state, self._ticket
        if state is None or ticket is None:
            return True
        return state.context.runtime.completed(ticket.lane) >= ticket.value

    def synchronize(self) -> None:
        """Wait until the newest record has completed; an unrecorded event is not waited for.

        Raises:
            the first cause of each failure before the record, once per event.

        Host: waits, asleep. Stream: nobody. Source: torch.cuda.Event.synchronize.
        """
        state, ticket = self._state, self._ticket
        if state is None or ticket is None:
            return
        runtime = state.context.runtime
        runtime.wait(ticket)
        raised, self._raised = self._raised, max(self._raised, ticket.value)
        raise_first(runtime.failures(ticket, raised))

    def elapsed_time(self, end_event: Event) -> float:  # type: ignore[override]
        """Milliseconds from the completion of this event to that of another.

        Raises:
            ValueError: one of them has no timing, or was never recorded.
            RuntimeError: one of them has not completed.

        Host: returns at once. Source: torch.cuda.Event.elapsed_time.
        """
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        start, end = self._marker, end_event._marker
        if start is None or end is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if start.at is None or end.at is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.at - start.at) * 1e3

    def __repr__(self) -> str:
        if self._ticket is None:
            return "<neuron_streams.Event uninitialized>"
        done = "completed" if self.query() else "pending"
        return f"<neuron_streams.Event lane={self._ticket.lane} value={self._ticket.value} {done}>"
