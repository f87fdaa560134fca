"""A step as the scheduler hands it to any number of runners: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from neuron_streams.decode.request import Request, RequestKey
from neuron_streams.decode.sampling_params import SamplingParams

__all__ = ["NewRequestData", "SchedulerOutput"]


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """All that a model runner needs to know of a request that it has not seen.

    One that was preempted comes back as a new one, under a new key: the tokens that it had
    generated follow its `num_prompt_tokens` own ones in `prompt_token_ids`.
    """

    key: RequestKey
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    slot: int
    num_prompt_tokens: int

    @classmethod
    def of(cls, request: Request) -> NewRequestData:
        """Of a request that has just been given a slot."""
        assert request.slot is not None
        return cls(
            request.key,
            request.prefill_token_ids,
            request.params,
            request.seed,
            request.slot,
            len(request.prompt_token_ids),
        )


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, as plain data that any number of runners can be given.

    `num_scheduled_tokens`: tokens to compute per request of this step, in scheduling order.
    `num_computed_tokens`: tokens that each has computed once the steps before this one have run.
    `finished_req_ids`: requests that ended, or lost their slot, since the step before.
    `partial_req_ids`: those of which a piece of the prompt is computed and no token sampled.
    `num_steps`: decode steps of this launch; above 1 all requests decode, and each takes part in as
    many of them as it has scheduled tokens.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[RequestKey, int] = field(default_factory=dict)
    num_computed_tokens: dict[RequestKey, int] = field(default_factory=dict)
    finished_req_ids: frozenset[RequestKey] = frozenset()
    partial_req_ids: frozenset[RequestKey] = frozenset()
    num_steps: int = 1

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def num_new_tokens(self, key: RequestKey) -> int:
        """Most tokens that the launch samples for a request of it."""
        if self.num_steps > 1:
            return self.num_scheduled_tokens[key]
        return 0 if key in self.partial_req_ids else 1
