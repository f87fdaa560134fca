"""Lanes kept in Python: tickets, what blocks what, failures. Shared by `manual` and `nrt`.

A lane's head is *blocked* by the tickets of `after` that have not completed; once it is not, it
joins the ready heap of its unit, and a marker completes on the spot. Completing a command may
unblock heads of other lanes, so completion runs over a work list, not by recursion.

One re-entrant lock guards the lanes: a garbage collection inside it may run user code that submits.
No command runs while it is held.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence

from neuron_streams._runtime import extension
from neuron_streams._runtime.port import (
    FORGOTTEN,
    Command,
    Failure,
    Kind,
    Runtime,
    Ticket,
    Unit,
    cancelled,
    closed,
)

__all__ = ["OUTSTANDING", "Device", "Entry", "Lane", "Lanes", "failure_of"]

OUTSTANDING = 1024  # commands per device before submit waits, as in CUDA
TIMED = 1024  # timed markers per lane whose moment is remembered


class Entry:
    """A submitted command: where it stands and how many tickets still block it."""

    __slots__ = ("blocked", "command", "failure", "lane", "queued", "started", "value")

    def __init__(self, lane: Lane, value: int, command: Command) -> None:
        self.lane = lane
        self.value = value
        self.command = command
        self.blocked = 0
        self.queued = False
        self.started = 0.0
        self.failure: Failure | None = None

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.lane.id, self.value)

    @property
    def counts(self) -> bool:
        """Whether it takes room on the device."""
        return self.command.kind not in (Kind.MARKER, Kind.PLEDGE)


class Lane:
    def __init__(self, number: int, device: int, priority: int, host: bool) -> None:
        self.id = number
        self.device = device
        self.priority = priority
        self.host = host
        self.closing = False
        self.submitted = 0
        self.completed = 0
        self.pending: deque[Entry] = deque()
        self.dependents: list[tuple[int, int, Entry]] = []
        self.failures: list[tuple[int, Failure]] = []
        self.timed: dict[int, Command] = {}  # the newest TIMED timed markers

    def note_timed(self, entry: Entry) -> None:
        if entry.command.timed:
            self.timed[entry.value] = entry.command
            if len(self.timed) > TIMED:
                del self.timed[next(iter(self.timed))]


class Device:
    def __init__(self) -> None:
        self.ready: dict[Unit, list[tuple[int, int, Entry]]] = {unit: [] for unit in Unit}
        self.running = dict.fromkeys(Unit, 0)
        self.outstanding = 0

    @property
    def moving(self) -> bool:
        return any(self.running.values()) or any(self.ready.values())

    @property
    def full(self) -> bool:
        """Whether commands must wait for room.

        A device that is not moving waits for the host: making the host wait would be a deadlock.
        """
        return self.outstanding >= OUTSTANDING and self.moving


class Lanes(Runtime):
    """Lanes and units; what runs a command, and when, is for the runtime to say."""

    def __init__(self, devices: int) -> None:
        self._lock = threading.RLock()
        self._devices = [Device() for _ in range(devices)]
        self._lanes: dict[int, Lane] = {}
        self._ids = itertools.count(1)
        self._order = itertools.count()
        self._abandoned: deque[int] = deque()
        self._intervals: deque[tuple[int, int, float, float, str]] = deque(maxlen=1 << 16)
        self._closed = False

    # -- lanes ------------------------------------------------------------------------------

    def device_count(self) -> int:
        return len(self._devices)

    def open_lane(self, device: int, priority: int = 0, *, host: bool = False) -> int:
        with self._lock:
            self._check_open()
            self._forget_abandoned()
            lane = self._new_lane(next(self._ids), device, priority, host)
            self._lanes[lane.id] = lane
            return lane.id

    def _new_lane(self, number: int, device: int, priority: int, host: bool) -> Lane:
        return Lane(number, device, priority, host)

    def close_lane(self, lane: int) -> None:
        # Called by destructors, which may run anywhere, also inside the lock: only note it down.
        self._abandoned.append(lane)

    def _forget_abandoned(self) -> None:
        while self._abandoned:
            lane = self._lanes.get(self._abandoned.popleft())
            if lane is not None:
                lane.closing = True
                self._forget_if_done(lane)

    def _forget_if_done(self, lane: Lane) -> None:
        # A lane with failures is kept until they were asked for: none is swallowed.
        if lane.closing and not lane.pending and not lane.failures:
            self._lanes.pop(lane.id, None)

    def lanes(self, device: int) -> Sequence[int]:
        with self._lock:
            self._forget_abandoned()
            return [x.id for x in self._lanes.values() if x.device == device and not x.host]

    def submitted(self, lane: int) -> int:
        found = self._lanes.get(lane)
        return 0 if found is None else found.submitted

    def completed(self, lane: int) -> int:
        found = self._lanes.get(lane)
        return FORGOTTEN if found is None else found.completed

    def completed_at(self, ticket: Ticket) -> float | None:
        lane = self._lanes.get(ticket.lane)
        marker = None if lane is None else lane.timed.get(ticket.value)
        return None if marker is None else marker.at

    def failures(self, ticket: Ticket, since: int = 0) -> Sequence[Failure]:
        with self._lock:
            lane = self._lanes.get(ticket.lane)
            if lane is None:
                return ()
            found = [f for value, f in lane.failures if since < value <= ticket.value]
            if lane.closing and not lane.pending and ticket.value >= lane.submitted:
                self._lanes.pop(lane.id)
            return tuple({id(f.error): f for f in found}.values())

    def busy_intervals(self) -> Sequence[tuple[int, int, float, float, str]]:
        with self._lock:
            return list(self._intervals)

    # -- submitting -------------------------------------------------------------------------

    def submit(
        self, lane: int, command: Command, after: Sequence[Ticket] = (), wait: bool = True
    ) -> Ticket | None:
        while True:
            with self._lock:
                self._check_open()
                found = self._lanes.get(lane)
                if found is None:
                    raise RuntimeError(f"submit: there is no lane {lane}")
                entry = self._new_entry(found, found.submitted + 1, command)
                if not (entry.counts and self._devices[found.device].full):
                    return self._append(entry, after)
            if not wait:
                return None
            self.wait_for_room(lane)

    def _new_entry(self, lane: Lane, value: int, command: Command) -> Entry:
        return Entry(lane, value, command)

    def _append(self, entry: Entry, after: Sequence[Ticket]) -> Ticket:
        lane = entry.lane
        for ticket in after:
            upstream = self._lanes.get(ticket.lane)
            if upstream is not None and upstream.completed < ticket.value:
                entry.blocked += 1
                heapq.heappush(upstream.dependents, (ticket.value, next(self._order), entry))
        lane.submitted = entry.value
        lane.pending.append(entry)
        self._devices[lane.device].outstanding += entry.counts
        lane.note_timed(entry)
        self._advance(lane)
        return entry.ticket

    # -- moving on --------------------------------------------------------------------------

    def _advance(self, *lanes: Lane) -> None:
        """Move the heads of lanes on as far as they go without running anything."""
        work = deque(lanes)
        while work:
            lane = work.popleft()
            while lane.pending:
                head = lane.pending[0]
                if head.blocked or head.queued or head.command.kind == Kind.PLEDGE:
                    break
                if head.command.kind == Kind.MARKER:
                    work.extend(self._complete(head))
                    continue
                head.queued = True
                heap = self._devices[lane.device].ready[Unit(head.command.unit)]
                heapq.heappush(heap, (lane.priority, next(self._order), head))
                break

    def _complete(self, entry: Entry) -> list[Lane]:
        """Count the head of a lane as completed; returns the lanes that may move on now."""
        lane = entry.lane
        lane.pending.popleft()
        lane.completed = entry.value
        if entry.command.timed:
            entry.command.at = time.perf_counter()
        if entry.failure is not None:
            lane.failures.append((entry.value, entry.failure))
        moved = self._unblock(lane)
        self._forget_if_done(lane)
        return moved

    def _unblock(self, lane: Lane) -> list[Lane]:
        """The lanes whose heads waited for a lane to get as far as it has got now."""
        moved = []
        while lane.dependents and lane.dependents[0][0] <= lane.completed:
            dependent = heapq.heappop(lane.dependents)[2]
            dependent.blocked -= 1
            pending = dependent.lane.pending
            if not dependent.blocked and pending and pending[0] is dependent:
                moved.append(dependent.lane)
        return moved

    def complete(self, ticket: Ticket, error: BaseException | None = None) -> None:
        with self._lock:
            lane = self._lanes.get(ticket.lane)
            if lane is None or lane.completed >= ticket.value:
                return
            if not lane.host:
                raise ValueError(
                    f"complete: lane {ticket.lane} belongs to the device, so only the device can "
                    "complete its commands; open a lane with host=True for pledges"
                )
            moved: list[Lane] = []
            while lane.pending and lane.pending[0].value <= ticket.value:
                head = lane.pending[0]
                if error is not None:
                    head.failure = failure_of(error, head)
                moved += self._complete(head)
            self._advance(*moved)

    # -- waits and the end --------------------------------------------------------------------

    def _refuse_wait_inside(self) -> None:
        if self._is_inside():
            raise RuntimeError(
                "wait: this destructor was run in the middle of the device's own work, which could "
                "not go on while it waits; synchronize before the object is dropped"
            )

    def _is_inside(self) -> bool:
        """Whether what the caller waits for could not go on meanwhile."""
        inside: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        return inside

    def _describe_head(self, lane: Lane) -> str:
        with self._lock:
            if not lane.pending:
                return "none: it is done"
            head = lane.pending[0]
            where = f"{head.command.name!r} (command {head.value} of lane {lane.id}"
            if head.command.kind == Kind.PLEDGE:
                return f"{where}, which the host has not completed)"
            awaited = self._awaited_by(head)
            if awaited is None:
                return f"{where}, ready or running)"
            return f"{where}, which waits for command {awaited.value} of lane {awaited.lane})"

    def _awaited_by(self, head: Entry) -> Ticket | None:
        """A ticket that the head of a lane still waits for."""
        for upstream in self._lanes.values():
            for value, _, entry in upstream.dependents:
                if entry is head:
                    return Ticket(upstream.id, value)
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise closed(self.name)

    def _cancel(self, lane: Lane) -> None:
        while lane.pending:
            head = lane.pending[0]
            error = cancelled(head.command, head.ticket, bool(head.started))
            head.failure = failure_of(error, head)
            head.command.settle(head.failure)
            self._devices[lane.device].outstanding -= head.counts
            self._complete(head)


def failure_of(error: BaseException, entry: Entry) -> Failure:
    made: Failure = extension.load().Failure(error, entry.ticket, entry.command.name)
    return made
