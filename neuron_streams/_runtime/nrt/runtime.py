"""The runtime on libnrt: the port's calls, the thread that completes, memory, the end.

Nothing in this package has run on a Neuron device yet. It is proved against a test double of the
library, in its three ABIs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import cast

from neuron_streams._runtime import extension
from neuron_streams._runtime.lanes import Lane
from neuron_streams._runtime.nrt.lib import Library
from neuron_streams._runtime.nrt.memory import Lease, Memory
from neuron_streams._runtime.nrt.model import Model
from neuron_streams._runtime.nrt.notice import notice_for
from neuron_streams._runtime.nrt.order import Step
from neuron_streams._runtime.nrt.progress import Progress
from neuron_streams._runtime.nrt.queue import Errors, Queue, errors_for
from neuron_streams._runtime.nrt.requests import Requests
from neuron_streams._runtime.nrt.sets import Sets
from neuron_streams._runtime.nrt.status import LibraryError
from neuron_streams._runtime.nrt.weights import Weights
from neuron_streams._runtime.port import Command, Payload, Ticket

__all__ = ["NrtRuntime"]

_NO_FRAMEWORK = 1  # nrt_framework_type_t
IN_FLIGHT = 4  # requests per queue; AWS's own callers stay at 4 and 8, the depth is undocumented
LOOK_AGAIN = 0.1  # seconds: completions are signalled, this is a safety net


class _Inside(threading.local):
    here = False  # the calling thread is one that brings completions about


_kept: list[object] = []  # runtimes closed with requests in flight, whose memory must not go


class NrtRuntime(Progress):
    """Drives Neuron cores through libnrt.

    Args:
        library: libnrt; None finds it.
        in_flight: how many requests a queue is given before one has completed; None asks
            NEURON_STREAMS_NRT_IN_FLIGHT, else 4.

    Raises:
        LibraryError: there is no libnrt here, or one that cannot be driven.
        NrtError: it cannot be initialized.
    """

    name = "nrt"
    reaches_memory = False  # the host does not, directly: its data come and go by commands
    needs_implicit_waits = True  # the hardware holds nothing against what was scheduled too early

    def __init__(self, library: Library | None = None, in_flight: int | None = None) -> None:
        self._library = library or Library()
        self._tidy = extension.load().tidy
        super().__init__(self._library.device_count(), in_flight or _in_flight())
        if not self._cores:
            raise LibraryError(
                f"libnrt {self._library.version} sees no Neuron core; install aws-neuronx-dkms, "
                "look at NEURON_RT_VISIBLE_CORES, or use NEURON_STREAMS_RUNTIME=emulated"
            )
        self._library.call("nrt_init", _NO_FRAMEWORK, b"", b"")
        self._notice = notice_for(self._library)
        self._sets = Sets(self._library)
        self._memories = [
            Memory(self._library, device, self._lock, self._sets.clear, self.drain)
            for device in range(len(self._cores))
        ]
        self._weights = [Weights(self._library, memory) for memory in self._memories]
        self._loading = threading.Lock()
        self._requests = Requests(self._library, self._memories, self._sets, self._queue)
        self._errors: dict[int, Errors | None] = {}
        self._open: dict[tuple[int, int, int], Queue] = {}
        self._models: list[Model] = []
        self._inside = _Inside()
        self._thread: threading.Thread | None = None
        self._dropping = threading.RLock()
        self._pid = os.getpid()

    @property
    def library(self) -> Library:
        return self._library

    @property
    def target(self) -> str:
        """What the compiler calls this kind of core. Raises LibraryError if that is unknown."""
        found = self._library.target()
        if found is None:
            raise LibraryError(
                f"libnrt {self._library.version} names an instance of a family that is not known "
                "to make NEFFs for; give compile a target="
            )
        return found

    # -- the port ---------------------------------------------------------------------------

    def submit(
        self, lane: int, command: Command, after: Sequence[Ticket] = (), wait: bool = True
    ) -> Ticket | None:
        with self._lock:
            if not self._closed:
                self._pump()
        if self._spent:
            self._drop()
        return super().submit(lane, command, after, wait)

    def completed(self, lane: int) -> int:
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed:
                    self._pump()
            finally:
                self._lock.release()
        return super().completed(lane)

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        if self.completed(ticket.lane) < ticket.value:
            self._refuse_wait_inside()
            self._wait(ticket, timeout)
        if self._spent:
            self._drop()

    def wait_for_room(self, lane: int) -> None:
        self._refuse_wait_inside()
        with self._lock:
            found = self._lanes.get(lane)
            while found is not None and self._devices[found.device].full and not self._closed:
                self._room.wait(0.1)  # and then Ctrl-C is heard

    def drain(self) -> None:
        if self._is_inside():
            return
        with self._lock:
            while self._moving and not self._closed:
                self._idle.wait(0.1)
        self._drop(wait=True)

    def _is_inside(self) -> bool:
        return self._inside.here or super()._is_inside()

    def _drop(self, wait: bool = False) -> None:
        """Let go of what has completed, and with it of memory; `wait` for who is at it already.

        It may run destructors of users, so only who needs the memory waits.
        """
        if self._dropping.acquire(blocking=wait):
            try:
                self._spent.clear()
                self._tidy()
            finally:
                self._dropping.release()

    def load(self, payload: Payload, device: int) -> Model:
        """A NEFF on a core. Host: waits until it and the weights that are new are there."""
        model = Model.load(self._library, payload, device)
        with self._loading:
            try:
                for name, weight in payload.content.constants.items():
                    tensor = self._weights[device].tensor(weight)
                    model.constants.append((name.encode(), tensor))
            except BaseException:
                model.unload()
                raise
        with self._lock:
            self._models.append(model)
        return model

    def allocate(self, device: int, nbytes: int) -> Lease:
        """Memory for a buffer. Host: waits for what is in flight if there is no other left."""
        self._tidy()
        return self._lease(self._memories[device], nbytes)

    def reserved(self, device: int) -> tuple[int, ...]:
        """How many nrt tensors of a device there are, and their bytes, four figures each."""
        memory = self._memories[device]
        return *memory.segments.values, *memory.reserved.values

    def reset_reserved(self, device: int, peak: bool, accumulated: bool) -> None:
        for tally in (self._memories[device].segments, self._memories[device].reserved):
            tally.reset(peak, accumulated)

    def empty_cache(self) -> None:
        """Give memory that nothing uses back to the devices. Host: returns at once."""
        self._drop()
        for memory in self._memories:
            memory.trim()

    def memory_info(self, device: int) -> tuple[int, int]:
        """The free bytes and all bytes of a device, models and other processes included."""
        used, limit = self._library.memory(device)
        return max(limit - used, 0), limit

    def _lease(self, memory: Memory, nbytes: int) -> Lease:
        return Lease(memory, memory.allocate(nbytes))

    def _queue(self, device: int, unit: int, index: int) -> Queue:
        key = device, unit, index
        if key not in self._open:
            if device not in self._errors:
                self._errors[device] = errors_for(self._library, device)
            queue = Queue(self._library, device, unit, index, self._errors[device])
            self._notice.open(queue)
            self._open[key] = queue
            self._cores[device].queues.append(queue)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="neuron_streams nrt", daemon=True
                )
                self._thread.start()
        return self._open[key]

    # -- the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        self._inside.here = True
        while not self._closed:
            # Nothing says in writing that a signal never comes before what it signals can be seen.
            timeout = LOOK_AGAIN if any(queue.flight for queue in list(self._queues)) else None
            for moment, _, _ in self._timers[:1]:
                left = max(moment - time.perf_counter(), 0.0)
                timeout = left if timeout is None else min(timeout, left)
            self._notice.wait(timeout)
            with self._lock:
                if not self._closed:
                    self._pump()
            self._drop()

    # -- the end ----------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Run what can run until `timeout` seconds (None: to the end), then cancel the rest."""
        if os.getpid() != self._pid:
            return  # a fork has the lanes but neither the thread nor the device
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._moving and not self._closed:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._idle.wait(left)
            if self._closed:
                return
            self._closed = True
            self._cancel_all()
            self._room.notify_all()
            self._idle.notify_all()
        self._notice.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if any(queue.flight for queue in self._queues):
            _kept.append(self)  # the device still uses memory, so none goes, nor does the runtime
        else:
            self._leave()

    def _cancel_all(self) -> None:
        self._turning = True  # nothing moves on any more
        self._timers.clear()
        for queue in self._queues:
            for _, _, step in queue.ready:
                if step.request is not None:
                    step.request.release()
            queue.ready.clear()
            queue.asleep = None
        for lane in list(self._lanes.values()):
            self._cancel(lane)

    def _cancel(self, lane: Lane) -> None:
        while lane.pending and cast("Step", lane.pending[0]).done:
            self._complete(lane.pending[0])  # it has failed by itself, behind what was in flight
        super()._cancel(lane)

    def _leave(self) -> None:
        """Give everything back, in the order in which the one stands on the other."""
        self._drop()
        self._notice.close(self._open.values())
        self._sets.clear()
        for model in self._models:
            model.unload()
        for errors in filter(None, self._errors.values()):
            errors.close()
        for memory in self._memories:
            memory.close()
        self._library.nrt_close()


def _in_flight() -> int:
    text = os.environ.get("NEURON_STREAMS_NRT_IN_FLIGHT", str(IN_FLIGHT))
    if not text.strip().isdigit() or not 1 <= int(text) <= 63:
        raise ValueError(
            f"NEURON_STREAMS_NRT_IN_FLIGHT={text!r} is no number of requests; use 1 to 63"
        )
    return int(text)
