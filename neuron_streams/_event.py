"""Events: one frozen ticket each. Recording again takes another ticket; waits keep the old one.

The ticket lives in torch.Event's own state, where torch's guards find it.
"""

from __future__ import annotations

import ctypes
from typing import NoReturn

import torch
from typing_extensions import Self

from neuron_streams import surface
from neuron_streams._context import context, core
from neuron_streams._runtime.port import Ticket
from neuron_streams._stream import (
    current_stream,
    foreign_event,
    foreign_stream,
    is_event,
    is_stream,
    weakly,
)
from neuron_streams.errors import UnsupportedError

__all__ = ["Event"]

_record = torch.Event.record


class Event(torch.Event):
    """A point in the work of a stream, to wait for and to measure from.

    Args:
        enable_timing: keep the moment at which each record completes.
        blocking: how `synchronize` waits in CUDA; here every wait sleeps, so it changes nothing.
        interprocess: refused, since tickets mean nothing to another process.
        external: matters only while a graph is captured, so it changes nothing.

    Host: returns at once. Source: torch.cuda.Event.
    """

    __slots__ = ("__dict__", "_timed", *weakly(torch.Event))

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
        context()
        made = super().__new__(cls, "neuron", enable_timing=enable_timing)
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
        return super().device if self.event_id else None

    @property
    def cuda_event(self) -> int:
        """`event_id` under the name that code for CUDA reads; no pointer to a CUDA event."""
        return self.event_id

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.event_id)

    @property
    def _ticket(self) -> Ticket | None:
        """The ticket of the newest record; None before the first."""
        ticket: Ticket | None = core().ticket_of(self.event_id)
        return ticket

    def record(self, stream: torch.Stream | None = None) -> None:
        """Take the place behind all work submitted so far to a stream (None: the current one).

        Raises:
            RuntimeError: the event was recorded on another device before.

        Host: returns at once. Stream: nobody. Source: torch.cuda.Event.record.
        """
        if stream is None:
            stream = current_stream()
        elif not is_stream(stream):
            raise foreign_stream(stream)
        _record(self, stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make work submitted to a stream (None: the current one) from now on wait for the event.

        Host: returns at once. Stream: waits. Source: torch.cuda.Event.wait.
        """
        if stream is None:
            stream = current_stream()
        elif not is_stream(stream):
            raise foreign_stream(stream)
        super().wait(stream)

    def query(self) -> bool:
        """Whether the newest record has completed; True for an unrecorded event.

        Host: returns at once. Source: torch.cuda.Event.query.
        """
        return super().query()

    def synchronize(self) -> None:
        """Wait until the newest record has completed; an unrecorded event is not waited for.

        Raises:
            the first cause of each failure before the record, once per event; of failures that
            were raised before the record, none.

        Host: waits, asleep. Stream: nobody. Source: torch.cuda.Event.synchronize.
        """
        super().synchronize()

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds from the completion of this event to that of another.

        Raises:
            ValueError: one of them has no timing, or was never recorded.
            RuntimeError: one of them has not completed, or they are on two devices.

        Host: returns at once. Source: torch.cuda.Event.elapsed_time.
        """
        if not is_event(end_event):
            raise foreign_event(end_event)
        if not (self._timed and getattr(end_event, "_timed", True)):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        milliseconds: float = core().elapsed_time(self.event_id, end_event.event_id)
        return milliseconds

    def __repr__(self) -> str:
        ticket = self._ticket
        if ticket is None:
            return "<neuron_streams.Event uninitialized>"
        done = "completed" if self.query() else "pending"
        return f"<neuron_streams.Event lane={ticket.lane} value={ticket.value} {done}>"
