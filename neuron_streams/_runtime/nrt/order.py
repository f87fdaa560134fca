"""Which command may be given to which queue of the hardware, and when.

The hardware orders requests of one queue and nothing else: what another queue made must have
*completed*, and the host must have seen it, before its consumer is even scheduled. So a command
waits on the host until everything it comes after has completed or is in flight on the very queue it
goes to. A chain of executions is on one queue, and goes straight through.

For each lane, `passed` is how far its commands have been given to the hardware, and `tail` the one
queue on which those not yet completed are. A marker gives nothing to the hardware: it is passed
when all that it comes after is completed or in flight on one queue, which becomes the lane's tail.

A command waits for the first ticket of those it comes after that holds it up: in `expecting` of
that ticket's lane, to be passed, or in `dependents`, to be completed.

Source: the core concepts and the migration guide of the runtime's asynchronous API.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import cast

from neuron_streams._exit import LastWait, main_thread_has_ended
from neuron_streams._runtime.lanes import Entry, Lane, Lanes
from neuron_streams._runtime.nrt.queue import Queue, Request
from neuron_streams._runtime.nrt.requests import Route
from neuron_streams._runtime.port import Command, Kind, Ticket

__all__ = ["ALONE", "Order", "Step", "Touches"]

SLICE = 0.05  # seconds that a wait goes without looking whether the main thread has ended
ALONE = object()  # the tail of a lane behind a command that nothing may be queued behind


Touches = tuple[set[int], set[int]]


class Step(Entry):
    """A submitted command: the tickets it still comes after, and how far it has got itself.

    `held_by` is what it waits for, and whether that must be completed or only be passed.
    """

    __slots__ = ("_touches", "done", "held_by", "kind", "plan", "request", "route", "waits")

    lane: NrtLane

    def __init__(self, lane: NrtLane, value: int, command: Command) -> None:
        super().__init__(lane, value, command)
        self.kind = Kind(command.kind)
        self.waits: list[Ticket] = []
        self.held_by: tuple[Ticket, bool] | None = None
        self.done = False
        self.route: Route | None = None
        self.plan: Iterator[Request] = iter(())
        self.request: Request | None = None
        self._touches: Touches | None = None

    @property
    def touches(self) -> Touches:
        """The memory that it reads, and the memory that it writes."""
        if self._touches is None:
            command = self.command
            reads = {id(buffer.peer) for buffer in command.reads if buffer.peer is not None}
            made = (*command.outputs, *command.mutated)
            writes = {id(buffer.peer) for buffer in made if buffer.peer is not None}
            self._touches = reads, writes
        return self._touches


class NrtLane(Lane):
    """A lane, and how far its commands have been given to the hardware."""

    __slots__ = ("expecting", "passed", "tail", "unpassed", "waiters")

    def __init__(self, number: int, device: int, priority: int, host: bool) -> None:
        super().__init__(number, device, priority, host)
        self.passed = 0
        self.tail: object | None = None
        self.unpassed: deque[Step] = deque()
        self.expecting: list[tuple[int, int, Step]] = []
        self.waiters: list[tuple[int, int, threading.Lock]] = []


class Order(Lanes):
    """Lanes over queues: `_route` says which, `_fill` gives a queue what is ready for it."""

    def __init__(self, devices: int) -> None:
        super().__init__(devices)
        self._touched: deque[NrtLane] = deque()
        self._stirred: dict[Queue, None] = {}
        self._turning = False

    def _route(self, step: Step) -> Route:
        raise NotImplementedError

    def _fill(self, queue: Queue) -> None:
        raise NotImplementedError

    @property
    def _moving(self) -> bool:
        """Whether anything is in flight, or may be given to a queue."""
        raise NotImplementedError

    def _new_lane(self, number: int, device: int, priority: int, host: bool) -> Lane:
        return NrtLane(number, device, priority, host)

    def _new_entry(self, lane: Lane, value: int, command: Command) -> Step:
        return Step(cast("NrtLane", lane), value, command)

    def _append(self, entry: Entry, after: Sequence[Ticket]) -> Ticket:
        step = cast("Step", entry)
        lane = step.lane
        if step.counts:
            step.route = self._route(step)
            self._devices[lane.device].outstanding += 1
        lane.note_timed(step)
        step.waits = [ticket for ticket in after if self.is_pending(ticket)]
        lane.submitted = step.value
        lane.pending.append(step)
        lane.unpassed.append(step)
        if lane.unpassed[0] is step:
            self._turn(lane)
        return step.ticket

    def is_pending(self, ticket: Ticket) -> bool:
        lane = self._lanes.get(ticket.lane)
        return lane is not None and lane.completed < ticket.value

    # -- the turn ---------------------------------------------------------------------------

    def _turn(self, *lanes: NrtLane) -> None:
        """Move lanes on as far as they go, and all that moves with them.

        A destructor may come here in the middle: what it brings is left to the turn under way.
        """
        self._touched.extend(lanes)
        if self._turning:
            return
        self._turning = True
        try:
            while self._touched or self._stirred:
                while self._touched:
                    self._move(self._touched.popleft())
                if self._stirred:
                    self._fill(self._stirred.popitem()[0])
        finally:
            self._turning = False

    def _advance(self, *lanes: Lane) -> None:
        self._turn(*cast("tuple[NrtLane, ...]", lanes))

    def _move(self, lane: NrtLane) -> None:
        moved = True
        while moved:
            moved = self._complete_head(lane) or self._pass_next(lane)

    def _complete_head(self, lane: NrtLane) -> bool:
        if not lane.pending:
            return False
        head = cast("Step", lane.pending[0])
        if head.kind is Kind.MARKER:
            if head.value > lane.passed or not self._is_over(head):
                return False
        elif not head.done:
            return False
        self._touched.extend(cast("list[NrtLane]", self._complete(head)))
        return True

    def _is_over(self, marker: Step) -> bool:
        """Whether all that a marker, the head of its lane, comes after has completed."""
        while marker.waits:
            ticket = marker.waits[0]
            if self.is_pending(ticket):
                self._hold(marker, ticket, completed=True)
                return False
            del marker.waits[0]
        return True

    def _pass_next(self, lane: NrtLane) -> bool:
        """Give the next command on, if nothing holds it up; whether the lane may move on."""
        if not lane.unpassed:
            return False
        step = lane.unpassed[0]
        if step.queued or step.kind is Kind.PLEDGE:
            return False
        route = step.route
        marker = route is None
        goal: object | None = lane.tail if route is None else route.queue if route.direct else None
        if not marker and lane.tail is not None and lane.tail is not goal:
            return False  # until the lane itself has completed that
        held, goal = self._is_held(step, goal, marker)
        if held:
            return False
        if route is not None:
            step.queued = True
            route.queue.push(lane.priority, next(self._order), step)
            self._stirred[route.queue] = None
            return False
        self._passed(step, goal)
        return True

    def _is_held(self, step: Step, goal: object | None, marker: bool) -> tuple[bool, object | None]:
        """Whether anything but what is in flight on the goal holds a step up; the goal.

        A marker without a goal takes the first queue that it finds.
        """
        for ticket in [t for t in step.waits if not self.is_pending(t)]:
            step.waits.remove(ticket)
        for ticket in step.waits:
            upstream = cast("NrtLane", self._lanes[ticket.lane])
            passed = upstream.passed >= ticket.value
            if passed and marker and goal is None:
                goal = upstream.tail
            if not passed or upstream.tail is not goal:
                self._hold(step, ticket, completed=passed)
                return True, goal
        return False, goal

    def _hold(self, step: Step, ticket: Ticket, completed: bool) -> None:
        """Have a step's lane touched when a ticket is completed, or passed."""
        if step.held_by == (ticket, completed):
            return
        step.held_by = (ticket, completed)
        upstream = cast("NrtLane", self._lanes[ticket.lane])
        heap = upstream.dependents if completed else upstream.expecting
        heapq.heappush(heap, (ticket.value, next(self._order), step))  # type: ignore[misc]

    def _passed(self, step: Step, tail: object | None) -> None:
        """A step was given to the hardware, or had nothing to give."""
        lane = step.lane
        lane.unpassed.popleft()
        lane.passed = step.value
        lane.tail = tail
        self._touched.append(lane)
        self._touched.extend(self._release(lane.expecting, lane.passed))

    def _unblock(self, lane: Lane) -> list[Lane]:
        lane = cast("NrtLane", lane)
        while lane.unpassed and lane.unpassed[0].value <= lane.completed:
            lane.unpassed.popleft()
        lane.passed = max(lane.passed, lane.completed)
        if lane.passed == lane.completed:
            lane.tail = None
        moved = self._release(lane.expecting, lane.passed)
        moved += self._release(lane.dependents, lane.completed)  # type: ignore[arg-type]
        return [*moved, lane]

    def _release(self, heap: list[tuple[int, int, Step]], value: int) -> list[NrtLane]:
        moved = []
        while heap and heap[0][0] <= value:
            step = heapq.heappop(heap)[2]
            step.held_by = None
            moved.append(step.lane)
        return moved

    def _awaited_by(self, head: Entry) -> Ticket | None:
        return next((t for t in cast("Step", head).waits if self.is_pending(t)), None)

    # -- waiting ----------------------------------------------------------------------------

    def _complete(self, entry: Entry) -> list[Lane]:
        moved = super()._complete(entry)
        waiters = cast("NrtLane", entry.lane).waiters
        while waiters and waiters[0][0] <= entry.value:
            heapq.heappop(waiters)[2].release()
        return moved

    def _wait(self, ticket: Ticket, timeout: float | None) -> None:
        """Wait on a lock that the completion releases; called without the lock of the lanes."""
        lane = cast("NrtLane | None", self._lanes.get(ticket.lane))
        if lane is None:
            return
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if lane.completed >= ticket.value:
                return
            heapq.heappush(lane.waiters, (ticket.value, next(self._order), waiter))
        done = False
        try:
            done = self._await(lane, ticket, waiter, timeout)
        finally:
            if not done:
                with self._lock:
                    lane.waiters = [item for item in lane.waiters if item[2] is not waiter]
                    heapq.heapify(lane.waiters)
        if not done and lane.completed < ticket.value:
            raise TimeoutError(f"wait: after {timeout} s {self._progress_of(lane, ticket)}")

    def _await(
        self, lane: NrtLane, ticket: Ticket, waiter: threading.Lock, timeout: float | None
    ) -> bool:
        """Whether the waiter was released in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        left = SLICE if timeout is None else min(max(timeout, 0.0), SLICE)
        while not waiter.acquire(timeout=left):
            if deadline is not None:
                left = min(deadline - time.monotonic(), SLICE)
                if left <= 0:
                    return False
            elif main_thread_has_ended():
                self._await_alone(lane, ticket, waiter)
                return True
        return True

    def _await_alone(self, lane: NrtLane, ticket: Ticket, waiter: threading.Lock) -> None:
        """Go on with a wait that the main thread has not outlived, as long as it can end."""

        def stuck() -> bool:
            with self._lock:
                return lane.completed < ticket.value and not self._moving

        with LastWait(stuck) as last:
            while not waiter.acquire(timeout=SLICE):
                if last.in_vain():
                    raise RuntimeError(
                        f"wait: {self._progress_of(lane, ticket)}. The main thread has ended, "
                        "nothing runs on the devices, and no thread is left that could change "
                        "that; the wait is given up so that the process can end"
                    )

    def _progress_of(self, lane: NrtLane, ticket: Ticket) -> str:
        return (
            f"lane {ticket.lane} has completed {lane.completed} of the {ticket.value} commands "
            f"waited for; the next is {self._describe_head(lane)}"
        )
