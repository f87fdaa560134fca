"""The manual runtime: no threads, the caller decides which lane steps. The specification.

`step(lane)` runs the head of one lane, `ready()` says which lanes could step, `run()` steps until
nothing moves. A host wait, from any thread, steps lanes too: in the order of a seeded generator or
of a function that picks one of the ready lanes. When nothing can move before the ticket waited for
has completed, the wait raises `DeadlockError`: a deadlock found, not hung.

One re-entrant lock guards the lanes, another one stepping.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Sequence

from neuron_streams._runtime.lanes import Entry, Lanes
from neuron_streams._runtime.port import Handle, Kind, Payload, Ticket, Unit

__all__ = ["DeadlockError", "ManualRuntime"]

Order = Callable[[Sequence[int]], int]


class DeadlockError(RuntimeError):
    """A host wait that nothing on the device could ever end."""


class ManualRuntime(Lanes):
    """A deterministic device.

    Args:
        devices: how many.
        order: an int seeds the order in which waits step lanes; a function picks from the ready
            lanes (never empty, ascending); None steps the most urgent, then the oldest command.
    """

    name = "manual"

    def __init__(self, devices: int = 2, order: int | Order | None = None) -> None:
        super().__init__(devices)
        self._stepping = threading.RLock()
        self._order_of_waits: Order | None = (
            random.Random(order).choice if isinstance(order, int) else order
        )

    def wait_for_room(self, lane: int) -> None:
        found = self._lanes.get(lane)
        while found is not None and self._devices[found.device].full and self._step_any():
            pass

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

    def _run(self, entry: Entry) -> None:
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

    # -- executables and the end --------------------------------------------------------------

    def load(self, payload: Payload, device: int) -> Handle:
        from neuron_streams._runtime.program import load_on_cpu

        return load_on_cpu(payload, device)

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
