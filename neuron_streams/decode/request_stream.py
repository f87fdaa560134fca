"""One request's outputs on their way from the thread that drives to whoever reads them.

The driving thread never waits here: it puts, and asks beforehand whether there is room, so that a
slow reader pauses its own request and nobody else's.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

from neuron_streams.decode import coerce
from neuron_streams.decode.request import RequestOutput

__all__ = ["OutputQueue", "RequestStream"]


class Owner(Protocol):
    """What a stream uses of the engine that gave it."""

    def abort(self, queue: OutputQueue) -> bool: ...
    def abandon(self, queue: OutputQueue) -> None: ...
    def check_may_wait(self) -> None: ...


class OutputQueue:
    """A queue that knows when it is full and when it has ended. Any thread may use it.

    Args:
        request_id: Whose outputs.
        max_queued: Most outputs in it, but for one without tokens that tells of an abort or error.
        on_room: Called when a reader has emptied a full one to half; it must not wait.
        has_callback: Its request goes on though nobody reads here.
    """

    def __init__(
        self,
        request_id: str,
        max_queued: int,
        on_room: Callable[[], object],
        has_callback: bool = False,
    ) -> None:
        max_queued = coerce.whole("max_queued", max_queued)
        if max_queued < 1:
            raise ValueError(f"max_queued is {coerce.shown(max_queued)}; it must be 1 or more.")
        self.request_id = request_id
        self.max_queued = max_queued
        self.has_callback = has_callback
        self.unread = False
        self._on_room = on_room
        self._outputs: deque[RequestOutput] = deque()
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], object]] = []
        self._full = False
        self._ended = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def abandoned(self) -> bool:
        """Whether nobody wants its request any more."""
        return self.unread and not self.has_callback

    @property
    def ended(self) -> bool:
        """Whether nothing more will be put."""
        return self._ended

    def put(self, output: RequestOutput, error: Exception | None = None) -> None:
        """Append an output; `error`, or the output's own, is what a last one ends with."""
        with self._changed:
            if self._ended:
                return
            if not self.unread:
                self._outputs.append(output)
            if output.finished:
                self._ended, self._error = True, _raisable(error or output.error)
            wakers = self._take_wakers()
        _call_all(wakers)

    def end(self, error: Exception | None, *, discard: bool = False) -> None:
        """Let no more be put; who has read what is there, unless discarded, gets the error."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
            if discard:
                self._outputs.clear()
                self._error = None
            wakers = self._take_wakers()
        _call_all(wakers)

    def hold(self, num_in_flight: int) -> bool:
        """Whether there is no room for one output more than are in flight.

        Once full it is so until half is free: a batch whose rows come and go with every token would
        never run ahead of the device.
        """
        with self._changed:
            most = self.max_queued // 2 if self._full else self.max_queued - 1
            self._full = len(self._outputs) + num_in_flight > most and not self.unread
            return self._full

    def get(self, deadline: float | None, check_may_wait: Callable[[], None]) -> RequestOutput:
        """The oldest output. Host: blocks until there is one.

        Raises:
            StopIteration: There will be none.
            TimeoutError: The `deadline`, of `time.monotonic`, has passed.
            Exception: What the request ended with, once all outputs have been read.
        """
        with self._changed:
            while not self._ready:
                check_may_wait()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"Request {self.request_id!r} has not finished in time; it goes on."
                        " Wait longer, or abort() it."
                    )
                self._changed.wait(left)
            return self._take()

    async def get_async(self) -> RequestOutput:
        """The oldest output; the event loop runs on meanwhile.

        Raises:
            StopAsyncIteration: There will be none.
            Exception: As `get`.
        """
        loop = asyncio.get_running_loop()
        while True:
            # Taken under the same lock: another reader may take what is ready now.
            with self._changed:
                if self._ready:
                    try:
                        return self._take()
                    except StopIteration:
                        raise StopAsyncIteration from None
                future = loop.create_future()
                self._wakers.append(partial(_wake, loop, future))
            await future

    @property
    def _ready(self) -> bool:
        return bool(self._outputs or self._ended)

    def _take(self) -> RequestOutput:
        with self._changed:
            if not self._outputs:
                raise self._error or StopIteration
            output = self._outputs.popleft()
            if self._full and len(self._outputs) <= self.max_queued // 2:
                self._on_room()
            return output

    def _take_wakers(self) -> list[Callable[[], object]]:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        return wakers


def _raisable(error: Exception | None) -> Exception | None:
    """An error that an iterator can raise without seeming to have come to its end."""
    if not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    wrapped = RuntimeError(f"The request was ended by {error!r}.")
    wrapped.__cause__ = error
    return wrapped


def _call_all(wakers: list[Callable[[], object]]) -> None:
    for wake in wakers:
        wake()


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    def wake() -> None:
        if not future.done():
            future.set_result(None)

    try:
        loop.call_soon_threadsafe(wake)
    except RuntimeError:
        if not loop.is_closed():
            raise


class RequestStream(Iterator[RequestOutput], AsyncIterator[RequestOutput]):
    """The outputs of one request of a `DecodeEngine`, to iterate over with `for` or `async for`.

    All outputs come, in order, the last one with its finish reason. After one of `"error"` the
    iterator raises the cause, where it would have ended. A stream that is dropped, closed or
    cancelled while it waits aborts its request, as in vLLM. Any thread and any event loop may
    read; each output goes to one reader. To drop the stream of a request that has a callback is to
    leave it to the callback: it goes on, and nothing is queued.
    """

    def __init__(self, queue: OutputQueue, owner: Owner, keep_alive: object) -> None:
        self._queue = queue
        self._owner = owner
        self._keep_alive = keep_alive
        self._gathered: list[RequestOutput] = []
        self._last: RequestOutput | None = None
        # It may run inside any call of any thread: it must take no lock.
        self._finalizer = weakref.finalize(self, owner.abandon, queue)
        self._finalizer.atexit = False

    @property
    def request_id(self) -> str:
        return self._queue.request_id

    def __repr__(self) -> str:
        state = "ended" if self._queue.ended else "open"
        return f"<RequestStream {self.request_id!r}, {state}, {len(self._queue)} queued>"

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> RequestOutput:
        """Host: blocks until there is an output."""
        return self._note(self._queue.get(None, self._owner.check_may_wait))

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            return self._note(await self._queue.get_async())
        except (asyncio.CancelledError, GeneratorExit):
            self.close()
            raise

    def abort(self) -> bool:
        """End the request; False if it has ended. Host: returns at once.

        What has arrived can still be read, and then an output with finish reason `"abort"`. The id
        is free at once.
        """
        return self._owner.abort(self._queue)

    def close(self) -> None:
        """Abort the request if it has not ended, and forget what has not been read."""
        self._owner.abort(self._queue)
        self._queue.end(None, discard=True)

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """All that has not been read, as one output. Host: blocks until the request has ended.

        Raises:
            TimeoutError: It has not within `timeout` seconds; it goes on, nothing is lost.
            RuntimeError: The stream was closed.
            Exception: What the request ended with.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                output = self._queue.get(deadline, self._owner.check_may_wait)
            except StopIteration:
                return self._result()
            self._gathered.append(self._note(output))

    async def aresult(self) -> RequestOutput:
        """As `result`, without a time limit; the event loop runs on meanwhile."""
        async for output in self:
            self._gathered.append(output)
        return self._result()

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _note(self, output: RequestOutput) -> RequestOutput:
        if output.finished:
            self._last = output
        return output

    def _result(self) -> RequestOutput:
        if self._last is None:
            raise RuntimeError(f"The stream of request {self.request_id!r} was closed.")
        token_ids = [token for output in self._gathered for token in output.new_token_ids]
        text = "".join(output.text for output in self._gathered)
        logprobs = None
        if self._last.logprobs is not None:
            logprobs = tuple(each for output in self._gathered for each in output.logprobs or ())
        return replace(self._last, new_token_ids=tuple(token_ids), text=text, logprobs=logprobs)
