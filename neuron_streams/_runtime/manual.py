"""The manual runtime: no threads, the caller decides which lane steps. The specification.

`step(lane)` runs the head of one lane, `ready()` says which lanes could step, `run()` steps until
nothing moves. A host wait, from any thread, steps lanes too: in the order of a seeded generator or
of a function that picks one of the ready lanes. When nothing can move before the ticket waited for
has completed, the wait raises `DeadlockError`: a deadlock found, not hung.

A lane's head is *blocked* by the tickets of `after` that have not completed; once it is not, it
joins the ready heap of its unit, and a marker completes on the spot. Completing a command may
unblock heads of other lanes, so completion runs over a work list, not by recursion.

One re-entrant lock guards the lanes (a garbage collection inside it may run user code that
submits), another one stepping. No command runs while the first is held.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from neuron_streams._runtime import extension
from neuron_streams._runtime.port import (
    FORGOTTEN,
    Command,
    Failure,
    Handle,
    Kind,
    Payload,
    Runtime,
    Ticket,
    Unit,
    cancelled,
    closed,
)

__all__ = ["DeadlockError", "ManualRuntime"]

OUTSTANDING = 1024  # commands per device before submit waits, as in CUDA
TIMED = 1024  # timed markers per lane whose moment is remembered

Order = Callable[[Sequence[int]], int]


class DeadlockError(RuntimeError):
    """A host wait that nothing on the device could ever end."""


class _Entry:
    """A submitted command: where it stands and how many tickets still block it."""

    __slots__ = ("blocked", "command", "failure", "lane", "queued", "started", "value")

    def __init__(self, lane: _Lane, value: int, command: Command) -> None:
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


class _Lane:
    def __init__(self, number: int, device: int, priority: int, host: bool) -> None:
        self.id = number
        self.device = device
        self.priority = priority
        self.host = host
        self.closing = False
        self.submitted = 0
        self.completed = 0
        self.pending: deque[_Entry] = deque()
        self.dependents: list[tuple[int, int, _Entry]] = []
        self.failures: list[tuple[int, Failure]] = []
        self.timed: dict[int, Command] = {}  # the newest TIMED timed markers


class _Device:
    def __init__(self) -> None:
        self.ready: dict[Unit, list[tuple[int, int, _Entry]]] = {unit: [] for unit in Unit}
        self.running = dict.fromkeys(Unit, 0)
        self.outstanding = 0

    @property
    def full(self) -> bool:
        """Whether commands must wait for room.

        A device that is not moving waits for the host: making the host wait would be a deadlock.
        """
        moving = any(self.running.values()) or any(self.ready.values())
        return self.outstanding >= OUTSTANDING and moving


class ManualRuntime(Runtime):
    """A deterministic device.

    Args:
        devices: how many.
        order: an int seeds the order in which waits step lanes; a function picks from the ready
            lanes (never empty, ascending); None steps the most urgent, then the oldest command.
    """

    name = "manual"

    def __init__(self, devices: int = 2, order: int | Order | None = None) -> None:
        self._lock = threading.RLock()
        self._stepping = threading.RLock()
        self._order_of_waits: Order | None = (
            random.Random(order).choice if isinstance(order, int) else order
        )
        self._devices = [_Device() for _ in range(devices)]
        self._lanes: dict[int, _Lane] = {}
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
            lane = _Lane(next(self._ids), device, priority, host)
            self._lanes[lane.id] = lane
            return lane.id

    def close_lane(self, lane: int) -> None:
        # Called by destructors, which may run anywhere, also inside the lock: only note it down.
        self._abandoned.append(lane)

    def _forget_abandoned(self) -> None:
        while self._abandoned:
            lane = self._lanes.get(self._abandoned.popleft())
            if lane is not None:
                lane.closing = True
                self._forget_if_done(lane)

    def _forget_if_done(self, lane: _Lane) -> None:
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
                entry = _Entry(found, found.submitted + 1, command)
                if not (entry.counts and self._devices[found.device].full):
                    return self._append(entry, after)
            if not wait:
                return None
            self.wait_for_room(lane)

    def _append(self, entry: _Entry, after: Sequence[Ticket]) -> Ticket:
        lane = entry.lane
        for ticket in after:
            upstream = self._lanes.get(ticket.lane)
            if upstream is not None and upstream.completed < ticket.value:
                entry.blocked += 1
                heapq.heappush(upstream.dependents, (ticket.value, next(self._order), entry))
        lane.submitted = entry.value
        lane.pending.append(entry)
        self._devices[lane.device].outstanding += entry.counts
        if entry.command.timed:
            lane.timed[entry.value] = entry.command
            if len(lane.timed) > TIMED:
                del lane.timed[next(iter(lane.timed))]
        self._advance(lane)
        return entry.ticket

    def wait_for_room(self, lane: int) -> None:
        found = self._lanes.get(lane)
        while found is not None and self._devices[found.device].full and self._step_any():
            pass

    # -- moving on --------------------------------------------------------------------------

    def _advance(self, *lanes: _Lane) -> None:
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

    def _complete(self, entry: _Entry) -> list[_Lane]:
        """Count the head of a lane as completed; returns the lanes that may move on now."""
        lane = entry.lane
        lane.pending.popleft()
        lane.completed = entry.value
        if entry.command.timed:
            entry.command.at = time.perf_counter()
        if entry.failure is not None:
            lane.failures.append((entry.value, entry.failure))
        moved = []
        while lane.dependents and lane.dependents[0][0] <= entry.value:
            dependent = heapq.heappop(lane.dependents)[2]
            dependent.blocked -= 1
            pending = dependent.lane.pending
            if not dependent.blocked and pending and pending[0] is dependent:
                moved.append(dependent.lane)
        self._forget_if_done(lane)
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
            moved: list[_Lane] = []
            while lane.pending and lane.pending[0].value <= ticket.value:
                head = lane.pending[0]
                if error is not None:
                    head.failure = _failure(error, head)
                moved += self._complete(head)
            self._advance(*moved)

    # -- stepping ---------------------------------------------------------------------------

    def ready(self, device: int | None = None) -> list[int]:
        """The lanes whose head could run now, ascending."""
        with self._lock:
            return sorted(
                lane.id
                for lane in self._lanes.values()
                if lane.pending
                and lane.pending[0].queued
                and not lane.pending[0].started
                and device in (None, lane.device)
            )

    def step(self, lane: int) -> bool:
        """Run the head of a lane if it is ready; False if there is nothing to run."""
        with self._stepping:
            if lane not in self.ready():
                return False
            self._run(self._lanes[lane].pending[0])
            return True

    def run(self, limit: int | None = None) -> int:
        """Step until nothing moves or `limit` commands have run; returns how many did."""
        count = 0
        while count != limit and self._step_any():
            count += 1
        return count

    def drain(self) -> None:
        self.run()

    def _step_any(self) -> bool:
        with self._stepping:
            lanes = self.ready()
            if not lanes:
                return False
            if self._order_of_waits is not None:
                return self.step(self._order_of_waits(lanes))
            with self._lock:
                heads = (heap[0] for d in self._devices for heap in d.ready.values() if heap)
                entry = min(heads, key=lambda item: item[:2])[2]
            self._run(entry)
            return True

    def _run(self, entry: _Entry) -> None:
        lane, command = entry.lane, entry.command
        device = self._devices[lane.device]
        unit = Unit(command.unit)
        with self._lock:
            device.ready[unit].remove(next(x for x in device.ready[unit] if x[2] is entry))
            heapq.heapify(device.ready[unit])
            device.running[unit] += 1
            entry.started = time.perf_counter()
        if command.kind == Kind.SLEEP:
            time.sleep(command.seconds)
        failure = command.attempt(entry.ticket)
        with self._lock:
            if not lane.pending or lane.pending[0] is not entry:
                return  # `close` has given it up already
            entry.failure = failure
            device.running[unit] -= 1
            device.outstanding -= 1
            interval = lane.device, int(unit), entry.started, time.perf_counter(), command.name
            self._intervals.append(interval)
            self._advance(lane, *self._complete(entry))

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        if self.completed(ticket.lane) >= ticket.value:
            return
        self._refuse_wait_inside()
        while self.completed(ticket.lane) < ticket.value:
            with self._stepping:
                if self.completed(ticket.lane) >= ticket.value:
                    return
                if not self._step_any():
                    raise DeadlockError(
                        f"wait: nothing can move, and lane {ticket.lane} has completed "
                        f"{self.completed(ticket.lane)} of the {ticket.value} commands waited "
                        f"for; the next is {self._describe_head(self._lanes[ticket.lane])}. Open "
                        "the gate or submit the command first."
                    )

    def _refuse_wait_inside(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "wait: this destructor was run in the middle of the device's own work, which could "
                "not go on while it waits; synchronize before the object is dropped"
            )

    def _describe_head(self, lane: _Lane) -> str:
        with self._lock:
            if not lane.pending:
                return "none: it is done"
            head = lane.pending[0]
            where = f"{head.command.name!r} (command {head.value} of lane {lane.id}"
            if head.command.kind == Kind.PLEDGE:
                return f"{where}, which the host has not completed)"
            for upstream in self._lanes.values():
                for value, _, entry in upstream.dependents:
                    if entry is head:
                        return f"{where}, which waits for command {value} of lane {upstream.id})"
            return f"{where}, ready or running)"

    # -- executables and the end --------------------------------------------------------------

    def load(self, payload: Payload, device: int) -> Handle:
        from neuron_streams._runtime.program import load_on_cpu

        return load_on_cpu(payload, device)

    def _check_open(self) -> None:
        if self._closed:
            raise closed(self.name)

    def close(self, timeout: float | None = None) -> None:
        alone = self._stepping.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        with self._lock:
            self._closed = True
            for device in self._devices:
                for heap in device.ready.values():
                    heap.clear()
            for lane in list(self._lanes.values()):
                self._cancel(lane)
        if alone:
            self._stepping.release()

    def _cancel(self, lane: _Lane) -> None:
        while lane.pending:
            head = lane.pending[0]
            error = cancelled(head.command, head.ticket, bool(head.started))
            head.failure = _failure(error, head)
            head.command.settle(head.failure)
            self._devices[lane.device].outstanding -= head.counts
            self._complete(head)


def _failure(error: BaseException, entry: _Entry) -> Failure:
    made: Failure = extension.load().Failure(error, entry.ticket, entry.command.name)
    return made
