"""The bookkeeping of lanes, tickets and units, shared by the runtimes that live in this process.

One re-entrant lock guards everything (a garbage collection inside it may run user code that
submits). Nobody waits while holding it. What a runtime adds is who runs a taken command, and when:
`take` hands one out, `finish` brings it back.

A lane's head is *blocked* by the tickets of `after` that have not completed; once it is not, it
joins the ready heap of its unit, and a marker completes on the spot. Completing a command may
unblock heads of other lanes, so completion runs over a work list, not by recursion.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

from neuron_streams._runtime.complaints import (
    FORGOTTEN,
    CancelledError,
    NoRoom,
    cancelled,
    closed,
    describe,
    may_wait,
    not_of_the_host,
    timed_out,
)
from neuron_streams._runtime.cpu import blame, settle
from neuron_streams._runtime.ledger import Ledger
from neuron_streams._runtime.port import (
    Buffer,
    Command,
    Copy,
    Failure,
    Handle,
    Marker,
    Payload,
    Pledge,
    Runtime,
    Ticket,
    Unit,
)

__all__ = ["CancelledError", "Entry", "Lanes"]

SMALL_COPY = 1 << 16  # bytes; below it a copy costs less than waking a thread for it
OUTSTANDING = 1024  # commands per device before submit waits, as in CUDA


class Entry:
    """A submitted command: where it stands and how many tickets still block it."""

    __slots__ = ("blocked", "command", "failure", "lane", "queued", "started", "value")

    def __init__(self, lane: _Lane, value: int, command: Command) -> None:
        self.lane = lane
        self.value = value
        self.command = command
        self.blocked = 0
        self.queued = False
        self.failure: Failure | None = None
        self.started = 0.0

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.lane.id, self.value)

    @property
    def quick(self) -> bool:
        """Cheaper to run on the spot than to wake a thread for."""
        command = self.command
        return isinstance(command, Copy) and command.target.nbytes <= SMALL_COPY


class _Lane:
    __slots__ = (
        "closing",
        "completed",
        "dependents",
        "device",
        "failures",
        "host",
        "id",
        "pending",
        "priority",
        "submitted",
        "timed",
        "waiters",
    )

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
        self.waiters: list[tuple[int, int, threading.Lock]] = []
        self.failures: list[tuple[int, Failure]] = []
        self.timed: weakref.WeakValueDictionary[int, Marker] = weakref.WeakValueDictionary()


class _Device:
    __slots__ = ("outstanding", "ready", "running")

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
    """Lanes and units without anyone to run the commands; see `manual` and `emulated`."""

    def __init__(self, devices: int) -> None:
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._devices = [_Device() for _ in range(devices)]
        self._ledgers = [Ledger() for _ in range(devices)]
        self._lanes: dict[int, _Lane] = {}
        self._ids = itertools.count(1)
        self._order = itertools.count()
        self._abandoned: deque[int] = deque()
        self._intervals: deque[tuple[int, Unit, float, float, str]] = deque(maxlen=1 << 16)
        self._closed = False

    # -- lanes ------------------------------------------------------------------------------

    def device_count(self) -> int:
        return len(self._devices)

    def open_lane(self, device: int, priority: int = 0, *, host: bool = False) -> int:
        with self._lock:
            self._check_open()
            self._bury()
            lane = _Lane(next(self._ids), device, priority, host)
            self._lanes[lane.id] = lane
            return lane.id

    def close_lane(self, lane: int) -> None:
        # Called by destructors, which may run anywhere, also inside our lock: only note it down.
        self._abandoned.append(lane)

    def _bury(self) -> None:
        while self._abandoned:
            lane = self._lanes.get(self._abandoned.popleft())
            if lane is not None:
                lane.closing = True
                self._forget_if_done(lane)

    def _forget_if_done(self, lane: _Lane) -> None:
        # One with failures is kept until somebody has asked for them: none is swallowed.
        if lane.closing and not lane.pending and not lane.failures:
            self._lanes.pop(lane.id, None)

    def lanes(self, device: int) -> Sequence[int]:
        with self._lock:
            self._bury()
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

    def failures(self, ticket: Ticket, since: int = 0) -> tuple[Failure, ...]:
        lane = self._lanes.get(ticket.lane)
        if lane is None or not lane.failures:
            return ()
        with self._lock:
            found = [f for value, f in lane.failures if since < value <= ticket.value]
            if lane.closing and ticket.value >= lane.submitted == lane.completed:
                self._lanes.pop(lane.id, None)
            return tuple({id(f): f for f in found}.values())

    def busy_intervals(self) -> Sequence[tuple[int, Unit, float, float, str]]:
        with self._lock:
            return list(self._intervals)

    # -- submitting -------------------------------------------------------------------------

    def submit(
        self, lane: int, command: Command, after: Sequence[Ticket] = (), wait: bool = True
    ) -> Ticket:
        while True:
            with self._lock:
                self._check_open()
                if self._abandoned:
                    self._bury()
                found = self._lanes[lane]
                if isinstance(command, Marker | Pledge) or not self._devices[found.device].full:
                    return self._append(found, command, after)
            if not wait:
                raise NoRoom(found.device)
            self.wait_for_room(lane)

    def _append(self, lane: _Lane, command: Command, after: Sequence[Ticket]) -> Ticket:
        entry = Entry(lane, lane.submitted + 1, command)
        for ticket in after:
            self._block(entry, ticket)
        lane.submitted = entry.value
        lane.pending.append(entry)
        if not isinstance(command, Marker | Pledge):
            self._devices[lane.device].outstanding += 1
        if isinstance(command, Marker) and command.timed:
            lane.timed[entry.value] = command
        if len(lane.pending) == 1:
            for touched in self._advance(lane):
                self._dispatch(touched)
        return entry.ticket

    def wait_for_room(self, lane: int) -> None:
        may_wait(self._is_inside())
        with self._lock:
            found = self._lanes.get(lane)
            while found is not None and self._devices[found.device].full and not self._closed:
                self._room.wait(0.1)

    def _block(self, entry: Entry, ticket: Ticket) -> None:
        upstream = self._lanes.get(ticket.lane)
        if upstream is None or upstream.completed >= ticket.value:
            return
        entry.blocked += 1
        heapq.heappush(upstream.dependents, (ticket.value, next(self._order), entry))

    def _dispatch(self, device: int) -> None:
        """Work may have become ready on the device; called with the lock held."""

    # -- running ----------------------------------------------------------------------------

    def _advance(self, *lanes: _Lane) -> set[int]:
        """Move the heads of lanes on as far as they go without running anything.

        Returns the devices on which commands became ready.
        """
        work, devices = deque(lanes), set()
        while work:
            lane = work.popleft()
            while lane.pending:
                head = lane.pending[0]
                if head.blocked or head.queued or isinstance(head.command, Pledge):
                    break
                if isinstance(head.command, Marker):
                    work.extend(self._complete(head))
                    continue
                head.queued = True
                heap = self._devices[lane.device].ready[head.command.unit]
                heapq.heappush(heap, (lane.priority, next(self._order), head))
                devices.add(lane.device)
                break
        return devices

    def _complete(self, entry: Entry) -> list[_Lane]:
        """Count the head of a lane as completed; returns the lanes that may move on now."""
        lane = entry.lane
        lane.pending.popleft()
        lane.completed = entry.value
        command = entry.command
        if isinstance(command, Marker) and command.timed:
            command.at = time.perf_counter()
        if entry.failure is not None:
            lane.failures.append((entry.value, entry.failure))
        while lane.waiters and lane.waiters[0][0] <= entry.value:
            self._wake(heapq.heappop(lane.waiters)[2])
        moved = []
        while lane.dependents and lane.dependents[0][0] <= entry.value:
            dependent = heapq.heappop(lane.dependents)[2]
            dependent.blocked -= 1
            pending = dependent.lane.pending
            if not dependent.blocked and pending and pending[0] is dependent:
                moved.append(dependent.lane)
        self._forget_if_done(lane)
        return moved

    def _wake(self, waiter: threading.Lock) -> None:
        """A wait is over; called with the lock held."""
        waiter.release()

    def _takeable(self, device: int) -> int:
        """How many commands could start on a device now."""
        state = self._devices[device]
        return sum(
            min(len(heap), unit.queues - state.running[unit])
            for unit, heap in state.ready.items()
            if heap
        )

    def _take(self, device: int) -> Entry | None:
        """The most urgent ready command of a device whose unit is free; quick ones first."""
        state = self._devices[device]
        best: tuple[bool, int, int, Unit] | None = None
        for unit, heap in state.ready.items():
            if heap and state.running[unit] < unit.queues:
                priority, order, entry = heap[0]
                rank = (not entry.quick, priority, order, unit)
                if best is None or rank[:3] < best[:3]:
                    best = rank
        if best is None:
            return None
        unit = best[3]
        entry = heapq.heappop(state.ready[unit])[2]
        self._start(entry, state, unit)
        return entry

    def _start(self, entry: Entry, state: _Device, unit: Unit) -> None:
        state.running[unit] += 1
        entry.failure = blame(entry.command)
        entry.started = time.perf_counter()

    def _finish(self, entry: Entry, error: BaseException | None, ended: float) -> None:
        """Bring back a taken command: settle its buffers, free its unit, move lanes on."""
        command = entry.command
        assert not isinstance(command, Marker | Pledge)
        lane = entry.lane
        if not lane.pending or lane.pending[0] is not entry:
            return  # close() has given it up already
        if error is not None:
            entry.failure = Failure(error, entry.ticket, command.name, error.__traceback__)
        settle(command, entry.failure)
        device = self._devices[lane.device]
        device.running[command.unit] -= 1
        device.outstanding -= 1
        if device.outstanding == OUTSTANDING - 1:
            self._room.notify_all()
        self._intervals.append((lane.device, command.unit, entry.started, ended, command.name))
        moved = self._complete(entry)
        for touched in self._advance(lane, *moved):
            if touched != lane.device:  # whoever finishes goes on with its own device
                self._dispatch(touched)

    def complete(self, ticket: Ticket, error: BaseException | None = None) -> None:
        with self._lock:
            lane = self._lanes.get(ticket.lane)
            if lane is None or lane.completed >= ticket.value:
                return
            if not lane.host:
                raise not_of_the_host(ticket)
            moved: list[_Lane] = []
            while lane.pending and lane.pending[0].value <= ticket.value:
                head = lane.pending[0]
                if error is not None:
                    head.failure = Failure(error, head.ticket, head.command.name)
                moved += self._complete(head)
            for touched in self._advance(*moved):
                self._dispatch(touched)

    # -- waiting ----------------------------------------------------------------------------

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        lane = self._lanes.get(ticket.lane)
        if lane is None or lane.completed >= ticket.value:
            return
        may_wait(self._is_inside())
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if lane.completed >= ticket.value:
                return
            heapq.heappush(lane.waiters, (ticket.value, next(self._order), waiter))
        done = False
        try:
            done = waiter.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        finally:
            if not done:
                self._stop_waiting(lane, waiter)
        if not done and lane.completed < ticket.value:
            raise timed_out(timeout, ticket, lane.completed, self._describe_head(lane))

    def _is_inside(self) -> bool:
        """Whether the calling thread holds the lock already."""
        inside: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        return inside

    def _stop_waiting(self, lane: _Lane, waiter: threading.Lock) -> None:
        with self._lock:
            lane.waiters = [x for x in lane.waiters if x[2] is not waiter]
            heapq.heapify(lane.waiters)

    def _describe_head(self, lane: _Lane) -> str:
        with self._lock:
            if not lane.pending:
                return describe(None, Ticket(lane.id, lane.completed), None)
            head, held_by = lane.pending[0], None
            for upstream in self._lanes.values():
                for value, _, entry in upstream.dependents:
                    if entry is head:
                        held_by = Ticket(upstream.id, value)
            return describe(head.command, head.ticket, held_by)

    # -- memory and the end -----------------------------------------------------------------

    def allocate(self, device: int, nbytes: int) -> Buffer:
        return Buffer(device, nbytes, ledger=self._ledgers[device])

    def ledger(self, device: int) -> Ledger:
        return self._ledgers[device]

    def load(self, payload: Payload, device: int) -> Handle:
        from neuron_streams._runtime.program import load_on_cpu

        return load_on_cpu(payload, device)

    def _check_open(self) -> None:
        if self._closed:
            raise closed(self.name)

    def _cancel_pending(self, running: bool = False) -> None:
        """Fail every command that has not started, or all; with the lock held."""
        for device in self._devices:
            for heap in device.ready.values():
                heap.clear()
        for lane in list(self._lanes.values()):
            while lane.pending:
                head = lane.pending[0]
                if head.started and not running:
                    break
                command = head.command
                error = cancelled(command, head.ticket, bool(head.started))
                head.failure = Failure(error, head.ticket, command.name)
                if not isinstance(command, Marker | Pledge):
                    settle(command, head.failure)
                    self._devices[lane.device].outstanding -= 1
                self._complete(head)
