"""Outputs of a step, and the thread that reads them off the critical path.

The device-to-host copy is submitted when the output object is made: a copy stream waits for the
compute stream, the copy goes there without blocking, and an event marks its end. Whoever wants
the tokens, the output thread or the loop's own thread when it breaks the async flow, waits for
that event; the first one turns the copy into a value and every other gets the same.

Source: docs/async-decode.md, "The asynchronous step" and "Tensor-parallel ranks".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, Protocol, TypeAlias, cast

from neuron_streams.decode.future import Exclusive, Future
from neuron_streams.decode.logprobs import split, to_host
from neuron_streams.decode.model import Sampled
from neuron_streams.decode.request import RequestKey
from neuron_streams.decode.sampled import ModelRunnerOutput
from neuron_streams.decode.trace import StepRecord

__all__ = [
    "AsyncModelRunnerOutput",
    "EventLike",
    "OutputHandler",
    "StreamLike",
    "Streams",
    "resolve_streams",
]


class EventLike(Protocol):
    """What the loop uses of an event: the names are those of `torch.cuda.Event`."""

    def record(self, stream: Any = None, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class StreamLike(Protocol):
    """What the loop uses of a stream: the name is that of `torch.cuda.Stream`."""

    def wait_stream(self, stream: Any, /) -> None: ...


class Streams(Protocol):
    """What the loop uses of `neuron_streams`, or of `torch.cuda`."""

    @property
    def Stream(self) -> Callable[..., Any]: ...  # noqa: N802
    @property
    def Event(self) -> Callable[..., Any]: ...  # noqa: N802
    @property
    def stream(self) -> Callable[[Any], AbstractContextManager[Any]]: ...
    @property
    def current_stream(self) -> Callable[..., Any]: ...


def resolve_streams(streams: Streams | ModuleType | None) -> Streams:
    """The stream namespace to use: None is `neuron_streams`."""
    if streams is None:
        import neuron_streams

        streams = neuron_streams
    return cast("Streams", streams)


class AsyncModelRunnerOutput:
    """The tokens of a step that may still be running.

    Host: returns at once. Stream: the copy stream waits for the compute stream, which waits for
    nothing.

    Args:
        req_ids: Snapshot of the requests in row order; rows beyond them are padding.
        sampled: int32 [rows], a device tensor, with log-probabilities or without; all of it is
            copied, and kept until its copy has ended.
        compute_stream: The stream that produces it.
        copy_stream: The stream to copy it on.
        streams: The namespace that both belong to.
        partial: The requests of which this step computes a piece of the prompt and no token.
        num_logprobs: What each row wants of the log-probabilities, None for none.
        vocab_size: What every token is below.
    """

    def __init__(
        self,
        req_ids: list[RequestKey],
        sampled: Sampled,
        compute_stream: StreamLike,
        copy_stream: StreamLike,
        streams: Streams,
        partial: frozenset[RequestKey] = frozenset(),
        num_logprobs: Sequence[int | None] = (),
        vocab_size: int | None = None,
    ) -> None:
        self.req_ids = req_ids
        self.error: Exception | None = None
        self.record: StepRecord | None = None
        self._partial = partial
        self._num_logprobs = num_logprobs
        self._vocab_size = vocab_size
        self._streams = streams
        self._one_at_a_time = Exclusive()
        self._output: ModelRunnerOutput | None = None
        self._device_tokens: Sampled | None = sampled
        copy_stream.wait_stream(compute_stream)
        with streams.stream(copy_stream):
            self._host_tokens: Sampled | None = to_host(sampled, non_blocking=True)
        self._copied: EventLike = streams.Event(blocking=True)
        self._copied.record(copy_stream)

    @property
    def done(self) -> bool:
        """Whether the value, or the `error`, is there for `get_output` to give at once."""
        return self._output is not None or self.error is not None

    def ready(self) -> bool:
        """Whether `get_output` would not wait for the device. Host: returns at once."""
        return self.done or self._copied.query()

    def get_output(self) -> ModelRunnerOutput:
        """The step's tokens, or its failure: the same to every caller, from any thread.

        Host: blocks until the copy has ended.
        """
        return self._materialize()

    def retire(self) -> ModelRunnerOutput:
        """As `get_output`, for the runner's own write-back: nobody is handed the value."""
        return self._materialize()

    def _materialize(self) -> ModelRunnerOutput:
        self._one_at_a_time(self._read_once)
        if self.error is not None:
            raise self.error
        assert self._output is not None
        return self._output

    def _read_once(self) -> None:
        if not self.done:
            with nullcontext() if self.record is None else self.record.reading():
                self._read_copy()

    def _read_copy(self) -> None:
        assert self._device_tokens is not None
        tokens, error = self._host_tokens, self._wait()
        if error is not None:
            tokens, error = self._read_again(self._device_tokens, error)
        if tokens is not None:
            try:
                self._output = ModelRunnerOutput.from_host(
                    self.req_ids, tokens, self._partial, self._num_logprobs, self._vocab_size
                )
            except Exception as unreadable:
                error = unreadable
        self.error = error
        self._device_tokens = self._host_tokens = None

    def _wait(self) -> Exception | None:
        try:
            self._copied.synchronize()
        except Exception as error:
            if not self._copied.query():
                raise  # the waiting has failed, not the step
            return error
        return None

    def _read_again(
        self, sampled: Sampled, told: Exception
    ) -> tuple[Sampled | None, Exception | None]:
        """The tokens, or the step's own failure; what was `told` where nothing runs any more.

        An event tells of whatever failed before it on its stream, a read of the tensor only of what
        the tensor came from. On a fresh stream, since the others wait for later steps.
        """
        try:
            stream = self._streams.Stream(device=split(sampled)[0].device)
        except Exception:
            return None, told
        try:
            with self._streams.stream(stream):
                return to_host(sampled), None
        except Exception as error:
            return None, error


Pending: TypeAlias = tuple[AsyncModelRunnerOutput, "Future[ModelRunnerOutput]"]


class OutputHandler:
    """Reads outputs in the order in which they come, on a daemon thread or by hand.

    The thread starts with the first output and ends with `close`. A failure, of a step or of the
    thread's own, is the exception of the future that `handle_output` gave.

    Args:
        threaded: False leaves the reading to whoever calls `pump`.
    """

    def __init__(self, *, threaded: bool = True) -> None:
        self.async_output_queue: SimpleQueue[Pending | None] = SimpleQueue()
        self.threaded = threaded
        self._thread: threading.Thread | None = None

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, once it has started."""
        return self._thread

    def start(self) -> None:
        """Start the thread, unless it runs. It may be done again where it was interrupted.

        The thread of an attempt that was interrupted may run all the same: then two read.

        Raises:
            RuntimeError: The system has no thread to give.
        """
        if self.threaded and self._thread is None:
            thread = threading.Thread(
                target=self.async_output_busy_loop, name="neuron-streams-decode-output", daemon=True
            )
            thread.start()
            self._thread = thread

    def handle_output(
        self, output: ModelRunnerOutput | AsyncModelRunnerOutput
    ) -> Future[ModelRunnerOutput]:
        """Queue an output to be read; one that is there already comes back at once."""
        future: Future[ModelRunnerOutput] = Future()
        if isinstance(output, ModelRunnerOutput):
            future.set_result(output)
            return future
        self.start()
        self.async_output_queue.put((output, future))
        return future

    def async_output_busy_loop(self) -> None:
        """Read outputs until `close`. The body of the output thread."""
        while (pending := self.async_output_queue.get()) is not None:
            try:
                self.read(*pending)
            except BaseException as error:
                pending[1].set_exception(error)
            del pending  # or this frame would keep the last step's output alive
        self.async_output_queue.put(None)  # for another thread, where there is one

    def pump(self) -> bool:
        """Read the oldest queued output on this thread; False where none is queued.

        Host: blocks until that output's copy has ended.
        """
        try:
            pending = self.async_output_queue.get_nowait()
        except Empty:
            return False
        if pending is None:
            return False
        self.read(*pending)
        return True

    def read(self, output: AsyncModelRunnerOutput, future: Future[ModelRunnerOutput]) -> None:
        """Read an output on this thread. An interrupt leaves it to be read again.

        Host: blocks until the copy has ended.
        """
        try:
            future.set_result(output.get_output())
        except Exception as error:
            future.set_exception(error)

    def close(self, timeout: float | None = None) -> bool:
        """End the thread once it has read what is queued; False if it has not by `timeout`."""
        self.async_output_queue.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()
