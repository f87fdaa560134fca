"""The decode loop: schedules ahead, launches, and hands tokens out as each step's are read.

Source: docs/async-decode.md, "Overview". vLLM's engine core is `step_with_batch_queue`, its worker
`ModelRunner`; here one thread drives both.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import ModuleType

from neuron_streams.decode.detokenizer import Tokenizer
from neuron_streams.decode.gather import GatherRunner
from neuron_streams.decode.generate import Generated, generate
from neuron_streams.decode.life import Life
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

    It runs on the stream that is current when it is made, and in the process in which it is made: a
    forked child gets a RuntimeError from every call.

    A KeyboardInterrupt may come at any time. A wait goes on at the next call, with nothing lost. In
    the middle of a change, such as a launch, it ends the loop: every later call says so, and
    `close` returns.

    Args:
        model: What to run; see `Model`.
        streams: The stream namespace: None is `neuron_streams`; `torch.cuda` runs the same loop
            on a GPU.
        policy: `"materialize"`: pending tokens are read when the batch changes.
            `"gather"`: they are not, the device takes each row's last token from a table of its
            own; for a model that has `decode_gather`. In asynchronous mode.
        depth: Steps scheduled before the oldest is waited for, in asynchronous mode. The batches
            are as full as in synchronous mode where the model has (depth - 1) * prefill_batch slots
            more than max_batch_size, since a request keeps its slot until its last step is read.
        async_scheduling: False waits for each step before the next is scheduled.
        output_thread: False leaves reading the outputs to `step` and `pump`, for tests.
        max_batch_size: Most requests of a step; the model's largest batch bucket if None.
        max_num_batched_tokens: Most tokens of a step while any request decodes, at least
            `max_batch_size`: longer prompts are cut to it, so that nobody waits long for their next
            token while others arrive. None for no bound. See `policy`.
        steps_per_launch: Decode steps of a launch where no request waits to join, for a model that
            has `decode_window`. What the host does for a launch is then hidden behind so many
            steps; in turn tokens come that many at a time, and a request that arrives waits for
            `depth * steps_per_launch` decode steps at most.
        watchdog: Seconds for which one step may be waited for; then the loop ends with a
            TimeoutError that names the step and its requests. None waits for ever.
        tokenizer: Gives the outputs their text, and is needed for stop strings: anything with
            `decode(token_ids) -> str`.

    Raises:
        UnsupportedError: policy="gather" and a model without `decode_gather`, or steps_per_launch
            above 1 and one without `decode_window`.
        ValueError: Another policy, depth or max_batch_size below 1, max_num_batched_tokens below
            the batch size, steps_per_launch of no size that the model takes, asynchronous with a
            model that does not sample on the device, or a watchdog with no output thread to watch.
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
        max_num_batched_tokens: int | None = None,
        steps_per_launch: int = 1,
        watchdog: float | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        _check_options(policy, depth, watchdog, async_scheduling and output_thread)
        self.stats = DecodeStats()
        self.max_concurrent_batches = depth if async_scheduling else 1
        self.scheduler = Scheduler(
            model,
            max_batch_size=max_batch_size,
            max_num_batched_tokens=max_num_batched_tokens,
            steps_per_launch=steps_per_launch,
            stats=self.stats,
            tokenizer=tokenizer,
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
        self._life = Life(self._release)
        self._generating: list[tuple[weakref.ref[Generated], set[str]]] = []
        self._unfinished: tuple[str, ...] | None = None
        self._has_been_closed = False
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
        self._begin("add_request")
        request = self.scheduler.make_request(
            request_id,
            prompt_token_ids,
            sampling_params,
            priority,
            on_output=on_output,
            arrived_at=arrived_at,
        )
        with self._life.changing("admitting a request"):
            if not (self.scheduler.has_work or self.batch_queue):
                self.stats.device_times.rest()
            self.scheduler.admit(request)

    def abort_request(self, request_id: str) -> bool:
        """End a request; False if none of that id is unfinished. Host: returns at once.

        The next `step` reports it with finish reason `"abort"`. Tokens still in flight are
        dropped, and the id may be used again at once.
        """
        return self._end_request(partial(self.scheduler.abort_request, request_id))

    def fail_request(self, request_id: str, error: Exception) -> bool:
        """As `abort_request`, with finish reason `"error"` and that cause."""
        return self._end_request(partial(self.scheduler.fail_request, request_id, error))

    def pause_request(self, request_id: str) -> bool:
        """Run no further step of a request; False if none of that id is unfinished.

        Tokens in flight still arrive. It keeps its slot until another request needs it, and after
        that computes its tokens again once it is resumed. Host: returns at once.
        """
        return self._set_paused(request_id, True)

    def resume_request(self, request_id: str) -> bool:
        """Undo a pause; False if no request of that id is unfinished. Host: returns at once."""
        return self._set_paused(request_id, False)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do: requests, steps in flight, outputs to give.

        A paused request alone gives it nothing to do.

        Raises:
            Exception: As `step`, where an interrupt has ended the loop.
        """
        self._life.process.check()
        if self._life.was_interrupted:
            self._life.check("has_unfinished_requests")
        self._abort_dropped()
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
        self._begin("step")
        self._advance()
        # No call may come between these two: an interrupt in it would lose the outputs.
        outputs, self._outbox.outputs = self._outbox.outputs, []
        return outputs

    def step_with_batch_queue(self) -> None:
        """Fill the batch queue, then block on its oldest step; a queue of one is synchronous."""
        if self._launch() and len(self.batch_queue) < self.max_concurrent_batches:
            return
        if self.batch_queue:
            self._retire_oldest()

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
        self._begin("generate")
        return generate(self, prompts, sampling_params, request_ids)

    def pump(self) -> bool:
        """Read the oldest output that no one has read, on this thread; False if there is none.

        For `output_thread=False`. Host: blocks until that step has ended.
        """
        self._life.process.check()
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
        self._begin("drain")
        self._flush(timeout)
        outputs, self._outbox.outputs = self._outbox.outputs, []
        return outputs

    def trace(self, max_steps: int = 1000) -> StepTrace:
        """A recorder of what each step does and when, while it is entered.

            with loop.trace() as trace:
                ...  # steps
            trace.save("trace.json")

        Args:
            max_steps: Steps that are kept; older ones are forgotten.

        Host: returns at once; entering it blocks until the loop's stream is idle.
        """
        self._life.process.check()
        return StepTrace(self.runner, max_steps)

    def close(self, timeout: float = 10.0) -> tuple[str, ...]:
        """End the loop and its output thread; always returns, within about `timeout` seconds.

        Returns:
            The ids of the requests that had not finished; their last outputs are lost.
        """
        self._life.process.check()
        if self._has_been_closed:
            return ()
        deadline = time.monotonic() + timeout
        # After an interrupt it is called again: it goes on where it was.
        if self._unfinished is None:
            self._unfinished = self.scheduler.unfinished_request_ids
        if self._life.goes_on and self.batch_queue.may_be_read:
            try:
                self._flush(timeout)
            except Exception as error:
                logger.warning("the decode loop was closed all the same after %r", error)
        self._life.closed = True
        while self._outbox.errors:
            logger.error(
                "a callback failed, and the loop was closed: %r", self._outbox.errors.popleft()
            )
        self._release()
        if not self.output_handler.close(max(0.0, deadline - time.monotonic())):
            logger.warning("the output thread still waits for the device")
        self._has_been_closed = True
        return self._unfinished

    def __enter__(self) -> DecodeLoop:
        return self

    def __exit__(self, *_: object) -> None:
        if self._life.process:
            self.close()

    def _begin(self, what: str) -> None:
        self._life.check(what)
        self._abort_dropped()

    def _advance(self) -> None:
        with self.stats.stepping():
            self.step_with_batch_queue()
            self._outbox.call_back(self.fail_request)
        self._outbox.raise_error()

    def _flush(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.batch_queue:
            if deadline is not None:
                self.batch_queue.wait_for_oldest(deadline)
            self._retire_oldest()
        self._outbox.call_back(self.fail_request)
        self._outbox.raise_error()

    def _launch(self) -> bool:
        # Before the change, since it is what may fail, or be interrupted, and be done again.
        if self.runner.use_async_scheduling and self.scheduler.has_work:
            self.output_handler.start()
        with self._life.changing("launching a step"):
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

    def _retire_oldest(self) -> None:
        with self._life.waiting():
            scheduler_output, output = self.batch_queue.oldest()
        trace = self.runner.trace
        updating = nullcontext() if trace is None else trace.updating(scheduler_output)
        # A step of which some requests have heard and some not cannot be handed out again.
        with self._life.changing("handing out a step's tokens"), updating:
            self._life.step_error = output.error
            self._outbox.outputs += self.scheduler.update_from_output(scheduler_output, output)
            self.batch_queue.remove_oldest()
        if output.error is not None:
            logger.error("a step failed, and its requests with it: %r", output.error)

    def _end_request(self, end: Callable[[], RequestOutput | None]) -> bool:
        self._life.process.check()
        if not self._life.goes_on:
            return False
        with self._life.changing("ending a request"):
            output = end()
            if output is not None:
                self._outbox.outputs.append(output)
        return output is not None

    def _set_paused(self, request_id: str, paused: bool) -> bool:
        self._life.process.check()
        if not self._life.goes_on:
            return False
        with self._life.changing("pausing or resuming a request"):
            if paused:
                return self.scheduler.pause_request(request_id)
            return self.scheduler.resume_request(request_id)

    def _abort_dropped(self) -> None:
        """Abort the requests of iterators that are no more.

        Looked for here, since a destructor runs anywhere, even in the middle of a change, and what
        interrupts it is swallowed.
        """
        for entry in tuple(self._generating):
            iterator, request_ids = entry
            if iterator() is None:
                self._abort_silently(request_ids)
                self._generating.remove(entry)

    def _abort_silently(self, request_ids: Collection[str]) -> None:
        """Abort requests whose outputs no iterator will ask for."""
        if not self._life.goes_on:
            return
        with self._life.changing("aborting requests"):
            for request_id in request_ids:
                self.scheduler.abort_request(request_id)
            outputs = self._outbox.outputs
            outputs[:] = [out for out in outputs if out.request_id not in request_ids]

    def _release(self) -> None:
        """Forget all requests and steps, whatever state they are in."""
        self.scheduler.fail_all()
        self.batch_queue.clear()


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
