"""The scheduler: who runs in the next step, and who holds which slot.

It runs ahead of the device and cannot tell the modes apart: counts advance when a step is
scheduled, and come back when its output does. Every limit is tested on generated plus in flight,
so a request whose last token is in flight leaves the schedule, and its row to another, one step
before it is reported finished, and no step past `max_tokens` is launched.

Source: docs/async-decode.md, "The synchronous step" and "Breaking the flow"; the names are vLLM's.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from neuron_streams.decode import coerce
from neuron_streams.decode.admission import AdmittedRequest, check_request
from neuron_streams.decode.capacity import Capacity
from neuron_streams.decode.detokenizer import IncrementalDetokenizer, Tokenizer, check_tokenizer
from neuron_streams.decode.logprobs import TokenLogprobs
from neuron_streams.decode.model import Model
from neuron_streams.decode.policy import StepPolicy
from neuron_streams.decode.request import (
    Request,
    RequestKey,
    RequestOutput,
    RequestStatus,
)
from neuron_streams.decode.sampled import ModelRunnerOutput
from neuron_streams.decode.sampling_params import SamplingParams
from neuron_streams.decode.schedule import NewRequestData, SchedulerOutput
from neuron_streams.decode.stats import DecodeStats

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching; `policy` says what a step computes of those that hold rows.

    The most urgent goes first, among equals the first to come. A request that finds no free slot
    takes that of a paused one, or of a running one that is less urgent: the newest of the least
    urgent is preempted, and prefills all its tokens again when its turn comes.

    Args:
        model: Gives the limits: slots, buckets, lengths.
        max_batch_size: Most requests in a step; None and anything above the largest batch bucket
            mean that bucket.
        max_num_batched_tokens: Most tokens of a step while any request decodes; None for no bound.
        steps_per_launch: Most decode steps of a launch.
        stats: Where dropped and generated tokens, preemptions and latencies are counted.
        tokenizer: Gives the outputs their text; None for none, and no stop strings.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch_size: int | None = None,
        max_num_batched_tokens: int | None = None,
        steps_per_launch: int = 1,
        stats: DecodeStats | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        largest = model.batch_buckets[-1]
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}; it must be 1 or more.")
        check_tokenizer(tokenizer)
        rows = min(max_batch_size or largest, largest)
        self.capacity = Capacity(model.num_slots, rows)
        self._policy = StepPolicy(model, rows, max_num_batched_tokens, steps_per_launch)
        self.stats = stats or DecodeStats()
        self.to_call_back: deque[tuple[Request, RequestOutput]] = deque()
        self._model = model
        self._tokenizer = tokenizer
        self._by_id: dict[str, Request] = {}
        self._paused: set[Request] = set()
        self._in_flight: dict[RequestKey, Request] = {}
        self._finished_req_ids: set[RequestKey] = set()
        self._numbers = itertools.count()

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        priority: float = 0,
        *,
        on_output: Callable[[RequestOutput], object] | None = None,
        arrived_at: float | None = None,
    ) -> Request:
        """Queue a request: `make_request`, then `admit`."""
        request = self.make_request(
            request_id,
            prompt_token_ids,
            params,
            priority,
            on_output=on_output,
            arrived_at=arrived_at,
        )
        self.admit(request)
        return request

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        priority: float = 0,
        *,
        on_output: Callable[[RequestOutput], object] | None = None,
        arrived_at: float | None = None,
    ) -> Request:
        """A request that may be admitted now; a lower `priority` is more urgent.

        Args:
            on_output: Queued in `to_call_back` with each of its outputs.
            arrived_at: When its caller asked; now if None.

        Raises:
            ValueError: The id belongs to an unfinished request, the prompt is empty, too long or
                has ids outside the vocabulary, the model cannot honour the parameters, or there are
                stop strings and no tokenizer.
        """
        request_id, prompt, params, priority = self.check_request(
            request_id, prompt_token_ids, params, priority, on_output
        )
        if request_id in self._by_id:
            raise ValueError(
                f"Request id {request_id!r} is in use; wait until that request has finished, abort"
                " it, or choose another id."
            )
        number = next(self._numbers)
        request = Request(
            RequestKey(request_id, number),
            prompt,
            params,
            max_tokens=min(params.max_tokens, self._model.max_length - len(prompt)),
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            arrival=number,
            arrived_at=coerce.number(
                "arrived_at", time.perf_counter() if arrived_at is None else arrived_at
            ),
            on_output=on_output,
        )
        if self._tokenizer is not None:
            request.detokenizer = IncrementalDetokenizer(self._tokenizer, params)
        return request

    def admit(self, request: Request) -> None:
        """Queue a request that `make_request` has made."""
        self._by_id[request.request_id] = request
        self.capacity.add(request)

    def check_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        priority: float = 0,
        on_output: Callable[[RequestOutput], object] | None = None,
    ) -> AdmittedRequest:
        """What is asked for, in plain values and copies. From any thread.

        Raises:
            ValueError: As `add_request`, but for an id that is in use.
        """
        if on_output is not None and not callable(on_output):
            raise ValueError(f"on_output is {coerce.shown(on_output)}; it must be callable.")
        return check_request(
            self._model, request_id, prompt_token_ids, params, priority, self._tokenizer
        )

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; its id is free at once, its slot when its last step is read.

        Returns None for an id that is not in use.
        """
        request = self._by_id.get(request_id)
        if request is None:
            return None
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        return self._output_of(request)

    def fail_request(self, request_id: str, error: Exception) -> RequestOutput | None:
        """As `abort_request`, with finish reason `"error"` and that cause."""
        request = self._by_id.get(request_id)
        if request is None:
            return None
        request.error = error
        self._finish(request, RequestStatus.FINISHED_ERROR)
        return self._output_of(request)

    def pause_request(self, request_id: str) -> bool:
        """Schedule no further step of a request; False if none of that id is unfinished.

        What is in flight still arrives. It keeps its slot until another one needs it.
        """
        return self._set_paused(request_id, True)

    def resume_request(self, request_id: str) -> bool:
        """Undo a pause; False if no request of that id is unfinished."""
        return self._set_paused(request_id, False)

    def preempt_request(self, request_id: str) -> bool:
        """Take a running request's slot away; False if none of that id is running.

        Nor is one whose last token is in flight: it gives the slot back by itself.
        """
        request = self._by_id.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING or request.is_ending:
            return False
        self._preempt(request)
        return True

    def fail_all(self) -> None:
        """Forget every request, because the loop cannot go on: from any state, half changed too."""
        for request in self._by_id.values():
            request.status = RequestStatus.FINISHED_ERROR
        for requests in (self._by_id, self._paused, self._in_flight, self._finished_req_ids):
            requests.clear()
        self.capacity = Capacity(self._model.num_slots, self.capacity.max_batch_size)

    @property
    def unfinished_request_ids(self) -> tuple[str, ...]:
        return tuple(self._by_id)

    @property
    def waiting(self) -> list[Request]:
        """The requests without a slot, in order of admission. For inspection: it looks at all."""
        found = [r for r in self._by_id.values() if r.status is RequestStatus.WAITING]
        return sorted(found, key=lambda r: r.order)

    @property
    def running(self) -> list[Request]:
        """The requests that hold a slot and have not finished. For inspection: it looks at all."""
        return [r for r in self._by_id.values() if r.status is RequestStatus.RUNNING]

    def num_output_placeholders(self, request_id: str) -> int:
        """Tokens of an unfinished request that are in flight."""
        return self._by_id[request_id].num_output_placeholders

    def num_outputs_in_flight(self, request_id: str) -> int:
        """Outputs of an unfinished request that are in flight: one of each launch, at most."""
        request = self._by_id[request_id]
        return min(request.num_in_flight, request.num_output_placeholders)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished and not paused."""
        return len(self._by_id) > len(self._paused)

    def may_give_output(self, request_id: str) -> bool:
        """Whether steps may bring more of a request: it is unfinished, and not at rest paused."""
        request = self._by_id.get(request_id)
        return request is not None and (request.num_in_flight > 0 or not request.paused)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step and count it as in flight; it may be empty."""
        self.capacity.fill_rows()
        admitted = self._admit(self._policy.most_to_admit(self.capacity.rows))
        chosen, num_steps = self._policy.choose(self.capacity)
        step = SchedulerOutput(
            [NewRequestData.of(request) for request in admitted],
            {request.key: count for request, count in chosen.items()},
            {request.key: request.num_computed_tokens for request in chosen},
            frozenset(self._finished_req_ids),
            frozenset(r.key for r, count in chosen.items() if count < r.num_tokens_left),
            num_steps,
        )
        self._finished_req_ids = set()
        self._advance(chosen, step)
        return step

    def _advance(self, chosen: Mapping[Request, int], step: SchedulerOutput) -> None:
        """Count a step as in flight."""
        self.stats.count_schedule(chosen, step)
        for request, count in chosen.items():
            request.num_computed_tokens += count
            request.num_in_flight += 1
            request.num_output_placeholders += step.num_new_tokens(request.key)
            self._in_flight[request.key] = request
            if request.is_ending:
                self.capacity.discard(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[RequestOutput]:
        """Retire a step: hand out its tokens, end requests, free slots that no step uses."""
        outputs = []
        for key in scheduler_output.num_scheduled_tokens:
            request = self._in_flight[key]
            row = model_runner_output.req_id_to_index[key]
            token_ids = model_runner_output.sampled_token_ids[row]
            logprobs = model_runner_output.logprobs
            request.num_in_flight -= 1
            request.num_output_placeholders -= scheduler_output.num_new_tokens(key)
            if request.status.is_finished:
                self.stats.extra_tokens_dropped += len(token_ids)
            elif (error := model_runner_output.error_of(key)) is not None:
                request.error = error
                self._finish(request, RequestStatus.FINISHED_ERROR)
                outputs.append(self._output_of(request))
            elif token_ids or scheduler_output.num_steps > 1:
                given = logprobs[row] if logprobs else None
                stops_early = len(token_ids) < scheduler_output.num_new_tokens(key)
                outputs.append(self._append(request, token_ids, given, stops_early))
            self._release_if_idle(request)
        return outputs

    def _admit(self, most: int) -> list[Request]:
        admitted: list[Request] = []
        while len(admitted) < most:
            request = self.capacity.waiting.first
            if request is None or not self._may_start(request):
                break
            self.capacity.start(request)
            if request.prefill_token_ids:
                # A name that the runner does not know: what it had of the old one is void.
                request.key = RequestKey(request.request_id, next(self._numbers))
            request.prefill_token_ids = request.prompt_token_ids + request.output_token_ids
            request.num_computed_tokens = 0
            admitted.append(request)
        return admitted

    def _may_start(self, request: Request) -> bool:
        """Whether there are a row and a slot for a request; if need be, a slot is taken away."""
        if request.num_in_flight:
            return False  # preempted, and not all of its tokens are known yet
        if not self.capacity.has_row_for(request):
            return False
        while not self.capacity.free_slots:
            victim = None if self.capacity.slots_come_free else self.capacity.victim_for(request)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        self.capacity.discard(request)
        self._finished_req_ids.add(request.key)
        request.status = RequestStatus.WAITING
        self.capacity.add(request)
        self._release_if_idle(request)
        self.stats.preemptions += 1

    def _set_paused(self, request_id: str, paused: bool) -> bool:
        request = self._by_id.get(request_id)
        if request is None:
            return False
        (self._paused.add if paused else self._paused.discard)(request)
        self.capacity.discard(request)
        request.paused = paused
        if not request.is_ending:
            self.capacity.add(request)
        return True

    def _append(
        self,
        request: Request,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        stops_early: bool,
    ) -> RequestOutput:
        kept, now = [], time.perf_counter()
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            request.token_times.append(now)
            kept.append(token_id)
            status = request.status_after(token_id, self._model.eos_token_ids)
            status = request.detokenize(token_id, status)
            if status.is_finished:
                self._finish(request, status)
                break
        if stops_early and not request.status.is_finished:
            request.error = RuntimeError(
                f"The model stopped request {request.request_id!r} behind {[*token_ids]}, which do"
                " not end it; a row of a window must stop at its limit and behind its stop tokens"
                " alone (see decode.WindowModel)."
            )
            self._finish(request, RequestStatus.FINISHED_ERROR)
        self.stats.extra_tokens_dropped += len(token_ids) - len(kept)
        self.stats.generated_tokens += len(kept)
        return self._output_of(request, tuple(kept), tuple(logprobs or ())[: len(kept)])

    def _output_of(
        self,
        request: Request,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> RequestOutput:
        output = request.output(token_ids, logprobs)
        if request.on_output is not None:
            self.to_call_back.append((request, output))
        if output.metrics is not None:
            self.stats.count_request(output.metrics)
        return output

    def _finish(self, request: Request, status: RequestStatus) -> None:
        self.capacity.discard(request)
        if request.status is RequestStatus.RUNNING:
            self._finished_req_ids.add(request.key)
        request.status = status
        del self._by_id[request.request_id]
        self._paused.discard(request)
        self._release_if_idle(request)

    def _release_if_idle(self, request: Request) -> None:
        if request.num_in_flight:
            return
        self._in_flight.pop(request.key, None)
        if request.status is not RequestStatus.RUNNING and request.slot is not None:
            self.capacity.free_slots.append(request.slot)
            request.slot = None
