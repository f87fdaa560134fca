"""A stream's lane: the one door through which commands go to the runtime.

All stream objects of one lane share a `StreamState`. `wait_event` is remembered there and goes out
with the next command, because an empty command per wait would cost more than the wait; whatever
looks at the stream first (record, query, synchronize) makes it count. A file of its own because
this is what every command passes, and what the budgets of the stream functions depend on.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from neuron_streams._runtime import process
from neuron_streams._runtime.complaints import NoRoom
from neuron_streams._runtime.port import Buffer, Command, Failure, Marker, Ticket
from neuron_streams.context import SUBMITTED, Context, log, raise_first

__all__ = ["StreamState", "implicit_waits", "weakly"]

MOST_WAITS = 64  # remembered before they become a command: a stream may wait and never be used


def implicit_waits() -> bool:
    """Whether a command waits for the writers of what it reads on other streams by itself."""
    return os.environ.get("NEURON_STREAMS_IMPLICIT_WAITS", "1") != "0"


def weakly(base: type) -> tuple[str, ...]:
    """The slot that makes subclasses of a class of torch weakly referable, if it lacks one."""
    return () if base.__weakrefoffset__ else ("__weakref__",)


class StreamState:
    """A lane, the waits that its next command takes along, and which failures were raised.

    `last` is the ticket of the newest command, None for a lane that another library submits to.
    """

    __slots__ = (
        "__weakref__",
        "context",
        "device",
        "implicit",
        "lane",
        "last",
        "lock",
        "priority",
        "raised",
        "seen",
        "waits",
    )

    def __init__(
        self, context: Context, device: int, priority: int, lane: int | None = None
    ) -> None:
        self.context = context
        self.device = device
        self.priority = priority
        self.last: Ticket | None = None
        if lane is None:
            lane = context.runtime.open_lane(device, priority)
            self.last = Ticket(lane, 0)
        self.lane = lane
        self.lock = threading.RLock()  # a destructor inside a submission may submit
        self.waits: list[Ticket] = []  # only appended to, and cut off in front under the lock
        self.raised = 0  # failures of commands up to this one were raised by `synchronize`
        self.seen = 0  # ... were raised by somebody, so later events need not repeat them
        self.implicit = implicit_waits()
        context.states[self.lane] = self

    def __del__(self) -> None:
        if getattr(self, "last", None) is not None:
            self.context.runtime.close_lane(self.lane)

    def submit(
        self, command: Command, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> Ticket:
        """Submit a command behind all that the stream waits for; the door to the runtime."""
        watched = self.context.watched
        if watched and self.context.tracing:
            command.name = f"{command.name.partition(SUBMITTED)[0]}{SUBMITTED}{_caller()}"
        lane = self.lane
        while True:
            try:
                with self.lock:
                    after = self.waits[:]
                    waits, implicit = len(after), self.implicit
                    for buffer in reads:
                        buffer.named = True
                        if implicit and (writer := buffer.writer) is not None and writer[0] != lane:
                            after.append(writer)
                    ticket = self._submit(command, after, waits)
                    for buffer in writes:
                        buffer.named = True
                        buffer.writer = ticket
                break
            except NoRoom:  # nobody waits while holding the lock
                self.context.runtime.wait_for_room(lane)
            except RuntimeError:
                process.linger()
                raise
        if watched:
            self._watch(command, ticket, after)
        return ticket

    def _submit(self, command: Command, after: list[Ticket], waits: int) -> Ticket:
        ticket = self.context.runtime.submit(self.lane, command, after, False)
        if self.last is not None:
            self.last = ticket
        if waits:  # only now: who sees no waits must see the `last` that they went into
            del self.waits[:waits]
        return ticket

    def _watch(self, command: Command, ticket: Ticket, after: list[Ticket]) -> None:
        if self.context.logging:
            kind = type(command).__name__
            what = f"{kind} {command.name!r} to neuron:{self.device}"
            log.debug("submit %s as %s, after %s", what, ticket, after)
        if self.context.blocking:
            self.context.runtime.wait(ticket)
            raise_first(self.failures(ticket))

    def ticket(self) -> Ticket:
        """The ticket of the last command, remembered waits included."""
        if self.waits:
            with self.lock:
                after = self.waits[:]
                if after:
                    return self._submit(Marker(name="wait"), after, len(after))
        last = self.last
        return last or Ticket(self.lane, self.context.runtime.submitted(self.lane))

    def flush(self) -> None:
        """Turn the waits that are only remembered into a command."""
        if self.waits:
            self.ticket()

    def wait(self, ticket: Ticket) -> None:
        """Order what is submitted from now on behind a ticket."""
        lane, value = ticket
        if self.context.runtime.completed(lane) >= value or lane == self.lane:
            return
        waits = self.waits
        try:
            if waits[-1] is ticket:
                return
        except IndexError:
            pass  # another thread may cut them off at any time
        waits.append(ticket)
        if len(waits) > MOST_WAITS:
            self.flush()

    def done(self) -> bool:
        """Whether all submitted so far has completed."""
        lane, value = self.ticket() if self.waits else self.last or self.ticket()
        return self.context.runtime.completed(lane) >= value

    def failures(self, ticket: Ticket) -> tuple[Failure, ...]:
        """The stream's failures up to a completed ticket that it was not asked for before."""
        with self.lock:
            since, self.raised = self.raised, max(self.raised, ticket.value)
        return self.see(ticket, since)

    def see(self, ticket: Ticket, since: int) -> tuple[Failure, ...]:
        """The failures of commands behind `since` and up to a completed ticket."""
        self.seen = max(self.seen, ticket.value)
        return self.context.runtime.failures(ticket, since)


def _caller() -> str:
    """The innermost frame outside this package and torch: `train.py:12 in step`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("neuron_streams", "torch")
