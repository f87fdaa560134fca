"""The decode loop: schedules ahead, launches, and hands tokens out as each step's are read.

Source: the seed, "Async Scheduling and Async Execution"; `step_with_batch_queue` is its engine core
and `ModelRunner` its worker, here on one thread.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType

from neuron_streams.decode.model import Model
from neuron_streams.decode.output import ModelRunnerOutput, OutputHandler, Streams, resolve_streams
from neuron_streams.decode.request import RequestOutput, SamplingParams
from neuron_streams.decode.runner import ModelRunner
from neuron_streams.decode.scheduler import Scheduler, SchedulerOutput
from neuron_streams.decode.stats import DecodeStats
from neuron_streams.errors import UnsupportedError

__all__ = ["DecodeLoop"]

logger = logging.getLogger(__name__)


class DecodeLoop:
    """Generates for many requests at a time on one model.

    One thread drives it. It runs on the stream that is current when it is made.

    Args:
        model: What to run; see `Model`.
        streams: The stream namespace: None is `neuron_streams`; `torch.cuda` runs the same loop
            on a GPU.
        policy: What to do when the batch changes: `"materialize"` reads pending tokens on the
            critical path, as the seed does.
        depth: Steps scheduled before the oldest is waited for. In asynchronous mode only.
        async_scheduling: False waits for each step before the next is scheduled.
        output_thread: False leaves reading the outputs to `step` and `pump`, for tests that
            control every move.
        max_batch_size: Most requests that run at a time; the model's largest batch bucket if None.

    Raises:
        UnsupportedError: Another policy.
        ValueError: depth or max_batch_size below 1, or asynchronous with a model that does not
            sample on the device.
    """

    def __init__(
        self,
        model: Model,
        *,
        streams: Streams | ModuleType | None = None,
        policy: str = "materialize",
        depth: int = 2,
        async_scheduling: bool = True,
        output_thread: bool = True,
        max_batch_size: int | None = None,
    ) -> None:
        if policy != "materialize":
            raise UnsupportedError(
                f"DecodeLoop(policy={policy!r}): absent. Only 'materialize' is built; pass that."
            )
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be 1 or more.")
        self.stats = DecodeStats()
        self.max_concurrent_batches = depth if async_scheduling else 1
        self.scheduler = Scheduler(model, max_batch_size=max_batch_size, stats=self.stats)
        self.runner = ModelRunner(
            model,
            resolve_streams(streams),
            async_scheduling=async_scheduling,
            max_concurrent_batches=self.max_concurrent_batches,
            stats=self.stats,
        )
        self.output_handler = OutputHandler(threaded=output_thread)
        self.batch_queue: deque[tuple[Future[ModelRunnerOutput], SchedulerOutput]] = deque()
        self._undelivered: list[RequestOutput] = []
        self._failure: BaseException | None = None
        self._closed = False
        # A loop that is dropped unclosed must not leave its thread behind.
        weakref.finalize(self, self.output_handler.async_output_queue.put, None)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
    ) -> None:
        """Queue a request. Host: returns at once.

        Raises:
            ValueError: The id is in use, or the prompt is empty, too long or not of this model's
                vocabulary. Other requests go on.
        """
        self._check_open("add_request")
        self.scheduler.add_request(request_id, prompt_token_ids, sampling_params)

    def abort_request(self, request_id: str) -> bool:
        """End a request; False if none of that id is unfinished. Host: returns at once.

        The next `step` reports it with finish reason `"abort"`. Tokens still in flight are
        dropped, and the id may be used again at once.
        """
        output = self.scheduler.abort_request(request_id)
        if output is not None:
            self._undelivered.append(output)
        return output is not None

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do: requests, steps in flight, outputs to give."""
        return bool(self.scheduler.unfinished_request_ids or self.batch_queue or self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Launch a step if one is due, and give the tokens that have arrived, if any.

        Host: blocks for the oldest step once `depth` are in flight or nothing else can run.

        Raises:
            Exception: The first cause of a failure on the device, in the model or in the output
                thread. The loop has then ended: every later call raises the same.
        """
        self._check_open("step")
        with self.stats.stepping():
            self._undelivered += self.step_with_batch_queue()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def step_with_batch_queue(self) -> list[RequestOutput]:
        """Fill the batch queue, then block on its oldest step; a queue of one is synchronous."""
        if self._launch() and len(self.batch_queue) < self.max_concurrent_batches:
            return []
        return self._retire_oldest() if self.batch_queue else []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> Iterator[RequestOutput]:
        """Queue prompts and iterate over their outputs as the tokens arrive.

        Dropping the iterator, once it has begun, aborts what has not finished.

        Args:
            prompts: Token ids of each prompt.
            sampling_params: For all, or one for each.
            request_ids: An id for each; `"0"`, `"1"`, ... if None.

        Raises:
            ValueError: As `add_request`; none of the prompts is queued then.
        """
        ids = [str(n) for n in range(len(prompts))] if request_ids is None else list(request_ids)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: list[SamplingParams | None] = [sampling_params] * len(prompts)
        else:
            params = list(sampling_params)
        if not len(ids) == len(params) == len(prompts):
            raise ValueError(
                f"generate got {len(prompts)} prompts, {len(params)} sampling_params and"
                f" {len(ids)} request_ids; give one of each for every prompt."
            )
        self._add_all(ids, prompts, params)
        return self._outputs_of(set(ids))

    def pump(self) -> bool:
        """Read the oldest output that no one has read, on this thread; False if there is none.

        For `output_thread=False`. Host: blocks until that step has ended.
        """
        return self.output_handler.pump()

    def drain(self, timeout: float | None = None) -> list[RequestOutput]:
        """Wait until no step is in flight, launching none; unfinished requests may go on later.

        Returns:
            The outputs of the steps that were in flight.

        Raises:
            TimeoutError: A step has not ended within `timeout` seconds; it names the requests. What
                had arrived by then comes with the next `step` or `drain`.
        """
        self._check_open("drain")
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.batch_queue:
            if deadline is not None:
                self._wait_for_oldest(deadline)
            self._undelivered += self._retire_oldest()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def close(self, timeout: float = 10.0) -> tuple[str, ...]:
        """End the loop and its output thread; always returns, within about `timeout` seconds.

        Returns:
            The ids of the requests that had not finished; their last outputs are lost.
        """
        unfinished = self.scheduler.unfinished_request_ids
        if self._closed:
            return ()
        deadline = time.monotonic() + timeout
        readable = self.output_handler.threaded or all(step.done() for step, _ in self.batch_queue)
        try:
            if self._failure is None and readable:
                self.drain(timeout)
        except Exception as error:
            logger.warning("the decode loop was closed with steps in flight: %s", error)
        self._closed = True
        self.scheduler.fail_all()
        self.batch_queue.clear()
        if not self.output_handler.close(max(0.0, deadline - time.monotonic())):
            logger.warning("the output thread still waits for the device")
        return unfinished

    def __enter__(self) -> DecodeLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch(self) -> bool:
        # Once a step is scheduled it must run: an interrupt in between ends the loop too.
        with self._ending_on(BaseException):
            scheduler_output = self.scheduler.schedule()
            self.runner.execute_model(scheduler_output)
            if not scheduler_output.num_scheduled_tokens:
                return False
            future = self.output_handler.handle_output(self.runner.sample_tokens())
            self.batch_queue.append((future, scheduler_output))
            return True

    def _retire_oldest(self) -> list[RequestOutput]:
        future, scheduler_output = self.batch_queue[0]
        with self._ending_on(Exception):
            with self.stats.waiting():
                while not (self.output_handler.threaded or future.done()):
                    self.pump()
                output = future.result()
            self.batch_queue.popleft()
            return self.scheduler.update_from_output(scheduler_output, output)

    def _wait_for_oldest(self, deadline: float) -> None:
        future, scheduler_output = self.batch_queue[0]
        left = max(0.0, deadline - time.monotonic())
        if self.output_handler.threaded and concurrent.futures.wait([future], left).not_done:
            ids = ", ".join(repr(key.request_id) for key in scheduler_output.num_scheduled_tokens)
            raise TimeoutError(
                f"{len(self.batch_queue)} steps are in flight and the oldest has not ended; it is"
                f" of requests {ids}. Wait longer, or close() the loop."
            )

    @contextmanager
    def _ending_on(self, kind: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except kind as error:
            self._failure = error
            self.scheduler.fail_all()
            self.batch_queue.clear()
            raise

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: the decode loop is closed; make another.")
        if self._failure is not None:
            raise self._failure

    def _add_all(
        self,
        ids: Sequence[str],
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams | None],
    ) -> None:
        added = []
        try:
            for request_id, prompt, each in zip(ids, prompts, params, strict=True):
                self.add_request(request_id, prompt, each)
                added.append(request_id)
        except Exception:
            for request_id in added:
                self.scheduler.abort_request(request_id)
            raise

    def _outputs_of(self, ids: set[str]) -> Iterator[RequestOutput]:
        try:
            while ids and self.has_unfinished_requests():
                outputs = self.step()
                # Another iterator's, or the caller's own: left for their next step.
                self._undelivered += [out for out in outputs if out.request_id not in ids]
                for output in outputs:
                    if output.request_id in ids:
                        if output.finished:
                            ids.discard(output.request_id)
                        yield output
            if not self.scheduler.unfinished_request_ids:
                self._undelivered = self.drain()
        finally:
            for request_id in ids:
                self.scheduler.abort_request(request_id)
