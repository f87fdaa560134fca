"""What all requests of a server share: the engine, and how many sequences may be in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from examples.serving.errors import ApiError
from examples.serving.metrics import Metrics
from examples.serving.tokens import Tokenizer
from neuron_streams.decode import (
    DecodeEngine,
    RequestMetrics,
    RequestOutput,
    RequestStream,
    SamplingParams,
)

__all__ = ["Door", "Sequences"]


class Sequences:
    """The sequences of one request, in the engine."""

    def __init__(self, metrics: Metrics) -> None:
        self.streams: list[RequestStream] = []
        self._metrics = metrics
        self._unfinished: set[str] = set()

    def add(self, stream: RequestStream) -> None:
        self.streams.append(stream)
        self._unfinished.add(stream.request_id)

    def note(self, output: RequestOutput) -> None:
        """Take note of an output that was read.

        Raises:
            ApiError: It is the end of an abort: the answer is not whole, and must not seem so.
        """
        if output.finish_reason is not None and output.finish_reason != "error":
            self._end(output.request_id, output.finish_reason, output.metrics)
        if output.finish_reason == "abort":
            raise ApiError(503, "The server is shutting down; try again.", code="shutting_down")

    def note_failure(self, stream: RequestStream) -> None:
        """Take note that reading the stream raised."""
        self._end(stream.request_id, "error")

    def abort(self) -> None:
        """End them; their readers are told."""
        for stream in self.streams:
            stream.abort()

    def close(self) -> None:
        """Abort what has not ended; nobody reads any more."""
        for stream in self.streams:
            stream.close()
        for request_id in tuple(self._unfinished):
            self._end(request_id, "abort")

    def _end(self, request_id: str, reason: str, times: RequestMetrics | None = None) -> None:
        self._unfinished.discard(request_id)
        self._metrics.count_end(reason, times)


class Door:
    """Lets requests into an engine, as many as there is room for.

    To be used on one event loop.

    Args:
        engine: Of a loop with this tokenizer.
        tokenizer: Of the model.
        model_name: Under which requests ask for it.
        max_sequences: Most sequences in the engine at a time, running and waiting.
    """

    def __init__(
        self, engine: DecodeEngine, tokenizer: Tokenizer, model_name: str, max_sequences: int = 256
    ) -> None:
        if max_sequences < 1:
            raise ValueError(f"max_sequences is {max_sequences}; it must be 1 or more.")
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_sequences = max_sequences
        self.metrics = Metrics(engine)
        self._taken = 0
        self._open: set[Sequences] = set()
        self._closed = False

    @property
    def num_sequences(self) -> int:
        return self._taken

    def check_model(self, name: str) -> None:
        """Refuse another model than this.

        Raises:
            ApiError: It is another.
        """
        if name != self.model_name:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist here; ask for {self.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Hold room for so many sequences.

        Raises:
            ApiError: There is none, now or ever.
        """
        if count > self.max_sequences:
            raise ApiError(
                400,
                f"The request asks for {count} sequences, prompts times n (or best_of); this server"
                f" takes {self.max_sequences} at a time. Split it.",
            )
        if self._closed or self._taken + count > self.max_sequences:
            raise ApiError(
                503,
                f"All of the server's {self.max_sequences} places are taken; try again later.",
                code="server_overloaded",
                headers={"retry-after": str(self.metrics.retry_after)},
            )
        self._take(count)
        try:
            yield
        finally:
            self._take(-count)

    @contextmanager
    def admit(
        self, name: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[Sequences]:
        """Add a sequence for each prompt and each of its params; they end with the context.

        Raises:
            ApiError: The loop refuses one; none of them runs then.
            Exception: What has ended the engine.
        """
        sequences = Sequences(self.metrics)
        self._open.add(sequences)
        try:
            self._add(sequences, name, prompts, params)
            if self._closed:
                sequences.abort()
            yield sequences
        finally:
            self._open.discard(sequences)
            sequences.close()

    def close(self) -> None:
        """Let nothing in any more, and abort what is there: each reader is told so."""
        self._closed = True
        for sequences in self._open:
            sequences.abort()

    def _add(
        self,
        sequences: Sequences,
        name: str,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
    ) -> None:
        for prompt in prompts:
            for each in params:
                request_id = f"{name}-{len(sequences.streams)}"
                try:
                    stream = self.engine.add_request(request_id, prompt, each)
                except ValueError as error:
                    raise ApiError(400, str(error)) from error
                sequences.add(stream)

    def _take(self, count: int) -> None:
        self._taken += count
        self.metrics.sequences.set(self._taken)
