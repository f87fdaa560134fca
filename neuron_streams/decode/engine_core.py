"""What drives a decode loop for callers on other threads.

Callers leave what they want in an inbox, and the thread that drives does it between two steps; so
the loop is touched by that thread alone. The inbox is a `SimpleQueue`, since a stream that is
collected as garbage puts into it from wherever that happens, even from inside a `put`.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

import torch

from neuron_streams._exit import is_stuck
from neuron_streams.decode.admission import AdmittedRequest
from neuron_streams.decode.future import Exclusive, Future
from neuron_streams.decode.life import OwnProcess
from neuron_streams.decode.loop import DecodeLoop
from neuron_streams.decode.request import RequestOutput
from neuron_streams.decode.request_stream import OutputQueue

__all__ = ["EngineCore", "closed"]

logger = logging.getLogger(__name__)
Callback = Callable[[RequestOutput], object]
_EXIT_SECONDS, _INTERRUPT_SECONDS = 0.5, 0.25


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
        self.process = OwnProcess()
        self.driver: threading.Thread | None = None
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._exclusive = Exclusive()
        # Who has which id, which changes in an exclusive section; whom an end must reach, who waits
        # for quiet. What is left in the middle by an interrupt does no harm, and is done again.
        self._by_id: dict[str, OutputQueue] = {}
        self._open: set[OutputQueue] = set()
        self._drains: list[Future[None]] = []
        self._over: Exception | None = None
        self._stopping = False
        # The driving thread's own. `_nearly_full` is looked through before each step, so a request
        # is in it only after something that may change whether it has to be paused: a step of its
        # own, an output, a reader that has made room, a pause or resume.
        self._live: dict[str, _Live] = {}
        self._nearly_full: set[_Live] = set()
        self._turning = False
        # Such modes are a thread's own, and the model may have been made in one.
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    # Calls of any thread

    def start(self) -> None:
        """Have a daemon thread drive, until `stop` or the interpreter's end.

        Raises:
            RuntimeError: The system has no thread to give; the loop can still be used.
        """
        self.driver = threading.Thread(
            target=self.run, name="neuron-streams-decode-engine", daemon=True
        )
        try:
            if self.loop.runner.use_async_scheduling:
                self.loop.output_handler.start()  # in a step it would fail what has been admitted
            self.driver.start()
            _driven.add(self)
        except BaseException:
            self.stop()  # an interrupted start may have started it
            raise

    def new_queue(self, request_id: str, max_queued: int, has_callback: bool) -> OutputQueue:
        on_room = partial(self._inbox.put, partial(self._look_at, request_id))
        return OutputQueue(request_id, max_queued, on_room, has_callback)

    def add_request(
        self,
        queue: OutputQueue,
        admitted: AdmittedRequest,
        on_output: Callback | None,
        asked_at: float,
    ) -> None:
        """Add the request whose outputs `queue` is for. After an interrupt, `abort` it."""
        add = partial(self._add, _Live(queue, on_output), admitted, asked_at)
        self._exclusive(partial(self._admit, queue, add))

    def _admit(self, queue: OutputQueue, add: Callable[[], None]) -> None:
        self.check_open()
        bearer = self._by_id.get(queue.request_id)
        if bearer is not None and not bearer.abandoned:
            raise ValueError(
                f"Request id {queue.request_id!r} is in use; wait until that request has finished,"
                " abort it, or choose another id."
            )
        self._open.add(queue)
        self._by_id[queue.request_id] = queue
        self._inbox.put(add)

    def abort(self, queue: OutputQueue) -> bool:
        return self.abort_id(queue.request_id, queue)

    def abort_id(self, request_id: str, queue: OutputQueue | None = None) -> bool:
        return self._exclusive(partial(self._free_id, request_id, queue))

    def _free_id(self, request_id: str, queue: OutputQueue | None) -> bool:
        bearer = self._by_id.get(request_id)
        if bearer is None or (queue is not None and queue is not bearer):
            return False
        self._inbox.put(partial(self._abort, bearer))
        del self._by_id[request_id]
        return True

    def abandon(self, queue: OutputQueue) -> None:
        # Called by the garbage collector, perhaps in an exclusive section of this thread.
        queue.unread = True
        if not queue.ended:
            look_at = partial(self._look_at, queue.request_id)
            self._inbox.put(partial(self._abort, queue) if queue.abandoned else look_at)

    def set_paused(self, request_id: str, paused: bool) -> bool:
        queue = self._by_id.get(request_id)
        if queue is not None:
            queue.asked_to_pause = paused
            self._inbox.put(partial(self._set_paused, queue, paused))
        return queue is not None

    def drained(self) -> Future[None]:
        self.check_open()
        future: Future[None] = Future()
        self._drains.append(future)
        self.check_open()  # again: an end that has missed the future is to be seen by now
        self.wake()
        return future

    def wake(self) -> None:
        self._inbox.put(_nothing)

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    @property
    def has_work(self) -> bool:
        return not self._inbox.empty() or self.loop.has_unfinished_requests()

    @property
    def unfinished_request_ids(self) -> tuple[str, ...]:
        return tuple(self._by_id)

    def check_usable(self) -> None:
        self.process.check()
        self.check_open()

    def check_open(self) -> None:
        if self._over is not None:
            raise self._over
        if self._stopping:
            raise closed()

    def check_may_wait(self) -> None:
        if self.driver is None:
            raise RuntimeError("Nothing drives this engine, so waiting would not end; call turn().")
        self.check_no_callback("wait for")

    def check_no_callback(self, what: str) -> None:
        if self._turning and self.driver in (None, threading.current_thread()):
            raise RuntimeError(f"A callback must not {what} the engine that is calling it.")

    def is_held(self, queue: OutputQueue) -> bool:
        """Whether a request is paused, with nothing of it in flight."""
        live = self._live.get(queue.request_id)
        if live is None or live.queue is not queue or not (queue.asked_to_pause and live.paused):
            return False
        return not self.loop.scheduler.num_output_placeholders(queue.request_id)

    def device_is_held(self) -> bool:
        """Whether a thread of the engine or its loop waits for a device that is at rest."""
        threads = self.driver, self.loop.output_handler.thread
        return any(thread is not None and is_stuck(thread) for thread in threads)

    def end(self, error: Exception) -> tuple[str, ...]:
        """Let `error` reach every stream, every waiter and every later call.

        Where it was interrupted, it is called again and goes on.
        """
        over = self._exclusive(partial(self._refuse, error))
        for queue in tuple(self._open):
            queue.end(over)
            self._open.discard(queue)
        for future in tuple(self._drains):
            future.set_exception(over)
            self._drains.remove(future)
        unfinished = tuple(self._by_id)
        self._by_id.clear()
        return unfinished

    def fail(self, error: BaseException) -> None:
        """End because of what the driving thread has run into."""
        self._turning = False
        self.end(_as_exception(error))

    def _refuse(self, error: Exception) -> Exception:
        # In an exclusive section, so that nothing is being admitted.
        if self._over is None:
            self._over = error
        return self._over

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
            if self._over is None:  # or the interpreter ends, and has interrupted it
                logger.error("the decode engine has ended: %r", error)
            self.fail(error)

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
            self._open.discard(queue)
            return
        self._live[request_id] = live

    def _abort(self, queue: OutputQueue) -> None:
        live = self._live.get(queue.request_id)
        if live is not None and live.queue is queue:
            del self._live[queue.request_id]
            self._nearly_full.discard(live)
            self.loop.abort_request(queue.request_id)
        elif not queue.ended:  # its admission was interrupted
            self._exclusive(partial(self._take_id, queue))
            queue.end(None)
            self._open.discard(queue)

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

    def _give(self, live: _Live, output: RequestOutput) -> None:
        if output.finished and not self._forget(live):
            # Aborted before it came to this end, and the abort has been promised.
            output = replace(output, finish_reason="abort", stop_reason=None, error=None)
        error = None if self._over else _call(live, output)
        if error is not None and live.queue.unread:
            logger.error("a callback of request %r failed: %r", output.request_id, error)
        if output.finished:
            live.queue.put(output, error)
            self._open.discard(live.queue)
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
        return self._exclusive(partial(self._take_id, live.queue))

    def _take_id(self, queue: OutputQueue) -> bool:
        had_its_id = self._by_id.get(queue.request_id) is queue
        if had_its_id:
            del self._by_id[queue.request_id]
        return had_its_id

    def _note_room(self, live: _Live) -> None:
        if len(live.queue) + self.loop.max_concurrent_batches >= live.queue.max_queued:
            self._nearly_full.add(live)

    def _hold_back(self, live: _Live) -> None:
        """Pause a request whose queue has no room for what is in flight and a token more."""
        request_id = live.queue.request_id
        in_flight = self.loop.scheduler.num_outputs_in_flight(request_id)
        paused = live.queue.hold(in_flight) or live.asked_to_pause
        if paused != live.paused:
            live.paused = paused
            (self.loop.pause_request if paused else self.loop.resume_request)(request_id)

    def _tell_drained(self) -> None:
        for future in tuple(self._drains):
            future.set_result(None)
            self._drains.remove(future)


def closed() -> RuntimeError:
    return RuntimeError("The decode engine is closed; make another.")


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


_driven: weakref.WeakSet[EngineCore] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that works with tensors while the interpreter ends aborts the process.

    This comes behind all threads that are no daemons, which may be readers, and ahead of the end of
    the runtime, which has registered before.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    cores = [core for core in _driven if core.process]  # not those of a fork's parent
    for core in cores:
        core.stop()
    for core in cores:
        ended = _ended(core, deadline)
        core.end(RuntimeError("The interpreter is ending, and the decode engine with it."))
        if ended:
            core.loop.close(max(0.0, deadline - time.monotonic()))
        else:  # in the middle of a compilation, or a callback
            _interrupt(core)
    deadline = time.monotonic() + _INTERRUPT_SECONDS
    for core in cores:
        _ended(core, deadline)


def _ended(core: EngineCore, deadline: float) -> bool:
    """Whether its thread has ended by then."""
    assert core.driver is not None
    core.driver.join(max(0.0, deadline - time.monotonic()))
    return not core.driver.is_alive()


def _interrupt(core: EngineCore) -> None:
    """Raise SystemExit in its thread, as soon as that runs Python."""
    assert core.driver is not None
    thread = core.driver
    ident, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
