"""The decode engine: a thread that drives a decode loop for callers on any thread or event loop."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence

from neuron_streams.decode.engine_core import EngineCore, closed
from neuron_streams.decode.loop import DecodeLoop
from neuron_streams.decode.request import RequestOutput
from neuron_streams.decode.request_stream import OutputQueue, RequestStream
from neuron_streams.decode.sampling_params import SamplingParams
from neuron_streams.decode.stats import DecodeStats

__all__ = ["DecodeEngine"]

logger = logging.getLogger(__name__)


class DecodeEngine:
    """Drives a loop on one daemon thread, which sleeps while there is nothing to do.

    The loop belongs to the engine from here on, and `close` closes it. Its thread runs on the
    stream on which the loop was made. What ends the loop reaches every stream and every later call.
    In a forked child every call raises a RuntimeError, of the engine as of its streams.

    Args:
        loop: With no request unfinished.
        max_queued: Outputs that a stream holds for a reader that is slow. Then its request pauses,
            early enough for what is in flight, until the reader has taken half. Others go on.
        thread: False leaves the driving to whoever calls `turn`, for tests.

    Raises:
        ValueError: `max_queued` is below 1, or the loop has requests.
    """

    def __init__(self, loop: DecodeLoop, *, max_queued: int = 64, thread: bool = True) -> None:
        OutputQueue("", max_queued, int)  # refuses what is out of range
        if loop.scheduler.unfinished_request_ids:
            raise ValueError(
                f"The loop has unfinished requests, {loop.scheduler.unfinished_request_ids}; run it"
                " until they have ended, or add them through the engine."
            )
        self.max_queued = max_queued
        self._core = EngineCore(loop)
        self._closed = False
        # An engine that is dropped unclosed must not leave its thread behind.
        weakref.finalize(self, self._core.stop).atexit = False
        if thread:
            self._core.start()

    @property
    def stats(self) -> DecodeStats:
        """The loop's; the engine's thread writes them."""
        return self._core.loop.stats

    @property
    def unfinished_request_ids(self) -> tuple[str, ...]:
        self._core.process.check()
        return self._core.unfinished_request_ids

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: float = 0,
        on_output: Callable[[RequestOutput], object] | None = None,
        max_queued: int | None = None,
    ) -> RequestStream:
        """Queue a request; a lower `priority` is more urgent. Host: returns at once.

        Args:
            request_id: Its name, of no other unfinished request.
            prompt_token_ids: Its prompt.
            sampling_params: How to choose tokens, and when to stop.
            priority: Lower is more urgent.
            on_output: Called with each output on the engine's thread, ahead of the stream; it must
                not wait. If it raises, the request ends, and the stream raises the same. Who needs
                the callback alone drops the stream: one that is kept and not read fills up.
            max_queued: As the engine's, for this request.

        Raises:
            ValueError: As `DecodeLoop.add_request`, or `max_queued` is below 1.
            RuntimeError: The engine is closed.
            Exception: What has ended the engine.
        """
        asked_at = time.perf_counter()
        self._core.process.check()
        admitted = self._core.loop.scheduler.check_request(
            request_id, prompt_token_ids, sampling_params, priority, on_output
        )
        most = self.max_queued if max_queued is None else max_queued
        queue = self._core.new_queue(admitted.request_id, most, on_output is not None)
        # First, so that whatever interrupts the rest leaves a stream that is dropped.
        stream = RequestStream(queue, self._core, self)
        try:
            self._core.add_request(queue, admitted, on_output, asked_at)
            return stream
        except BaseException:
            stream.close()  # or its id would be in use as long as the traceback
            raise

    def abort(self, request_id: str) -> bool:
        """End a request; False if none of that id is unfinished. Host: returns at once.

        The last output of its stream has finish reason `"abort"`, even where the request comes to
        its own end before the engine's thread hears of this. The id is free at once.
        """
        self._core.check_usable()
        return self._core.abort_id(request_id)

    def pause(self, request_id: str) -> bool:
        """As `DecodeLoop.pause_request`, from any thread."""
        self._core.check_usable()
        return self._core.set_paused(request_id, True)

    def resume(self, request_id: str) -> bool:
        """Undo a pause; a request that waits for its reader goes on waiting."""
        self._core.check_usable()
        return self._core.set_paused(request_id, False)

    def drain(self, timeout: float | None = None) -> tuple[str, ...]:
        """Wait until no step is in flight and none can be run.

        Returns:
            The ids of the requests that are unfinished then: they are paused, or wait for their
            readers.

        Raises:
            TimeoutError: It has not come to that within `timeout` seconds; it names the requests.
                With `thread=False` that is looked at between two turns.
            Exception: What has ended the engine.
        """
        self._core.process.check()
        self._core.check_no_callback("wait for")
        quiet = self._core.drained()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self._core.driver is None and not quiet.done() and time.monotonic() < deadline:
            self.turn()
        if not quiet.wait(None if timeout is None else max(0.0, deadline - time.monotonic())):
            ids = ", ".join(map(repr, self.unfinished_request_ids))
            raise TimeoutError(
                f"The engine has not come to rest within {timeout} s; unfinished are {ids}. Wait"
                " longer, abort them, or close() the engine."
            )
        quiet.result()
        return self.unfinished_request_ids

    def turn(self) -> bool:
        """Do what was asked and at most one step, for an engine made with `thread=False`.

        Returns:
            Whether there may be more to do.

        Raises:
            RuntimeError: The engine has a thread, or is calling this from a callback.
            Exception: What has ended the engine.
        """
        self._core.process.check()
        if self._core.driver is not None:
            raise RuntimeError(
                "The engine's own thread drives it; only with thread=False turn() it."
            )
        self._core.check_no_callback("turn")
        self._core.check_open()
        try:
            self._core.turn(wait=False)
        except BaseException as error:
            self._core.fail(error)
            raise
        return self._core.has_work

    def close(self, timeout: float = 10.0) -> tuple[str, ...]:
        """End the engine, its thread and its loop; always returns, within about `timeout` seconds.

        What has arrived can still be read; the streams of unfinished requests then raise.

        Returns:
            The ids of the requests that had not finished.
        """
        self._core.process.check()
        driver = self._core.driver
        self._core.check_no_callback("close")
        if self._closed:
            return ()
        # After an interrupt it is called again, so each part of it can be done twice.
        deadline = time.monotonic() + timeout
        self._core.stop()
        try:
            if driver is not None:
                driver.join(timeout)
            if driver is not None and driver.is_alive():
                logger.warning("the decode engine was closed while its thread waits for the device")
            else:
                self._core.loop.close(max(0.0, deadline - time.monotonic()))
        finally:
            unfinished = self._core.end(closed())
        self._closed = True
        return unfinished

    def __enter__(self) -> DecodeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._core.process:
            self.close()
