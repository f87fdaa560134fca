"""The host's view of the batch: one row per request of the step, and what is known of each."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from neuron_streams.decode.model import (
    MAX_STOP_IDS,
    NO_TOKEN,
    Adjustments,
    SamplingTensors,
    Window,
)
from neuron_streams.decode.request import RequestKey
from neuron_streams.decode.sampling_params import SamplingParams
from neuron_streams.decode.schedule import NewRequestData

__all__ = ["PLACEHOLDER", "CachedRequestState", "InputBatch", "ModelInput", "bucket_of"]

PLACEHOLDER = -1
"""Stands in `token_ids_cpu` for a token that is not known on the host; never to reach a device."""


class ModelInput(NamedTuple):
    """Arguments of a step.

    For a prefill `sampling` is set and `positions` are the lengths of the rows; `starts` is set
    where it goes on behind tokens that the slots hold already. A packed step has all of it, and
    `input_ids` with one dimension. `window` is set where a launch runs several decode steps.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sampling: SamplingTensors | None = None
    starts: torch.Tensor | None = None
    window: Window | None = None


@dataclass(slots=True, eq=False)
class CachedRequestState:
    """A request as a model runner keeps it, in the batch or not.

    `num_prompt_tokens`: how many of `prompt_token_ids` are the prompt; after a preemption those
    behind are what had been generated.
    `sampled_position` is that of the newest token sampled for it by a launched step. `ended`: one
    of its steps has failed, or it has stopped, so what later steps sample for it is no token.
    """

    key: RequestKey
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    slot: int
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    sampled_position: int | None = None
    ended: bool = False

    @classmethod
    def of(cls, new: NewRequestData) -> CachedRequestState:
        """Of a request that the runner has not seen, under this key."""
        return cls(
            new.key,
            new.prompt_token_ids,
            new.params,
            new.seed,
            new.slot,
            new.num_prompt_tokens,
        )

    @property
    def is_decode(self) -> bool:
        return self.num_computed_tokens >= len(self.prompt_token_ids)


class InputBatch:
    """Rows of the current step. `condense` and `swap_states` move rows, never slots.

    `token_ids_cpu[row]` holds `max_length` ids: the prompt, then the outputs that have reached the
    host, then `PLACEHOLDER`. Rows are lists, which are many times faster than a tensor to write
    token by token.
    """

    def __init__(
        self, max_num_reqs: int, max_length: int, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.token_ids_cpu: list[list[int]] = [[] for _ in range(max_num_reqs)]
        self.rows: list[CachedRequestState | None] = [None] * max_num_reqs
        self.req_id_to_index: dict[RequestKey, int] = {}

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    @property
    def states(self) -> list[CachedRequestState]:
        """The requests in row order. The batch must be dense, as `condense` leaves it."""
        states = [state for state in self.rows[: self.num_reqs] if state is not None]
        assert len(states) == self.num_reqs, "the batch has holes: condense() it first"
        return states

    @property
    def decodes(self) -> bool:
        """Whether any row decodes."""
        return any(state.is_decode for state in self.states)

    @property
    def req_ids(self) -> list[RequestKey]:
        return [state.key for state in self.states]

    def add_request(self, state: CachedRequestState) -> int:
        """Give a request the first free row and copy all its known tokens there."""
        row = self.rows.index(None)
        known = state.prompt_token_ids + state.output_token_ids
        self.token_ids_cpu[row] = known + [PLACEHOLDER] * (self.max_length - len(known))
        self.rows[row] = state
        self.req_id_to_index[state.key] = row
        return row

    def remove_request(self, key: RequestKey) -> int | None:
        """Leave a hole where the request was; None where it was not in the batch."""
        row = self.req_id_to_index.pop(key, None)
        if row is not None:
            self.rows[row] = None
        return row

    def condense(self) -> None:
        """Fill the holes with the rows from the end."""
        for row in range(self.num_reqs):
            if self.rows[row] is None:
                self.swap_states(row, max(self.req_id_to_index.values()))

    def swap_states(self, first: int, second: int) -> None:
        """Exchange two rows."""
        tokens, rows = self.token_ids_cpu, self.rows
        tokens[first], tokens[second] = tokens[second], tokens[first]
        rows[first], rows[second] = rows[second], rows[first]
        for row in (first, second):
            state = self.rows[row]
            if state is not None:
                self.req_id_to_index[state.key] = row

    def append_token(self, state: CachedRequestState, token_id: int) -> None:
        """Write one more known token of a request, to its row too where it has one."""
        row = self.req_id_to_index.get(state.key)
        if row is not None:
            position = len(state.prompt_token_ids) + len(state.output_token_ids)
            self.token_ids_cpu[row][position] = token_id
        state.output_token_ids.append(token_id)
        state.ended |= token_id in state.params.stop_ids(self.eos_token_ids)

    def decode_input(self, num_rows: int) -> ModelInput:
        """Fresh int32 [num_rows] each; padding rows are all 0, and so are those that have ended."""
        rows = [
            (0, 0, 0) if state.ended else (tokens[at], at, state.slot)
            for state, tokens in zip(self.states, self.token_ids_cpu, strict=False)
            for at in (state.num_computed_tokens,)
        ]
        rows += [(0, 0, 0)] * (num_rows - len(rows))
        input_ids, positions, slots = map(_int32, zip(*rows, strict=True))
        return ModelInput(input_ids, positions, slots)

    def window_of(self, limits: Sequence[int], num_rows: int, num_steps: int) -> Window:
        """When the rows of a window stop: at their limits, and behind what ends their requests."""
        ids = [
            [*itertools.islice(sorted(state.params.stop_ids(self.eos_token_ids)), MAX_STOP_IDS)]
            for state in self.states
        ]
        ids += [[] for _ in range(num_rows - len(ids))]
        stops = [row + [NO_TOKEN] * (MAX_STOP_IDS - len(row)) for row in ids]
        padding = [0] * (num_rows - len(limits))
        return Window(_int32([*limits, *padding]), _int32(stops), num_steps)

    def prefill_input(self, lengths: Sequence[int], width: int) -> ModelInput:
        """`input_ids` int32 [n, width], padded with 0, from where each request stands."""
        starts = [state.num_computed_tokens for state in self.states]
        input_ids = [
            tokens[start : start + length] + [0] * (width - length)
            for tokens, start, length in zip(self.token_ids_cpu, starts, lengths, strict=False)
        ]
        return ModelInput(
            _int32(input_ids),
            _int32(lengths),
            _int32([state.slot for state in self.states]),
            self.sampling_tensors(),
            _int32(starts) if any(starts) else None,
        )

    def packed_input(self, lengths: Sequence[int]) -> ModelInput:
        """All rows behind one another, from where each stands, those that decode among them.

        A row that has ended goes to the scratch slot: its token is not known.
        """
        rows = [
            ([0] * length, 0, 0) if state.ended else (tokens[at : at + length], at, state.slot)
            for state, tokens, length in zip(self.states, self.token_ids_cpu, lengths, strict=False)
            for at in (state.num_computed_tokens,)
        ]
        return ModelInput(
            _int32([token_id for token_ids, *_ in rows for token_id in token_ids]),
            _int32(lengths),
            _int32([slot for *_, slot in rows]),
            self.sampling_tensors(),
            _int32([start for _, start, _ in rows]),
        )

    def sampling_tensors(self) -> SamplingTensors:
        """The rows' sampling parameters, fresh tensors [n]."""
        params = [state.params for state in self.states]
        return SamplingTensors(
            _float32([p.temperature for p in params]),
            _int32([p.top_k for p in params]),
            _float32([p.top_p for p in params]),
            torch.tensor([state.seed for state in self.states], dtype=torch.int64, device="cpu"),
            self._adjustments() if any(p.adjusts for p in params) else None,
        )

    def num_logprobs(self, partial: frozenset[RequestKey]) -> list[int | None]:
        """What each row wants of the log-probabilities; empty where none wants any.

        Rows that sample no token of theirs want none: those in `partial`, and those that ended.
        """
        wanted = [
            None if state.ended or state.key in partial else state.params.logprobs
            for state in self.states
        ]
        return [] if all(most is None for most in wanted) else wanted

    def _adjustments(self) -> Adjustments:
        states = self.states
        params = [state.params for state in states]
        size = (len(states), self.vocab_size)
        logit_bias = torch.zeros(size, dtype=torch.float32, device="cpu")
        stop_mask = torch.zeros(size, dtype=torch.bool, device="cpu")
        for row, p in enumerate(params):
            bias = p.logit_bias or {}
            logit_bias[row, list(bias)] = _float32(list(bias.values()))
            stop_mask[row, list(p.stop_ids(self.eos_token_ids))] = p.min_tokens > 0
        return Adjustments(
            _float32([p.min_p for p in params]),
            _float32([p.repetition_penalty for p in params]),
            _float32([p.presence_penalty for p in params]),
            _float32([p.frequency_penalty for p in params]),
            _int32([state.num_prompt_tokens for state in states]),
            _int32([state.num_prompt_tokens + state.params.min_tokens for state in states]),
            _int32([-1 if p.logprobs is None else p.logprobs for p in params]),
            logit_bias,
            stop_mask,
        )


def bucket_of(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds `size`."""
    return buckets[bisect.bisect_left(buckets, size)]


def _float32(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _int32(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
