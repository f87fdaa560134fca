"""What drives a decode loop for callers on other threads.

Callers leave what they want in an inbox, and the thread that drives does it between two steps; so
the loop is touched by that thread alone. The inbox is a `SimpleQueue`, since a stream that is
collected as garbage puts into it from wherever that happens, even from inside a `put`.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

import torch

from neuron_streams.decode.admission import AdmittedRequest
from neuron_streams.decode.loop import DecodeLoop
from neuron_streams.decode.request import RequestOutput
from neuron_streams.decode.request_stream import OutputQueue
from neuron_streams.decode.sampling_params import SamplingParams

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)
Callback = Callable[[RequestOutput], object]
_EXIT_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class _Live:
    """A request in the loop, as the driving thread sees it."""

    queue: OutputQueue
    on_output: Callback | None
    asked_to_pause: bool = False
    paused: bool = False


class EngineCore:
    """See `DecodeEngine`. It knows no stream, only the queues that streams read from."""

    def __init__(self, loop: DecodeLoop) -> None:
        self.loop = loop
        self.driver: threading.Thread | None = None
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        # Under the lock: who has which id, whom an end must reach, who waits for quiet.
        self._by_id: dict[str, OutputQueue] = {}
        self._open: set[OutputQueue] = set()
        self._drains: list[Future[None]] = []
        self._over: Exception | None = None
        # The driving thread's own. `_nearly_full` is looked through before each step, so a request
        # is in it only after something that may change whether it has to be paused: a step of its
        # own, an output, a reader that has made room, a pause or resume.
        self._live: dict[str, _Live] = {}
        self._nearly_full: set[_Live] = set()
        self._stopping = False
        self._turning = False
        # Such modes are a thread's own, and the model may have been made in one.
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    # Calls of any thread

    def start(self) -> None:
        """Have a daemon thread drive, until `stop` or the interpreter's end."""
        self.driver = threading.Thread(
            target=self.run, name="neuron-streams-decode-engine", daemon=True
        )
        self.driver.start()
        _end_at_exit(self)

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams | None,
        priority: float,
        on_output: Callback | None,
        max_queued: int,
    ) -> OutputQueue:
        now = time.perf_counter()
        admitted = self.loop.scheduler.check_request(
            request_id, prompt, params, priority, on_output
        )
        request_id = admitted.request_id
        on_room = partial(self._inbox.put, partial(self._look_at, request_id))
        queue = OutputQueue(request_id, max_queued, on_room, on_output is not None)
        with self._lock:
            self.check_open()
            bearer = self._by_id.get(request_id)
            if bearer is not None and not bearer.abandoned:
                raise ValueError(
                    f"Request id {request_id!r} is in use; wait until that request has finished,"
                    " abort it, or choose another id."
                )
            self._by_id[request_id] = queue
            self._open.add(queue)
            live = _Live(queue, on_output)
            self._inbox.put(partial(self._add, live, admitted, now))
        return queue

    def abort(self, queue: OutputQueue) -> bool:
        return self.abort_id(queue.request_id, queue)

    def abort_id(self, request_id: str, queue: OutputQueue | None = None) -> bool:
        with self._lock:
            bearer = self._by_id.get(request_id)
            if bearer is None or (queue is not None and queue is not bearer):
                return False
            del self._by_id[request_id]
            self._inbox.put(partial(self._abort, bearer))
            return True

    def abandon(self, queue: OutputQueue) -> None:
        # Called by the garbage collector, perhaps by a thread that holds the lock.
        queue.unread = True
        if not queue.ended:
            look_at = partial(self._look_at, queue.request_id)
            self._inbox.put(partial(self._abort, queue) if queue.abandoned else look_at)

    def set_paused(self, request_id: str, paused: bool) -> bool:
        with self._lock:
            queue = self._by_id.get(request_id)
            if queue is not None:
                self._inbox.put(partial(self._set_paused, queue, paused))
            return queue is not None

    def drained(self) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self.check_open()
            self._drains.append(future)
        self.wake()
        return future

    def wake(self) -> None:
        self._inbox.put(_nothing)

    def stop(self) -> None:
        self._inbox.put(self._stop)

    @property
    def has_work(self) -> bool:
        return not self._inbox.empty() or self.loop.has_unfinished_requests()

    @property
    def unfinished_request_ids(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._by_id)

    def check_open(self) -> None:
        if self._over is not None:
            raise self._over

    def check_may_wait(self) -> None:
        if self.driver is None:
            raise RuntimeError("Nothing drives this engine, so waiting would not end; call turn().")
        self.check_no_callback("wait for")

    def check_no_callback(self, what: str) -> None:
        if self._turning and self.driver in (None, threading.current_thread()):
            raise RuntimeError(f"A callback must not {what} the engine that is calling it.")

    def end(self, error: Exception) -> tuple[str, ...]:
        """Let `error` reach every stream, every waiter and every later call."""
        with self._lock:
            self._over = self._over or error
            unfinished, queues, drains = tuple(self._by_id), self._open, self._drains
            self._by_id, self._open, self._drains = {}, set(), []
        for queue in queues:
            queue.end(self._over)
        for future in drains:
            future.set_exception(self._over)
        return unfinished

    # Calls of the driving thread alone

    def run(self) -> None:
        """The body of the thread: on the stream on which the loop was made."""
        runner = self.loop.runner
        try:
            inference, grad = self._modes
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(grad),
                runner.streams.stream(runner.compute_stream),
            ):
                while self.turn(wait=True):
                    pass
        except BaseException as error:
            logger.error("the decode engine has ended: %r", error)
            self.end(_as_exception(error))

    def turn(self, *, wait: bool) -> bool:
        """Do what was asked and run one step, or if there is none wait; False once stopped."""
        self._turning = True
        try:
            return self._turn(wait)
        finally:
            self._turning = False

    def _turn(self, wait: bool) -> bool:
        while not self._inbox.empty():
            self._inbox.get()()
        nearly_full, self._nearly_full = self._nearly_full, set()
        for live in nearly_full:
            self._hold_back(live)
        if self._stopping:
            return False
        if self.loop.has_unfinished_requests():
            self.loop.step()
            for key in self.loop.batch_queue.newest_req_ids:
                scheduled = self._live.get(key.request_id)
                if scheduled is not None:
                    self._note_room(scheduled)
            return True
        self._tell_drained()
        if wait:
            self._inbox.get()()
        return True

    def _add(self, live: _Live, admitted: AdmittedRequest, now: float) -> None:
        queue = live.queue
        request_id, token_ids, params, priority = admitted
        if request_id in self._live:  # abandoned, and its own abort comes behind
            self._abort(self._live[request_id].queue)
        give = partial(self._give, live)
        try:
            self.loop.add_request(
                request_id, token_ids, params, priority=priority, on_output=give, arrived_at=now
            )
        except Exception as error:
            self._forget(live)
            queue.end(error)
            return
        self._live[request_id] = live

    def _abort(self, queue: OutputQueue) -> None:
        live = self._live.get(queue.request_id)
        if live is not None and live.queue is queue:
            del self._live[queue.request_id]
            self._nearly_full.discard(live)
            self.loop.abort_request(queue.request_id)

    def _set_paused(self, queue: OutputQueue, paused: bool) -> None:
        live = self._live.get(queue.request_id)
        if live is not None and live.queue is queue:
            live.asked_to_pause = paused
            self._nearly_full.add(live)

    def _look_at(self, request_id: str) -> None:
        """Its queue may have room again."""
        live = self._live.get(request_id)
        if live is not None:
            self._nearly_full.add(live)

    def _stop(self) -> None:
        self._stopping = True

    def _give(self, live: _Live, output: RequestOutput) -> None:
        if output.finished and not self._forget(live):
            # Aborted before it came to this end, and the abort has been promised.
            output = replace(output, finish_reason="abort", stop_reason=None, error=None)
        error = None if self._over else _call(live, output)
        if error is not None and live.queue.unread:
            logger.error("a callback of request %r failed: %r", output.request_id, error)
        if output.finished:
            live.queue.put(output, error)
            return
        live.queue.put(output)
        self._note_room(live)
        if error is not None:
            self.loop.fail_request(output.request_id, error)

    def _forget(self, live: _Live) -> bool:
        """Free the id of a request that has ended; False if an abort has freed it already."""
        request_id = live.queue.request_id
        self._nearly_full.discard(live)
        if self._live.get(request_id) is live:
            del self._live[request_id]
        with self._lock:
            self._open.discard(live.queue)
            had_its_id = self._by_id.get(request_id) is live.queue
            if had_its_id:
                del self._by_id[request_id]
        return had_its_id

    def _note_room(self, live: _Live) -> None:
        if len(live.queue) + self.loop.max_concurrent_batches >= live.queue.max_queued:
            self._nearly_full.add(live)

    def _hold_back(self, live: _Live) -> None:
        """Pause a request whose queue has no room for what is in flight and a token more."""
        request_id = live.queue.request_id
        in_flight = self.loop.scheduler.num_output_placeholders(request_id)
        paused = live.queue.hold(in_flight) or live.asked_to_pause
        if paused != live.paused:
            live.paused = paused
            (self.loop.pause_request if paused else self.loop.resume_request)(request_id)

    def _tell_drained(self) -> None:
        with self._lock:
            drains, self._drains = self._drains, []
        for future in drains:
            future.set_result(None)


def _nothing() -> None:
    """Something to find in the inbox."""


def _call(live: _Live, output: RequestOutput) -> Exception | None:
    if live.on_output is not None:
        try:
            live.on_output(output)
        except Exception as error:
            live.on_output = None
            return error
    return None


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    ended = RuntimeError(f"The engine's thread was ended by {error!r}.")
    ended.__cause__ = error
    return ended


_driven: weakref.WeakSet[EngineCore] | None = None


def _end_at_exit(core: EngineCore) -> None:
    """A thread that works with tensors while the interpreter ends aborts the process."""
    global _driven
    if _driven is None:
        _driven = weakref.WeakSet()
        # Before the interpreter joins threads, which may be readers, and ahead of the runtime.
        getattr(threading, "_register_atexit", atexit.register)(_end_all)
    _driven.add(core)


def _end_all() -> None:
    cores, deadline = list(_driven or ()), time.monotonic() + _EXIT_SECONDS
    for core in cores:
        core.stop()
    for core in cores:
        assert core.driver is not None
        core.driver.join(max(0.0, deadline - time.monotonic()))
        core.end(RuntimeError("The interpreter is ending, and the decode engine with it."))
        if not core.driver.is_alive():
            core.loop.close(max(0.0, deadline - time.monotonic()))
