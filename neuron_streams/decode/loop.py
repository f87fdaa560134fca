"""The decode loop: schedules ahead, launches, and hands tokens out as each step's are read.

Source: the seed, "Async Scheduling and Async Execution"; `step_with_batch_queue` is its engine core
and `ModelRunner` its worker, here on one thread.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType

from neuron_streams.decode.detokenizer import Tokenizer
from neuron_streams.decode.gather import GatherRunner
from neuron_streams.decode.generate import generate
from neuron_streams.decode.model import Model
from neuron_streams.decode.outbox import Outbox
from neuron_streams.decode.output import OutputHandler, Streams, resolve_streams
from neuron_streams.decode.queue import BatchQueue
from neuron_streams.decode.request import RequestOutput
from neuron_streams.decode.runner import ModelRunner
from neuron_streams.decode.sampling_params import SamplingParams
from neuron_streams.decode.scheduler import Scheduler
from neuron_streams.decode.stats import DecodeStats
from neuron_streams.decode.trace import StepTrace

__all__ = ["DecodeLoop"]

logger = logging.getLogger(__name__)


class DecodeLoop:
    """Generates for many requests at a time on one model, driven by one thread.

    It runs on the stream that is current when it is made.

    Args:
        model: What to run; see `Model`.
        streams: The stream namespace: None is `neuron_streams`; `torch.cuda` runs the same loop
            on a GPU.
        policy: `"materialize"`, as the seed: pending tokens are read when the batch changes.
            `"gather"`: they are not, the device takes each row's last token from a table of its
            own; for a model that has `decode_gather`. In asynchronous mode.
        depth: Steps scheduled before the oldest is waited for, in asynchronous mode. The batches
            are as full as in synchronous mode where the model has (depth - 1) * prefill_batch slots
            more than max_batch_size, since a request keeps its slot until its last step is read.
        async_scheduling: False waits for each step before the next is scheduled.
        output_thread: False leaves reading the outputs to `step` and `pump`, for tests.
        max_batch_size: Most requests of a step; the model's largest batch bucket if None.
        watchdog: Seconds for which one step may be waited for; then the loop ends with a
            TimeoutError that names the step and its requests. None waits for ever.
        tokenizer: Gives the outputs their text, and is needed for stop strings: anything with
            `decode(token_ids) -> str`.

    Raises:
        UnsupportedError: policy="gather" and a model without `decode_gather`.
        ValueError: Another policy, depth or max_batch_size below 1, asynchronous with a model that
            does not sample on the device, or a watchdog with no output thread to watch.
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
        watchdog: float | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        _check_options(policy, depth, watchdog, async_scheduling and output_thread)
        self.stats = DecodeStats()
        self.max_concurrent_batches = depth if async_scheduling else 1
        self.scheduler = Scheduler(
            model, max_batch_size=max_batch_size, stats=self.stats, tokenizer=tokenizer
        )
        self.output_handler = OutputHandler(threaded=output_thread)
        self.batch_queue = BatchQueue(self.output_handler, self.stats, watchdog)
        runner = GatherRunner if policy == "gather" and async_scheduling else ModelRunner
        self.runner = runner(
            model,
            resolve_streams(streams),
            async_scheduling=async_scheduling,
            max_concurrent_batches=self.max_concurrent_batches,
            stats=self.stats,
            before_read=self.batch_queue.before_read,
        )
        self._outbox = Outbox(self.scheduler.to_call_back)
        self._failure: BaseException | None = None
        self._step_error: Exception | None = None
        self._closed = False
        # A loop that is dropped unclosed must not leave its thread behind.
        weakref.finalize(self, self.output_handler.async_output_queue.put, None)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: float = 0,
        on_output: Callable[[RequestOutput], object] | None = None,
        arrived_at: float | None = None,
    ) -> None:
        """Queue a request; a lower `priority` is more urgent. Host: returns at once.

        An urgent request may take the slot of one that is less urgent, which then computes its
        tokens again when its turn comes, and goes on with the same tokens.

        Args:
            request_id: Its name, of no other unfinished request.
            prompt_token_ids: Its prompt.
            sampling_params: How to choose tokens, and when to stop.
            priority: Lower is more urgent.
            on_output: Called with each output of this request, in order, by the `step` or `drain`
                that returns it. It may add, abort and pause requests. If it raises, it is called no
                more, the request ends with finish reason `"error"` and that cause, and `step`
                raises the same, with all its outputs kept for the next one.
            arrived_at: When its caller asked, of `time.perf_counter`; now if None.

        Raises:
            ValueError: The id is in use, the prompt is empty, too long or not of this model's
                vocabulary, the model cannot honour the parameters, or there are stop strings and
                no tokenizer. Other requests go on.
        """
        self._check_open("add_request")
        self.scheduler.add_request(
            request_id,
            prompt_token_ids,
            sampling_params,
            priority,
            on_output=on_output,
            arrived_at=arrived_at,
        )

    def abort_request(self, request_id: str) -> bool:
        """End a request; False if none of that id is unfinished. Host: returns at once.

        The next `step` reports it with finish reason `"abort"`. Tokens still in flight are
        dropped, and the id may be used again at once.
        """
        output = self.scheduler.abort_request(request_id)
        if output is not None:
            self._outbox.outputs.append(output)
        return output is not None

    def fail_request(self, request_id: str, error: Exception) -> bool:
        """As `abort_request`, with finish reason `"error"` and that cause."""
        output = self.scheduler.fail_request(request_id, error)
        if output is not None:
            self._outbox.outputs.append(output)
        return output is not None

    def pause_request(self, request_id: str) -> bool:
        """Run no further step of a request; False if none of that id is unfinished.

        Tokens in flight still arrive. It keeps its slot until another request needs it, and after
        that computes its tokens again once it is resumed. Host: returns at once.
        """
        return self.scheduler.pause_request(request_id)

    def resume_request(self, request_id: str) -> bool:
        """Undo a pause; False if no request of that id is unfinished. Host: returns at once."""
        return self.scheduler.resume_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do: requests, steps in flight, outputs to give.

        A paused request alone gives it nothing to do.
        """
        return bool(self.scheduler.has_work or self.batch_queue or self._outbox)

    def step(self) -> list[RequestOutput]:
        """Launch a step if one is due, and give the tokens that have arrived, if any.

        A step that fails, at its launch or on the device, ends its own requests with finish reason
        `"error"` and the cause as `error`; the others go on.

        Host: blocks for the oldest step once `depth` are in flight or nothing else can run.

        Raises:
            Exception: The first cause of a failure after which nothing can go on: the stream cannot
                be entered or waited for, the output thread failed, the watchdog gave up. The loop
                has then ended: every later call raises the same.
            Exception: What an `on_output` raised; the loop goes on. One for each call.
        """
        self._check_open("step")
        with self.stats.stepping():
            self._outbox.outputs += self.step_with_batch_queue()
            self._outbox.call_back(self.fail_request)
        return self._outbox.take()

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

        Dropping the iterator, once it has begun, aborts what has not finished. It ends, and aborts
        nothing, where all of its prompts that have not finished are paused and have no step in
        flight, whatever other requests do.

        Args:
            prompts: Token ids of each prompt.
            sampling_params: For all, or one for each.
            request_ids: An id for each; `"0"`, `"1"`, ... if None.

        Raises:
            ValueError: As `add_request`; none of the prompts is queued then.
        """
        return generate(self, prompts, sampling_params, request_ids)

    def pump(self) -> bool:
        """Read the oldest output that no one has read, on this thread; False if there is none.

        For `output_thread=False`. Host: blocks until that step has ended.
        """
        return self.output_handler.pump()

    def drain(self, timeout: float | None = None) -> list[RequestOutput]:
        """Wait until no step is in flight, launching none; unfinished requests may go on later.

        Args:
            timeout: Seconds; None waits without a limit. With `output_thread=False` the device is
                only asked meanwhile whether it has got there: one that is stepped by hand has to be
                stepped before, or by another thread.

        Returns:
            The outputs of the steps that were in flight.

        Raises:
            TimeoutError: A step has not ended within `timeout` seconds; it names the requests. What
                had arrived by then comes with the next `step` or `drain`.
            Exception: As `step`.
        """
        self._check_open("drain")
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.batch_queue:
            if deadline is not None:
                self.batch_queue.wait_for_oldest(deadline)
            self._outbox.outputs += self._retire_oldest()
        self._outbox.call_back(self.fail_request)
        return self._outbox.take()

    def trace(self, max_steps: int = 1000) -> StepTrace:
        """A recorder of what each step does and when, while it is entered.

            with loop.trace() as trace:
                ...  # steps
            trace.save("trace.json")

        Args:
            max_steps: Steps that are kept; older ones are forgotten.

        Host: returns at once; entering it blocks until the loop's stream is idle.
        """
        return StepTrace(self.runner, max_steps)

    def close(self, timeout: float = 10.0) -> tuple[str, ...]:
        """End the loop and its output thread; always returns, within about `timeout` seconds.

        Returns:
            The ids of the requests that had not finished; their last outputs are lost.
        """
        if self._closed:
            return ()
        unfinished = self.scheduler.unfinished_request_ids
        deadline = time.monotonic() + timeout
        try:
            if self._failure is None and self.batch_queue.may_be_read:
                self.drain(timeout)
        except Exception as error:
            logger.warning("the decode loop was closed all the same after %r", error)
        self._closed = True
        for untold in self._outbox.errors:
            logger.error("a callback failed, and the loop was closed: %r", untold)
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
            trace = self.runner.trace
            if trace is not None:
                trace.begin()
            scheduler_output = self.scheduler.schedule()
            if trace is not None:
                trace.scheduled()
            self.runner.execute_model(scheduler_output)
            if not scheduler_output.num_scheduled_tokens:
                return False
            output = self.runner.sample_tokens()
            if trace is not None:
                trace.end(scheduler_output, output)
            self.batch_queue.put(scheduler_output, output)
            return True

    def _retire_oldest(self) -> list[RequestOutput]:
        with self._ending_on(Exception):
            scheduler_output, output = self.batch_queue.take_oldest()
            if output.error is not None:
                logger.error("a step failed, and its requests with it: %r", output.error)
            self._step_error = output.error
        # A step of which some requests have heard and some not cannot be taken again.
        trace = self.runner.trace
        updating = nullcontext() if trace is None else trace.updating(scheduler_output)
        with self._ending_on(BaseException), updating:
            return self.scheduler.update_from_output(scheduler_output, output)

    @contextmanager
    def _ending_on(self, kind: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except kind as error:
            # What the device refuses after a failed step, it refuses because of that.
            self._failure = self._step_error or error
            self.scheduler.fail_all()
            self.batch_queue.clear()
            if self._failure is error:
                raise
            raise self._failure from error

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: the decode loop is closed; make another.")
        if self._failure is not None:
            raise self._failure


def _check_options(policy: str, depth: int, watchdog: float | None, has_thread: bool) -> None:
    if policy not in ("materialize", "gather"):
        raise ValueError(f"policy is {policy!r}; choose 'materialize' or 'gather'.")
    if depth < 1:
        raise ValueError(f"depth is {depth}; it must be 1 or more.")
    if watchdog is not None and not has_thread:
        raise ValueError(
            "watchdog needs the output thread, since it is the thread's waiting that is watched;"
            " leave async_scheduling and output_thread True, or pass no watchdog."
        )
