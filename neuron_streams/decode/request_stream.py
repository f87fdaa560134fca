"""One request's outputs on their way from the thread that drives to whoever reads them.

The driving thread never waits here: it puts, and asks beforehand whether there is room, so that a
slow reader pauses its own request and nobody else's.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from neuron_streams._exit import LastWait, main_thread_has_ended
from neuron_streams.decode import coerce
from neuron_streams.decode.life import OwnProcess
from neuron_streams.decode.request import RequestOutput

__all__ = ["OutputQueue", "RequestStream"]


_LOOK_SECONDS = 0.5  # between two looks at whether the main thread has ended


class Owner(Protocol):
    """What a stream uses of the engine that gave it."""

    process: OwnProcess

    def abort(self, queue: OutputQueue) -> bool: ...
    def abandon(self, queue: OutputQueue) -> None: ...
    def check_may_wait(self) -> None: ...
    def is_held(self, queue: OutputQueue) -> bool: ...
    def device_is_held(self) -> bool: ...


class OutputQueue:
    """A queue that knows when it is full and when it has ended. Any thread may use it.

    An output stays in `outputs` until its reader deletes it there, as the last thing before it is
    returned: so one whose reader is interrupted is not lost, and of several readers the one whose
    `del` finds it has it. There is no lock, which an interrupted reader might leave held.

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
        self.asked_to_pause = False
        self.outputs: dict[int, RequestOutput] = {}
        self._num_put = 0
        self._num_claimed = 0
        self._oldest = 0
        self._on_room = on_room
        self._wakers: set[Callable[[], object]] = set()
        self._full = False
        self._ends: list[Exception | None] = []  # the first one counts
        self._discarded = False

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def abandoned(self) -> bool:
        """Whether nobody wants its request any more."""
        return self.unread and not self.has_callback

    @property
    def ended(self) -> bool:
        """Whether nothing more will be put."""
        return bool(self._ends)

    def put(self, output: RequestOutput, error: Exception | None = None) -> None:
        """Append an output; `error`, or the output's own, is what a last one ends with."""
        if self._ends:
            return
        if not self.unread:
            self.outputs[self._num_put] = output
            self._num_put += 1
        if output.finished:
            self._ends.append(_raisable(error or output.error))
        self._wake_readers()

    def end(self, error: Exception | None, *, discard: bool = False) -> None:
        """Let no more be put; who has read what is there, unless discarded, gets the error."""
        self._ends.append(error)
        if discard:
            self._discarded = True
            self.outputs.clear()
        self._wake_readers()

    def hold(self, num_in_flight: int) -> bool:
        """Whether there is no room for one output more than are in flight.

        Once full it is so until half is free: a batch whose rows come and go with every token would
        never run ahead of the device.
        """
        most = self.max_queued // 2 if self._full else self.max_queued - 1
        self._full = self._num_unclaimed + num_in_flight > most and not self.unread
        return self._full

    def first(self, deadline: float | None, owner: Owner) -> tuple[int, RequestOutput]:
        """The oldest output and its number. Host: blocks until there is one.

        Raises:
            StopIteration: There will be none.
            TimeoutError: The `deadline`, of `time.monotonic`, has passed.
            RuntimeError: The main thread has ended, and nothing can end this wait any more.
            Exception: What the request ended with, once all outputs have been read.
        """
        found = self._look(StopIteration)
        if found is None:
            with self._last_wait(deadline, owner) as last:
                while (found := self._look(StopIteration)) is None:
                    owner.check_may_wait()
                    if main_thread_has_ended() and last.in_vain():
                        raise RuntimeError(
                            f"The main thread has ended, request {self.request_id!r} is paused or"
                            " the device held up, and no thread is left that could change that;"
                            " the wait is given up so that the process can end."
                        )
                    self._wait(deadline)
        return found

    def _wait(self, deadline: float | None) -> None:
        """Wait for a moment, or less where something comes."""
        left = math.inf if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"Request {self.request_id!r} has not finished in time; it goes on."
                " Wait longer, or abort() it."
            )
        signal: SimpleQueue[None] = SimpleQueue()
        waker = partial(signal.put, None)
        self._wakers.add(waker)
        if not self._ready:  # or something has come before the waker was there
            with suppress(Empty):
                signal.get(timeout=min(left, _LOOK_SECONDS))
        self._wakers.discard(waker)

    def _last_wait(self, deadline: float | None, owner: Owner) -> LastWait:
        if deadline is not None:  # which ends it
            return LastWait(bool)
        return LastWait(
            lambda: owner.is_held(self) and not self._ready,
            lambda: owner.device_is_held() and not self._ready,
        )

    async def first_async(self) -> tuple[int, RequestOutput]:
        """The oldest output and its number; the event loop runs on meanwhile.

        Raises:
            StopAsyncIteration: There will be none.
            Exception: As `first`.
        """
        loop = asyncio.get_running_loop()
        while (found := self._look(StopAsyncIteration)) is None:
            future = loop.create_future()
            waker = partial(_wake, loop, future)
            self._wakers.add(waker)
            try:
                if not self._ready:
                    await future
            finally:
                self._wakers.discard(waker)
        return found

    def claim(self, number: int) -> None:
        """Count an output as read, just before it is deleted from `outputs`."""
        self._num_claimed = max(self._num_claimed, number + 1)
        if self._full and self._num_unclaimed <= self.max_queued // 2:
            self._on_room()

    @property
    def _num_unclaimed(self) -> int:
        return self._num_put - self._num_claimed

    @property
    def _ready(self) -> bool:
        return bool(self.outputs or self._ends)

    def _look(self, end: type[Exception]) -> tuple[int, RequestOutput] | None:
        ended = self.ended  # asked before the last output is looked for, which is put before
        if self._discarded:
            raise end
        number = self._oldest
        while number < self._num_put:
            output = self.outputs.get(number)
            if output is not None:
                return number, output
            number += 1
            self._oldest = number
        if ended:
            raise self._ends[0] or end
        return None

    def _wake_readers(self) -> None:
        for waker in tuple(self._wakers):
            waker()
            self._wakers.discard(waker)


def _raisable(error: Exception | None) -> Exception | None:
    """An error that an iterator can raise without seeming to have come to its end."""
    if not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    wrapped = RuntimeError(f"The request was ended by {error!r}.")
    wrapped.__cause__ = error
    return wrapped


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
        self._gathered: dict[int, RequestOutput] = {}
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
        self._owner.process.check()
        while True:
            number, output = self._queue.first(None, self._owner)
            self._note(number, output)
            try:
                # No call may come between these two: an interrupt in it would lose the output.
                del self._queue.outputs[number]
                return output
            except KeyError:
                pass  # another reader has it

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        self._owner.process.check()
        while True:
            number, output = await self._first_async()
            self._note(number, output)
            try:
                del self._queue.outputs[number]
                return output
            except KeyError:
                pass

    def abort(self) -> bool:
        """End the request; False if it has ended. Host: returns at once.

        What has arrived can still be read, and then an output with finish reason `"abort"`. The id
        is free at once.
        """
        self._owner.process.check()
        return self._owner.abort(self._queue)

    def close(self) -> None:
        """Abort the request if it has not ended, and forget what has not been read."""
        self.abort()
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
        self._owner.process.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                number, output = self._queue.first(deadline, self._owner)
            except StopIteration:
                return self._result()
            self._gather(number, output)

    async def aresult(self) -> RequestOutput:
        """As `result`, without a time limit; the event loop runs on meanwhile."""
        self._owner.process.check()
        while True:
            try:
                number, output = await self._first_async()
            except StopAsyncIteration:
                return self._result()
            self._gather(number, output)

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owner.process:
            self.close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    async def _first_async(self) -> tuple[int, RequestOutput]:
        try:
            return await self._queue.first_async()
        except (asyncio.CancelledError, GeneratorExit):
            self.close()
            raise

    def _note(self, number: int, output: RequestOutput) -> None:
        if output.finished:
            self._last = output
        self._queue.claim(number)

    def _gather(self, number: int, output: RequestOutput) -> None:
        self._note(number, output)
        self._gathered[number] = output
        try:
            del self._queue.outputs[number]
        except KeyError:
            del self._gathered[number]

    def _result(self) -> RequestOutput:
        if self._last is None:
            raise RuntimeError(f"The stream of request {self.request_id!r} was closed.")
        gathered = self._gathered.values()
        token_ids = [token for output in gathered for token in output.new_token_ids]
        text = "".join(output.text for output in gathered)
        logprobs = None
        if self._last.logprobs is not None:
            logprobs = tuple(each for output in gathered for each in output.logprobs or ())
        return replace(self._last, new_token_ids=tuple(token_ids), text=text, logprobs=logprobs)
