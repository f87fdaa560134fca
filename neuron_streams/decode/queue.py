"""The batch queue: launched steps whose tokens have not been handed out, oldest first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from neuron_streams.decode.future import Future
from neuron_streams.decode.output import AsyncModelRunnerOutput, OutputHandler
from neuron_streams.decode.request import RequestKey
from neuron_streams.decode.sampled import ModelRunnerOutput
from neuron_streams.decode.schedule import SchedulerOutput
from neuron_streams.decode.stats import DecodeStats

__all__ = ["BatchQueue", "LaunchedStep"]

_POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way: `number` counts launched steps from 1, `launched_at` is perf_counter's."""

    number: int
    scheduler_output: SchedulerOutput
    output: ModelRunnerOutput | AsyncModelRunnerOutput
    future: Future[ModelRunnerOutput]
    launched_at: float

    def is_ready(self) -> bool:
        """Whether its tokens can be read without waiting for the device."""
        output = self.output
        return not isinstance(output, AsyncModelRunnerOutput) or output.ready()

    @property
    def awaited(self) -> AsyncModelRunnerOutput:
        """Its output, where that was not there when it was launched."""
        assert isinstance(self.output, AsyncModelRunnerOutput)
        return self.output

    def __str__(self) -> str:
        ids = ", ".join(repr(key.request_id) for key in self.scheduler_output.num_scheduled_tokens)
        return f"step {self.number}, of requests {ids}"


class BatchQueue:
    """A queue of launched steps; whoever waits for one waits here.

    Args:
        handler: Reads the outputs, on its thread or by hand.
        stats: Where waiting is counted.
        watchdog: Seconds after which a wait for one step gives up; None waits for ever.
    """

    def __init__(
        self, handler: OutputHandler, stats: DecodeStats, watchdog: float | None = None
    ) -> None:
        self._handler = handler
        self._stats = stats
        self._watchdog = watchdog
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[LaunchedStep]:
        return iter(self._steps)

    @property
    def newest_req_ids(self) -> Collection[RequestKey]:
        """The requests of the newest step in flight; none where no step is."""
        return self._steps[-1].scheduler_output.num_scheduled_tokens if self._steps else ()

    @property
    def may_be_read(self) -> bool:
        """Whether waiting is anybody's but the caller's own, or there is nothing to wait for."""
        return self._handler.threaded or all(step.future.done() for step in self._steps)

    def put(
        self,
        scheduler_output: SchedulerOutput,
        output: ModelRunnerOutput | AsyncModelRunnerOutput,
    ) -> None:
        """Append a step that has just been launched, and have its output read."""
        now = time.perf_counter()
        future = self._handler.handle_output(output)
        self._steps.append(LaunchedStep(self._stats.steps, scheduler_output, output, future, now))

    def oldest(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Wait for the oldest step, failed or not; it stays in the queue until `remove_oldest`.

        Host: blocks until the step's tokens are read.

        Raises:
            TimeoutError: The watchdog's; it names the step.
            Exception: The reader's own failure, not the step's.
        """
        step = self._steps[0]
        with self._stats.waiting():
            while not (self._handler.threaded or step.future.done()):
                if not self._handler.pump():  # an interrupted pump has taken it out of the queue
                    self._handler.read(step.awaited, step.future)
            self._watch(step)
            step.future.wait()
        return step.scheduler_output, _value_of(step)

    def remove_oldest(self) -> None:
        """Take the oldest step out, once its tokens have been handed out."""
        del self._steps[0]

    def before_read(self, output: AsyncModelRunnerOutput) -> None:
        """Wait for an output that the runner is about to read, for the watchdog's sake.

        Raises:
            TimeoutError: The watchdog's; it names the step.
        """
        if self._watchdog is not None:
            for step in self._steps:
                if step.output is output:
                    self._watch(step)

    def wait_for_oldest(self, deadline: float) -> None:
        """Wait for the oldest step until a moment of `time.monotonic`.

        Without an output thread its event is polled, since a wait for an event has no time limit.

        Raises:
            TimeoutError: It has not ended; it and those behind it are named.
        """
        step = self._steps[0]
        if self._handler.threaded:
            ended = step.future.wait(max(0.0, deadline - time.monotonic()))
        else:
            while not (ended := step.is_ready()) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        if not ended:
            raise TimeoutError(
                f"{len(self)} steps are in flight and the oldest has not ended; it is"
                f" {step}. Wait longer, or close() the loop."
            )

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def _watch(self, step: LaunchedStep) -> None:
        if self._watchdog is not None and not step.future.wait(self._watchdog):
            raise TimeoutError(
                f"The watchdog waited {self._watchdog} s for {step}, and it has not ended: the"
                " device hangs, or the watchdog is too short. The loop has ended; close() it."
            )


def _value_of(step: LaunchedStep) -> ModelRunnerOutput:
    error = step.future.exception()
    if error is None:
        return step.future.result()
    output = step.output
    if not isinstance(output, AsyncModelRunnerOutput) or output.error is not error:
        raise error
    return ModelRunnerOutput.of_failure(output.req_ids, output.error)
