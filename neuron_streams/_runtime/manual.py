"""The manual runtime: no threads, the caller decides which lane steps. The specification.

`step(lane)` runs the head of one lane, `ready()` says which lanes could step, `run()` steps until
nothing moves. A host wait, from any thread, steps lanes too: in the order of a seeded generator or
of a function that picks one of the ready lanes. When nothing can move before the ticket waited for
has completed, the wait raises `DeadlockError`: a deadlock found, not hung.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import torch

from neuron_streams._runtime.cpu import run
from neuron_streams._runtime.lanes import Entry, Lanes
from neuron_streams._runtime.port import Marker, Pledge, Ticket

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
            with self._lock:
                entry = self._lanes[lane].pending[0]
                self._withdraw(entry)
            self._run(entry)
            return True

    def run(self, limit: int | None = None) -> int:
        """Step until nothing moves or `limit` commands have run; returns how many did."""
        count = 0
        while count != limit and self._step_any():
            count += 1
        return count

    def _step_any(self) -> bool:
        with self._stepping:
            lanes = self.ready()
            if not lanes:
                return False
            if self._order_of_waits is not None:
                return self.step(self._order_of_waits(lanes))
            with self._lock:
                taken = (self._take(device) for device in range(len(self._devices)))
                entry = next(filter(None, taken), None)
            if entry is None:
                return False
            self._run(entry)
            return True

    def _withdraw(self, entry: Entry) -> None:
        command = entry.command
        assert not isinstance(command, Marker | Pledge)
        state = self._devices[entry.lane.device]
        heap = state.ready[command.unit]
        heap[:] = sorted(item for item in heap if item[2] is not entry)
        self._start(entry, state, command.unit)

    def _run(self, entry: Entry) -> None:
        error: BaseException | None = None
        if entry.failure is None:
            try:
                with torch.inference_mode():
                    run(entry.command)
            except Exception as caught:
                error = caught
        with self._lock:
            self._finish(entry, error, time.perf_counter())

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        while self.completed(ticket.lane) < ticket.value:
            with self._stepping:
                if self.completed(ticket.lane) >= ticket.value:
                    return
                if not self._step_any():
                    head = self._describe_head(self._lanes[ticket.lane])
                    raise DeadlockError(
                        f"wait: nothing can move, and lane {ticket.lane} has completed "
                        f"{self.completed(ticket.lane)} of the {ticket.value} commands waited "
                        f"for; the next is {head}. Open the gate or submit the command first."
                    )

    def wait_for_room(self, lane: int) -> None:
        found = self._lanes.get(lane)
        while found is not None and self._devices[found.device].full and self._step_any():
            pass

    def close(self, timeout: float | None = None) -> None:
        alone = self._stepping.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        with self._lock:
            self._closed = True
            self._cancel_pending(running=not alone)
        if alone:
            self._stepping.release()
