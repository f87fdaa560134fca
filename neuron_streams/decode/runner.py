"""The model runner: one step from a schedule to a launched step, and the async flow between steps.

A step is: guard (compare the scheduled ids with the step before, ahead of any state change), update
states, prepare inputs from host state, decide whether the future of the step before is the next
input, launch, keep the sampled tokens as a future, snapshot the ids, refill the buffer.

Only the thread that calls `execute_model` writes the batch state. The output thread reads tokens
and caches them; their write-back waits for the next guard, in launch order.

Source: the seed, "Step-by-Step Flow" and "How Do We Break the Async Flow Safely?".
"""

from __future__ import annotations

import bisect
import logging
from collections import deque
from typing import NamedTuple, TypedDict

import torch

from neuron_streams.decode.batch import CachedRequestState, InputBatch
from neuron_streams.decode.model import Model, SamplingTensors
from neuron_streams.decode.output import AsyncModelRunnerOutput, ModelRunnerOutput, Streams
from neuron_streams.decode.request import RequestKey
from neuron_streams.decode.scheduler import SchedulerOutput
from neuron_streams.decode.stats import DecodeStats
from neuron_streams.errors import UnsupportedError

__all__ = ["AsyncExecutionBuffer", "ModelInput", "ModelRunner"]

logger = logging.getLogger(__name__)


class AsyncExecutionBuffer(TypedDict, total=False):
    """The bridge between consecutive steps; `async_output` is read only to break the flow."""

    futures_sampled_token_ids: torch.Tensor
    prev_req_ids_ordered: list[RequestKey]
    async_output: AsyncModelRunnerOutput


class ModelInput(NamedTuple):
    """Arguments of a step: `positions` are the lengths, and `sampling` is set, for a prefill."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sampling: SamplingTensors | None = None


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
        self.compute_stream = streams.current_stream(model.device)
        self.copy_stream = streams.Stream(device=model.device) if async_scheduling else None
        self.requests: dict[RequestKey, CachedRequestState] = {}
        rows = max(model.batch_buckets[-1], model.prefill_batch)
        self.input_batch = InputBatch(rows, model.max_length)
        self.async_execution_buffer: AsyncExecutionBuffer = {}
        self.execute_model_state: torch.Tensor | None = None
        self._max_pending = max_concurrent_batches
        self._pending_outputs: deque[AsyncModelRunnerOutput] = deque()
        self._batch_composition_changed = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Launch a step and keep what it will give in `execute_model_state`.

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
            self._write_back_materialized_outputs()
            self._check_batch_composition(scheduler_output)
        self._update_states(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            self.async_execution_buffer = {}
            return
        with self.streams.stream(self.compute_stream):
            model_input = self._prepare_model_input(scheduler_output)
            reason = None
            if self.use_async_scheduling:
                model_input, reason = self._swap_in_future(scheduler_output, model_input)
            self.execute_model_state = self._execute_model_forward(model_input)
        self.stats.count_launch(decode=model_input.sampling is None)
        if self.use_async_scheduling:
            self.stats.count_path(reason)

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
        sampled_token_ids, self.execute_model_state = self.execute_model_state, None
        return self._generate_model_runner_output(self._bookkeeping_sync(), sampled_token_ids)

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
            self.requests[new.key] = CachedRequestState(
                new.key, new.prompt_token_ids, new.params, new.seed, new.slot
            )
        for key in scheduled:
            state = self.requests[key]
            state.num_computed_tokens = scheduler_output.num_computed_tokens[key]
            if key not in self.input_batch.req_id_to_index:
                self.input_batch.add_request(state)
        self.input_batch.condense()

    def _is_decode(self) -> bool:
        return all(state.is_decode for state in self.input_batch.states)

    def _prepare_model_input(self, scheduler_output: SchedulerOutput) -> ModelInput:
        if self._is_decode():
            rows = _bucket(self.model.batch_buckets, self.input_batch.num_reqs)
            return ModelInput(*self.input_batch.decode_tensors(rows))
        lengths = [scheduler_output.num_scheduled_tokens[key] for key in self.input_batch.req_ids]
        width = _bucket(self.model.prompt_buckets, max(lengths))
        tensors = self.input_batch.prefill_tensors(lengths, width)
        return ModelInput(*tensors, self.input_batch.sampling_tensors())

    def _swap_in_future(
        self, scheduler_output: SchedulerOutput, model_input: ModelInput
    ) -> tuple[ModelInput, str | None]:
        """The input to launch, and the reason for which it is a fallback if it is one."""
        if not self._is_decode():
            return model_input, "prefill"
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

    def _maybe_remap_async_future(
        self, future: torch.Tensor, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, bool]:
        prev_req_ids = self.async_execution_buffer["prev_req_ids_ordered"]
        req_ids = self.input_batch.req_ids
        if req_ids == prev_req_ids:
            return future, False
        prev_row = {key: row for row, key in enumerate(prev_req_ids)}
        index = torch.arange(input_ids.shape[0], dtype=torch.int32)
        index[: len(req_ids)] = torch.tensor([prev_row[key] for key in req_ids])
        return self.model.remap(future, index), True

    def _execute_model_forward(self, model_input: ModelInput) -> torch.Tensor:
        input_ids, positions, slots, sampling = model_input
        if sampling is not None:
            sampled_token_ids = self.model.prefill(input_ids, positions, slots, sampling)
        else:
            sampled_token_ids = self.model.decode(input_ids, positions, slots)
        if self.use_async_scheduling:
            return sampled_token_ids
        with self.stats.waiting():
            return sampled_token_ids.to("cpu")

    def _bookkeeping_sync(self) -> list[RequestKey]:
        """Snapshot of the ids, so that the next step may change the batch."""
        return list(self.input_batch.req_ids)

    def _generate_model_runner_output(
        self, req_ids_output_copy: list[RequestKey], sampled_token_ids: torch.Tensor
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        if self.copy_stream is None:
            output = ModelRunnerOutput.from_host(req_ids_output_copy, sampled_token_ids)
            self._update_batch_state_with_samples(output)
            return output
        async_output = AsyncModelRunnerOutput(
            req_ids_output_copy,
            sampled_token_ids,
            self.compute_stream,
            self.copy_stream,
            self.streams,
        )
        self.async_execution_buffer = {
            "futures_sampled_token_ids": sampled_token_ids,
            "prev_req_ids_ordered": req_ids_output_copy,
            "async_output": async_output,
        }
        self._pending_outputs.append(async_output)
        return async_output

    def _write_back_materialized_outputs(self) -> None:
        while self._pending_outputs and self._may_retire(self._pending_outputs[0]):
            with self.stats.waiting():
                output = self._pending_outputs[0].retire()
            self._update_batch_state_with_samples(output)
            self._pending_outputs.popleft()

    def _may_retire(self, output: AsyncModelRunnerOutput) -> bool:
        if output.done or len(self._pending_outputs) >= self._max_pending:
            return True
        return not self.is_output_rank and output.ready()

    def _materialize_pending_async_output(self, reason: str) -> bool:
        """Bring the batch state up to date; whether there was a step to wait for.

        Older outputs go first, so every step's tokens are written once and in order.
        """
        async_output = self.async_execution_buffer.get("async_output")
        if async_output is None:
            return False
        logger.debug("materialize %d pending outputs: %s", len(self._pending_outputs), reason)
        while self._pending_outputs:
            with self.stats.waiting():
                output = self._pending_outputs[0].get_output()
            self._update_batch_state_with_samples(output)
            self._pending_outputs.popleft()
        return True

    def _update_batch_state_with_samples(self, output: ModelRunnerOutput) -> None:
        for key, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            state = self.requests.get(key)
            if state is not None:
                for token_id in token_ids:
                    self.input_batch.append_token(state, token_id)


def _bucket(buckets: tuple[int, ...], size: int) -> int:
    return buckets[bisect.bisect_left(buckets, size)]
