"""The scheduler: who runs in the next step, and who holds which slot.

It runs ahead of the device and cannot tell the modes apart: counts advance when a step is
scheduled, and come back when its output does. Every limit is tested on generated plus in flight,
so a request whose last token is in flight leaves the schedule one step before it is reported
finished, and no step past `max_tokens` is launched.

Source: the seed, "Normal Flow" and "What Does Breaking the Async Flow Mean?"; the names are vLLM's.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from neuron_streams.decode.model import Model
from neuron_streams.decode.output import ModelRunnerOutput
from neuron_streams.decode.request import (
    Request,
    RequestKey,
    RequestOutput,
    RequestStatus,
    SamplingParams,
)
from neuron_streams.decode.stats import DecodeStats

__all__ = ["NewRequestData", "Scheduler", "SchedulerOutput"]


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """All that a model runner needs to know of a request that it has not seen."""

    key: RequestKey
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    slot: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, as plain data that any number of runners can be given.

    `num_scheduled_tokens`: tokens to compute per request of this step, in scheduling order.
    `num_computed_tokens`: tokens that each has computed once the steps before this one have run.
    `finished_req_ids`: requests that ended since the step before.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[RequestKey, int] = field(default_factory=dict)
    num_computed_tokens: dict[RequestKey, int] = field(default_factory=dict)
    finished_req_ids: frozenset[RequestKey] = frozenset()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Scheduler:
    """Continuous batching: first come, first served, prefill before decode, never both in a step.

    Args:
        model: Gives the limits: slots, buckets, lengths.
        max_batch_size: Most requests that run at a time; None and anything above the largest
            batch bucket mean that bucket.
        stats: Where dropped and generated tokens are counted.
    """

    def __init__(
        self, model: Model, *, max_batch_size: int | None = None, stats: DecodeStats | None = None
    ) -> None:
        largest = model.batch_buckets[-1]
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}; it must be 1 or more.")
        self.max_batch_size = min(max_batch_size or largest, largest)
        self.stats = stats or DecodeStats()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_slots = deque(range(1, model.num_slots))
        self._model = model
        self._by_id: dict[str, Request] = {}
        self._in_flight: dict[RequestKey, Request] = {}
        self._finished_req_ids: set[RequestKey] = set()
        self._generations = itertools.count()

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> Request:
        """Queue a request.

        Raises:
            ValueError: The id belongs to an unfinished request, or the prompt is empty, too long
                or has ids outside the vocabulary, or the model refuses the parameters.
        """
        if request_id in self._by_id:
            raise ValueError(
                f"Request id {request_id!r} is in use; wait until that request has finished, abort"
                " it, or choose another id."
            )
        prompt = [int(token_id) for token_id in prompt_token_ids]
        self._check_prompt(request_id, prompt)
        params = params or SamplingParams()
        check_sampling = getattr(self._model, "check_sampling", None)
        if check_sampling is not None:
            check_sampling(params)
        request = Request(
            RequestKey(request_id, next(self._generations)),
            prompt,
            params,
            max_tokens=min(params.max_tokens, self._model.max_length - len(prompt)),
            seed=random.getrandbits(63) if params.seed is None else params.seed,
        )
        self._by_id[request_id] = request
        self.waiting.append(request)
        return request

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; its id is free at once, its slot when its last step is read.

        Returns None for an id that is not in use.
        """
        request = self._by_id.get(request_id)
        if request is None:
            return None
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        return request.output()

    def fail_all(self) -> None:
        """End every request, because the loop cannot go on."""
        for request in list(self._by_id.values()):
            self._finish(request, RequestStatus.FINISHED_ERROR)

    @property
    def unfinished_request_ids(self) -> tuple[str, ...]:
        return tuple(self._by_id)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step and count it as in flight; it may be empty."""
        admitted = self._admit()
        batch = admitted or [request for request in self.running if request.may_decode]
        scheduled = {r.key: len(r.prompt_token_ids) if admitted else 1 for r in batch}
        output = SchedulerOutput(
            [_new_request_data(request) for request in admitted],
            scheduled,
            {request.key: request.num_computed_tokens for request in batch},
            frozenset(self._finished_req_ids),
        )
        self._finished_req_ids.clear()
        for request in batch:
            request.num_computed_tokens += scheduled[request.key]
            request.num_in_flight += 1
            self._in_flight[request.key] = request
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[RequestOutput]:
        """Retire a step: hand out its tokens, end requests, free slots that no step uses."""
        outputs = []
        for key in scheduler_output.num_scheduled_tokens:
            request = self._in_flight[key]
            row = model_runner_output.req_id_to_index[key]
            token_ids = model_runner_output.sampled_token_ids[row]
            request.num_in_flight -= 1
            if request.status.is_finished:
                self.stats.extra_tokens_dropped += len(token_ids)
            elif token_ids:
                outputs.append(self._append(request, token_ids))
            self._release_if_idle(request)
        return outputs

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        while (
            self.waiting
            and self.free_slots
            and len(self.running) < self.max_batch_size
            and len(admitted) < self._model.prefill_batch
        ):
            request = self.waiting.popleft()
            request.slot = self.free_slots.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _append(self, request: Request, token_ids: Sequence[int]) -> RequestOutput:
        kept = []
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            kept.append(token_id)
            status = request.status_after(token_id, self._model.eos_token_ids)
            if status.is_finished:
                self._finish(request, status)
                break
        self.stats.generated_tokens += len(kept)
        return request.output(tuple(kept))

    def _finish(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._finished_req_ids.add(request.key)
        request.status = status
        del self._by_id[request.request_id]
        self._release_if_idle(request)

    def _release_if_idle(self, request: Request) -> None:
        if request.num_in_flight:
            return
        self._in_flight.pop(request.key, None)
        if request.status.is_finished and request.slot is not None:
            self.free_slots.append(request.slot)
            request.slot = None

    def _check_prompt(self, request_id: str, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ValueError(
                f"Request {request_id!r} has an empty prompt; give it one token at least."
            )
        longest = min(self._model.max_length - 1, self._model.prompt_buckets[-1])
        if len(prompt) > longest:
            raise ValueError(
                f"Request {request_id!r} has a prompt of {len(prompt)} tokens; this model takes"
                f" {longest} at most. Shorten it, or build the model for longer prompts."
            )
        if not 0 <= min(prompt) <= max(prompt) < self._model.vocab_size:
            raise ValueError(
                f"Request {request_id!r} has token ids from {min(prompt)} to {max(prompt)}; this"
                f" model knows 0 to {self._model.vocab_size - 1}. Use the model's own tokenizer."
            )


def _new_request_data(request: Request) -> NewRequestData:
    assert request.slot is not None
    return NewRequestData(
        request.key, request.prompt_token_ids, request.params, request.seed, request.slot
    )
