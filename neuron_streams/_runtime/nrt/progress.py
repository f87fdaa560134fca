"""The progress engine: commands are given to queues as there is room, and ended as they complete.

Every call of the runtime pumps it, and so does one thread, which sleeps without the GIL until
something completes. It is the only reader of completions: who waits for a command, and however many
they are, waits for the lane here.

A command that reads what a failed one should have made does not run, if it is still on the host
then. Queued behind its producer it has been scheduled already, and the hardware runs it; what it
makes is poisoned all the same, and nobody can read it.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from neuron_streams._runtime.lanes import OUTSTANDING, Device, failure_of
from neuron_streams._runtime.nrt.lib import Library
from neuron_streams._runtime.nrt.notice import Notice
from neuron_streams._runtime.nrt.order import ALONE, Order, Step, Touches
from neuron_streams._runtime.nrt.queue import NEVER_WRITTEN, Queue, Request
from neuron_streams._runtime.nrt.requests import Requests, Route
from neuron_streams._runtime.nrt.status import DeviceLostError, NrtError, Status, error_of
from neuron_streams._runtime.port import Copy, Execute, Failure, Kind

__all__ = ["Progress", "Statistics"]

RETRY = 0.001  # seconds until a queue is tried again that is full of nothing of ours


def _apart(one: Touches, other: Touches) -> bool:
    """Whether two commands may be in flight on two queues at once."""
    reads, writes = one
    others_reads, others_writes = other
    return writes.isdisjoint(others_reads | others_writes) and reads.isdisjoint(others_writes)


def _meets(step: Step, queue: Queue) -> bool:
    """Whether a queue has another command in flight that shares memory which either writes."""
    return any(
        ahead is not step and not _apart(step.touches, ahead.touches) for _, ahead in queue.flight
    )


@dataclass(slots=True)
class Statistics:
    """How many requests the hardware took, and how often its queues were full."""

    scheduled: int = 0
    queue_full: int = 0


class NrtDevice(Device):
    """A device moves while a queue of it has something in flight, or ready for it."""

    __slots__ = ("queues",)

    def __init__(self) -> None:
        super().__init__()
        self.queues: list[Queue] = []

    @property
    def moving(self) -> bool:
        return any(queue.busy or queue.ready for queue in self.queues)


class Progress(Order):
    """Gives steps to queues and brings them back. Not a runtime yet: see `runtime`.

    All methods but `__init__` are called with the lock held.
    """

    _library: Library
    _notice: Notice
    _requests: Requests

    def __init__(self, devices: int, in_flight: int) -> None:
        super().__init__(devices)
        self._in_flight = in_flight
        self._idle = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._cores = [NrtDevice() for _ in range(devices)]
        self._devices = cast("list[Device]", self._cores)
        self._lost: dict[int, DeviceLostError] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._spent: deque[object] = deque()  # what only has to be dropped, outside the lock
        self.statistics = Statistics()

    @property
    def _queues(self) -> Iterator[Queue]:
        return (queue for core in self._cores for queue in core.queues)

    @property
    def _moving(self) -> bool:
        return any(core.moving for core in self._cores)

    def _route(self, step: Step) -> Route:
        command, device = step.command, step.lane.device
        if device in self._lost:
            raise DeviceLostError(f"{command.name} on neuron:{device}, which was lost earlier")
        return self._requests.route(command, device, step.lane.id)

    # -- giving -----------------------------------------------------------------------------

    def _fill(self, queue: Queue) -> None:
        while queue.ready and not queue.full and queue.asleep is None:
            item = queue.ready[0]
            room = 1 if item[2].kind is Kind.SLEEP else self._in_flight
            if len(queue.flight) >= room:
                return
            heapq.heappop(queue.ready)
            if self._clashes(item[2], queue) or not self._give(item[2], queue):
                heapq.heappush(queue.ready, item)
                return

    def _clashes(self, step: Step, queue: Queue) -> bool:
        """Whether another queue has something in flight that this would corrupt, or that would it.

        Only a program that orders too little comes here: one that overwrites on one stream what
        another one reads. It is a race on every device, but is not to tear the memory. What is in
        flight ends by itself, so nothing can wait in a circle.
        """
        for other in self._queues:
            if other is not queue and _meets(step, other):
                other.awaited.append(queue)
                return True
        return False

    def _give(self, step: Step, queue: Queue) -> bool:
        """Have a step run on a queue, or fail; False if the queue is full."""
        if step.request is None:
            if not self._begin(step, queue):
                return True
            assert step.request is not None
        status = queue.schedule(step.request, step)
        if status == Status.QUEUE_FULL:
            self.statistics.queue_full += 1
            queue.full = True
            if not queue.flight:
                self._later(RETRY, lambda: self._retry(queue))
            return False
        if status:
            step.request.release()
            self._end(step, self._failed(step, status))
            if status == Status.EXEC_UNIT_UNRECOVERABLE:
                self._lose(queue.device, step.command.name)
            return True
        self.statistics.scheduled += 1
        if not step.started:
            step.started = time.perf_counter()
            route = step.route
            self._passed(step, queue if route is not None and route.direct else ALONE)
        self._notice.arm(queue)
        return True

    def _begin(self, step: Step, queue: Queue) -> bool:
        """Make the first request of a step; False if it has none."""
        command = step.command
        failure = command.blame()
        if failure is not None and not self._may_be_mended(step, queue):
            self._end(step, failure)
        elif step.kind is Kind.SLEEP:
            self._sleep(step, queue, command.seconds)
        else:
            step.plan = self._requests.of(cast("Copy | Execute", command), queue)
            return self._next(step)
        return False

    def _may_be_mended(self, step: Step, queue: Queue) -> bool:
        """Whether what is in flight ahead may yet overwrite what a failed command should have made.

        It is asked again when the step has completed.
        """
        return _meets(step, queue)

    def _next(self, step: Step) -> bool:
        """Make the next request of a step, and do what its plan does on the host before it."""
        try:
            step.request = next(step.plan, None)
        except Exception as error:  # kept for whoever reads the outputs
            self._end(step, failure_of(error, step))
            return False
        if step.request is None:
            self._end(step, None)
        return step.request is not None

    def _sleep(self, step: Step, queue: Queue, seconds: float) -> None:
        if seconds <= 0:
            self._end(step, None)
            return
        step.started = time.perf_counter()
        queue.asleep = step
        self._passed(step, ALONE)
        self._later(seconds, lambda: self._awake(queue, step))

    def _awake(self, queue: Queue, step: Step) -> None:
        queue.asleep = None
        self._stirred[queue] = None
        self._end(step, None)

    def _retry(self, queue: Queue) -> None:
        queue.full = False
        self._stirred[queue] = None

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.perf_counter() + seconds, next(self._order), action))
        self._notice.wake()

    # -- ending -----------------------------------------------------------------------------

    def _pump(self) -> None:
        """End what has completed, and go on with what that lets go on."""
        if self._turning:
            return  # a destructor in the middle of it; it goes on by itself
        for queue in self._queues:
            if queue.flight:
                self._harvest(queue)
        while self._timers and self._timers[0][0] <= time.perf_counter():
            heapq.heappop(self._timers)[2]()
        self._turn()
        if not self._moving:
            self._idle.notify_all()

    def _harvest(self, queue: Queue) -> None:
        try:
            done = queue.harvest()
        except NrtError as error:
            self._lose(queue.device, error.what)
            return
        if not done:
            return
        now = time.perf_counter()
        for request, step, status in done:
            self._bring_back(request, step, status, now)
            self._spent.append((request, step))
        queue.free_at = now
        self._stirred[queue] = None
        while queue.awaited:
            self._stirred[queue.awaited.pop()] = None
        self._notice.arm(queue)

    def _bring_back(self, request: Request, step: Step, status: int, now: float) -> None:
        if step.done:
            return  # given up already
        queue, command = request.queue, step.command
        step.started = max(request.began, queue.free_at)
        failure = command.blame()
        if failure is None and status:
            failure = self._failed(step, status)
        if failure is not None:
            self._end(step, failure, now)
            if status == Status.EXEC_UNIT_UNRECOVERABLE:
                self._lose(queue.device, command.name)
        elif self._next(step):
            assert step.request is not None
            after = step.request.queue
            after.push(step.lane.priority, next(self._order), step)
            self._stirred[after] = None

    def _failed(self, step: Step, status: int) -> Failure:
        """The failure of a request that was refused, or ended, with a status."""
        name = step.command.name
        if status == NEVER_WRITTEN:
            return failure_of(RuntimeError(f"{name}: libnrt ended it and gave it no status"), step)
        return failure_of(error_of(status, name), step)

    def _end(self, step: Step, failure: Failure | None, now: float | None = None) -> None:
        """A step has run, or will not: settle what it writes, make room, note when it ran."""
        now = time.perf_counter() if now is None else now
        lane, command = step.lane, step.command
        step.started = step.started or now
        step.failure = failure
        command.settle(failure)
        device = self._devices[lane.device]
        device.outstanding -= 1
        if device.outstanding == OUTSTANDING - 1:
            self._room.notify_all()
        self._intervals.append((lane.device, int(command.unit), step.started, now, command.name))
        step.done = True
        step.request, step.plan = None, iter(())
        if step.value > lane.passed:
            self._passed(step, lane.tail)
        self._touched.append(lane)

    def _lose(self, device: int, what: str) -> None:
        """A unit cannot be recovered: nothing of its device runs any more, and all waits end.

        What is in flight ends with the same status, unrun, as far as is known; its memory is kept
        until it does.
        """
        if device in self._lost:
            return
        error = self._lost[device] = DeviceLostError(f"{what} on neuron:{device}")
        doomed: dict[Step, None] = {}
        for queue in self._cores[device].queues:
            doomed.update(dict.fromkeys(step for _, step in queue.flight))
            doomed.update(dict.fromkeys(item[2] for item in queue.ready))
            queue.ready.clear()
            if queue.asleep is not None:
                doomed[queue.asleep] = None
        for lane in self._lanes.values():
            if lane.device == device:
                doomed.update(dict.fromkeys(cast("list[Step]", list(lane.pending))))
        for step in sorted(doomed, key=lambda step: (step.lane.id, step.value)):
            if step.counts and not step.done:
                self._spent.append((step.request, step.plan))
                self._forsake(step, failure_of(error, step))

    def _forsake(self, step: Step, failure: Failure) -> None:
        """End a step before those in front of it in its lane have been passed."""
        lane = step.lane
        while lane.unpassed and lane.unpassed[0].value < step.value:
            ahead = lane.unpassed[0]  # markers; what waits for them waits for completion
            self._passed(ahead, ALONE)
        self._end(step, failure)
