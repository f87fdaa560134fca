"""The model runner: one step from a schedule to a launched step, and the async flow between steps.

A step is: guard (compare the scheduled ids with the step before, ahead of any state change), update
states, prepare inputs from host state, decide whether the future of the step before is the next
input, launch, keep the sampled tokens as a future, snapshot the ids, refill the buffer.

Only the thread that calls `execute_model` writes the batch state. The output thread reads tokens
and caches them; their write-back waits for the next guard, in launch order.

Source: docs/async-decode.md, "The asynchronous step", "The guard" and "The swap decision".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import cast

import torch

from neuron_streams.decode.batch import CachedRequestState, InputBatch, ModelInput, bucket_of
from neuron_streams.decode.launch import StepError, check_sampled, part_of_the_step
from neuron_streams.decode.logprobs import split, to_host, what_is_wanted
from neuron_streams.decode.model import (
    ChunkModel,
    Model,
    PackedModel,
    Sampled,
    WindowModel,
    WindowOutput,
)
from neuron_streams.decode.output import AsyncModelRunnerOutput, EventLike, Streams
from neuron_streams.decode.pending import AsyncExecutionBuffer, PendingOutputs
from neuron_streams.decode.request import RequestKey
from neuron_streams.decode.sampled import ModelRunnerOutput
from neuron_streams.decode.schedule import SchedulerOutput
from neuron_streams.decode.stats import DecodeStats
from neuron_streams.decode.trace import StepTrace
from neuron_streams.errors import UnsupportedError

__all__ = ["ModelRunner"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs steps on one model, on the stream that is current when it is made.

    Args:
        model: What to run.
        streams: The stream namespace, `neuron_streams` or `torch.cuda`.
        async_scheduling: False blocks in every step until its tokens are on the host.
        is_output_rank: False for a tensor-parallel rank whose outputs nobody reads: the runner
            retires them itself.
        max_concurrent_batches: Outputs that may be pending before a further step waits.
        stats: Where to count.
        before_read: Called before the runner waits for an output, to wait in a way of its own.

    Raises:
        ValueError: Asynchronous, and the model does not sample on the device.
    """

    def __init__(
        self,
        model: Model,
        streams: Streams,
        *,
        async_scheduling: bool = True,
        is_output_rank: bool = True,
        max_concurrent_batches: int = 2,
        stats: DecodeStats | None = None,
        before_read: Callable[[AsyncModelRunnerOutput], None] | None = None,
    ) -> None:
        if async_scheduling and not model.on_device_sampling:
            raise ValueError(
                "async_scheduling=True needs a model that samples on the device, since the next"
                " step takes the tokens from there; pass async_scheduling=False."
            )
        self.model = model
        self.streams = streams
        self.use_async_scheduling = async_scheduling
        self.is_output_rank = is_output_rank
        self.stats = stats or DecodeStats()
        self.trace: StepTrace | None = None
        self.compute_stream = streams.current_stream(model.device)
        self.copy_stream = streams.Stream(device=model.device) if async_scheduling else None
        self.requests: dict[RequestKey, CachedRequestState] = {}
        rows = max(model.batch_buckets[-1], model.prefill_batch)
        self.input_batch = InputBatch(rows, model.max_length, model.vocab_size, model.eos_token_ids)
        self.async_execution_buffer: AsyncExecutionBuffer = {}
        self.execute_model_state: Sampled | Exception | None = None
        self._pending_outputs = PendingOutputs(
            max_concurrent_batches, is_output_rank, self.stats, before_read
        )
        self._batch_composition_changed = False
        self._partial_req_ids: frozenset[RequestKey] = frozenset()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Launch a step and keep what it will give in `execute_model_state`.

        A step whose inputs cannot be built, or which the model refuses, fails as one that fails on
        the device: alone.

        An empty schedule launches nothing: it takes its finished requests in and flushes what is
        pending, and `sample_tokens` is not to be called.

        Host: returns at once while the flow is async; blocks for the steps before this one when it
        breaks, and for this one in synchronous mode.
        """
        if self.execute_model_state is not None:
            raise RuntimeError(
                "execute_model was called twice: call sample_tokens to take the step before."
            )
        if self.use_async_scheduling:
            for output in self._pending_outputs.retire_done():
                self._update_batch_state_with_samples(output)
            self._check_batch_composition(scheduler_output)
        self._update_states(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            self.async_execution_buffer = {}
            return
        try:
            with self.streams.stream(self.compute_stream):
                model_input = self._prepare_model_input(scheduler_output)
                reason = None
                if self.use_async_scheduling:
                    model_input, reason = self._swap_in_future(scheduler_output, model_input)
                self.execute_model_state = self._execute_model_forward(model_input)
        except StepError as failed:
            self._drop_future()
            self._check_device(failed)
            self.execute_model_state = failed.error
            return
        self._note_launch(scheduler_output)
        if self.use_async_scheduling:
            self.stats.count_path(reason)
        if self.trace is not None:
            self.trace.note_path(self._kind(scheduler_output), reason)

    def _kind(self, scheduler_output: SchedulerOutput) -> str:
        """What a trace shows of a step."""
        if self._is_decode():
            return "decode" if scheduler_output.num_steps == 1 else "window"
        if self.input_batch.decodes:
            return "mixed"
        pieces = scheduler_output.partial_req_ids or any(
            state.num_computed_tokens for state in self.input_batch.states
        )
        return "chunk" if pieces else "prefill"

    def _check_device(self, failed: StepError) -> None:
        """Raise the error of a step if the device takes no more work: no step can follow it."""
        try:
            self.streams.Event(enable_timing=True).record(self.compute_stream)
        except Exception:
            raise failed.error from failed

    def sample_tokens(
        self, grammar_output: None = None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Take the launched step's output; in asynchronous mode its tokens may still be coming.

        Host: returns at once.

        Raises:
            UnsupportedError: A grammar is given.
            RuntimeError: No step was launched.
        """
        if grammar_output is not None:
            raise UnsupportedError(
                "sample_tokens(grammar_output=...): absent. Tokens are sampled on the device, which"
                " knows no grammar; pass None."
            )
        if self.execute_model_state is None:
            raise RuntimeError("sample_tokens needs a launched step: call execute_model first.")
        sampled, self.execute_model_state = self.execute_model_state, None
        return self._generate_model_runner_output(self._bookkeeping_sync(), sampled)

    def _check_batch_composition(self, scheduler_output: SchedulerOutput) -> None:
        self._batch_composition_changed = False
        if not self.async_execution_buffer:
            return
        prev_req_ids = self.async_execution_buffer.get("prev_req_ids_ordered")
        if prev_req_ids is None or scheduler_output.num_scheduled_tokens.keys() != set(
            prev_req_ids
        ):
            self._materialize_pending_async_output("batch composition changed")
            self._batch_composition_changed = True

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        for key in scheduler_output.finished_req_ids:
            self.requests.pop(key, None)
        scheduled = scheduler_output.num_scheduled_tokens
        for key in self.input_batch.req_id_to_index.keys() - scheduled.keys():
            self.input_batch.remove_request(key)
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.key] = CachedRequestState.of(new)
        for key in scheduled:
            state = self.requests[key]
            state.num_computed_tokens = scheduler_output.num_computed_tokens[key]
            if key not in self.input_batch.req_id_to_index:
                self.input_batch.add_request(state)
        self.input_batch.condense()

    def _is_decode(self) -> bool:
        return all(state.is_decode for state in self.input_batch.states)

    @part_of_the_step()
    def _prepare_model_input(self, scheduler_output: SchedulerOutput) -> ModelInput:
        lengths = [scheduler_output.num_scheduled_tokens[key] for key in self.input_batch.req_ids]
        if hasattr(self.model, "packed") and not self._is_decode():
            return self.input_batch.packed_input(lengths)
        goes_on = any(state.num_computed_tokens for state in self.input_batch.states)
        # A model that cannot go on with a prompt is made to by decoding what the host knows.
        if goes_on and (self._is_decode() or not hasattr(self.model, "prefill_chunk")):
            rows = bucket_of(self.model.batch_buckets, len(lengths))
            model_input = self.input_batch.decode_input(rows)
            if scheduler_output.num_steps == 1:
                return model_input
            window = self.input_batch.window_of(lengths, rows, scheduler_output.num_steps)
            return model_input._replace(window=window)
        width = bucket_of(self.model.prompt_buckets, max(lengths))
        return self.input_batch.prefill_input(lengths, width)

    def _swap_in_future(
        self, scheduler_output: SchedulerOutput, model_input: ModelInput
    ) -> tuple[ModelInput, str | None]:
        """The input to launch, and the reason for which it is a fallback if it is one."""
        if not self._is_decode():
            return self._with_known_ids(scheduler_output, model_input)
        if not self.async_execution_buffer or self._batch_composition_changed:
            return model_input, "composition"
        future = self.async_execution_buffer["futures_sampled_token_ids"]
        host_ids = model_input.input_ids
        if future.shape[0] == host_ids.shape[0] and future.dtype == host_ids.dtype:
            input_ids, broke_async = self._maybe_remap_async_future(future, host_ids)
            return model_input._replace(input_ids=input_ids), "reorder" if broke_async else None
        mismatch = "shape" if future.shape[0] != host_ids.shape[0] else "dtype"
        if self._materialize_pending_async_output(f"async future {mismatch} mismatch"):
            model_input = self._prepare_model_input(scheduler_output)
        return model_input, mismatch

    def _with_known_ids(
        self, scheduler_output: SchedulerOutput, model_input: ModelInput
    ) -> tuple[ModelInput, str]:
        """As `_swap_in_future`, of a step that takes in prompts: its ids come from the host."""
        if not self.input_batch.decodes:
            return model_input, "prefill"
        if self._materialize_pending_async_output("prompts beside rows that decode"):
            model_input = self._prepare_model_input(scheduler_output)
        return model_input, "mixed"

    def _maybe_remap_async_future(
        self, future: torch.Tensor, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, bool]:
        prev_req_ids = self.async_execution_buffer["prev_req_ids_ordered"]
        req_ids = self.input_batch.req_ids
        if req_ids == prev_req_ids:
            return future, False
        prev_row = {key: row for row, key in enumerate(prev_req_ids)}
        index = torch.arange(input_ids.shape[0], dtype=torch.int32, device="cpu")
        rows = [prev_row[key] for key in req_ids]
        index[: len(rows)] = torch.tensor(rows, dtype=torch.int32, device="cpu")
        with part_of_the_step():
            return self.model.remap(future, index), True

    def _execute_model_forward(self, model_input: ModelInput) -> Sampled | Exception:
        start = self._mark()
        if self.trace is not None:
            self.trace.launching(start)
        called_at = time.perf_counter()
        sampled = self._call_model(model_input)
        waited = time.perf_counter() - called_at if start.query() else 0.0
        end = self._mark()
        self.stats.device_times.add(start, end, waited)
        if self.trace is not None:
            self.trace.launched(end)
        if self.use_async_scheduling:
            return sampled
        with self.stats.waiting():
            return self._read_now(sampled)

    @part_of_the_step()
    def _mark(self) -> EventLike:
        """An event with the time at which the compute stream gets here."""
        event: EventLike = self.streams.Event(enable_timing=True)
        event.record(self.compute_stream)
        return event

    @part_of_the_step()
    def _call_model(self, model_input: ModelInput) -> Sampled:
        input_ids, positions, slots, sampling, starts, window = model_input
        if window is not None:
            windowed = cast("WindowModel", self.model)
            sampled: Sampled = windowed.decode_window(input_ids, positions, slots, window)
        elif sampling is None:
            sampled = self._decode(input_ids, positions, slots)
        elif input_ids.dim() == 1:
            assert starts is not None
            packing = cast("PackedModel", self.model)
            sampled = packing.packed(input_ids, starts, positions, slots, sampling)
        elif starts is None:
            sampled = self.model.prefill(input_ids, positions, slots, sampling)
        else:
            model = cast("ChunkModel", self.model)
            sampled = model.prefill_chunk(input_ids, starts, positions, slots, sampling)
        num_steps = 1 if window is None else window.num_steps
        check_sampled(sampled, self.input_batch.num_reqs, num_steps)
        return sampled

    def _decode(
        self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Sampled:
        return self.model.decode(input_ids, positions, slots)

    def _read_now(self, sampled: Sampled) -> Sampled | Exception:
        launched = self.streams.Event()
        launched.record(self.compute_stream)
        try:
            return to_host(sampled)
        except Exception as error:
            if not launched.query():
                raise  # the waiting has failed, not the step
            return error

    def _note_launch(self, scheduler_output: SchedulerOutput) -> None:
        self.stats.count_launch(decode=self._is_decode())
        self._partial_req_ids = scheduler_output.partial_req_ids
        for key in scheduler_output.num_scheduled_tokens.keys() - self._partial_req_ids:
            state = self.requests[key]
            scheduled = scheduler_output.num_scheduled_tokens[key]
            state.sampled_position = state.num_computed_tokens + scheduled

    def _bookkeeping_sync(self) -> list[RequestKey]:
        """Snapshot of the ids, so that the next step may change the batch."""
        return list(self.input_batch.req_ids)

    def _generate_model_runner_output(
        self, req_ids_output_copy: list[RequestKey], sampled: Sampled | Exception
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        output = self._output_of(req_ids_output_copy, sampled)
        if isinstance(output, ModelRunnerOutput):
            self._update_batch_state_with_samples(output)
            return output
        assert not isinstance(sampled, Exception)
        self.async_execution_buffer = {
            "futures_sampled_token_ids": _last_tokens(sampled),
            "prev_req_ids_ordered": req_ids_output_copy,
            "async_output": output,
        }
        self._pending_outputs.append(output)
        return output

    def _output_of(
        self, req_ids: list[RequestKey], sampled: Sampled | Exception
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        error = sampled
        if not isinstance(sampled, Exception):
            try:
                return self._make_output(req_ids, sampled)
            except Exception as cause:
                self._drop_future()
                error = cause
        assert isinstance(error, Exception)
        if not self.is_output_rank:
            raise error  # nobody reads the output that would say so
        return ModelRunnerOutput.of_failure(req_ids, error)

    def _make_output(
        self, req_ids: list[RequestKey], sampled: Sampled
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        partial = self._partial_req_ids
        num_logprobs = self.input_batch.num_logprobs(partial)
        sampled = what_is_wanted(sampled, num_logprobs)
        if self.copy_stream is None:
            return ModelRunnerOutput.from_host(
                req_ids, sampled, partial, num_logprobs, self.model.vocab_size
            )
        return AsyncModelRunnerOutput(
            req_ids,
            sampled,
            self.compute_stream,
            self.copy_stream,
            self.streams,
            partial,
            num_logprobs,
            self.model.vocab_size,
        )

    def _drop_future(self) -> None:
        """After a step that has failed at once: the next one takes its tokens from the host."""
        self._materialize_pending_async_output("a launch failed")
        self.async_execution_buffer = {}

    def _materialize_pending_async_output(self, reason: str) -> bool:
        """Bring the batch state up to date, oldest first; whether there was a step to wait for."""
        async_output = self.async_execution_buffer.get("async_output")
        if async_output is None:
            return False
        logger.debug("materialize %d pending outputs: %s", len(self._pending_outputs), reason)
        for output in self._pending_outputs.retire_all():
            self._update_batch_state_with_samples(output)
        return True

    def _update_batch_state_with_samples(self, output: ModelRunnerOutput) -> None:
        for key, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            state = self.requests.get(key)
            if state is not None:
                state.ended |= output.error_of(key) is not None
                for token_id in token_ids:
                    self.input_batch.append_token(state, token_id)


def _last_tokens(sampled: Sampled) -> torch.Tensor:
    """What the next decode step takes in."""
    return sampled.last_token_ids if isinstance(sampled, WindowOutput) else split(sampled)[0]
