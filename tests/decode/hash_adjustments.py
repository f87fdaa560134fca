"""What `Adjustments` do to the hash model, in integers, so that all of it is exact.

A device keeps what it has counted, token by token, in a `Counts`; the oracle counts afresh.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from neuron_streams.decode import Adjustments, SamplingParams
from neuron_streams.decode.logprobs import Logprob, TokenLogprobs
from neuron_streams.decode.model import MAX_LOGPROBS

VOCAB = 31
_weights = random.Random(1)
MIN_P = _weights.randrange(2**31)
BIAS, REPETITION, PRESENCE, FREQUENCY = (
    [_weights.randrange(2**31) for _ in range(VOCAB)] for _ in range(4)
)
STRIDE = 7  # from one alternative to the next; it has no factor in common with the vocabulary
SCALE = 1024  # of the parameters: the tests use multiples of 1 / SCALE


class Adjusted(NamedTuple):
    """What one request asks for; all 0 and empty is neutral, -1 for `num_logprobs`."""

    mix: int = 0
    repetition: int = 0
    presence: int = 0
    frequency: int = 0
    num_prompt_tokens: int = 0
    min_length: int = 0
    num_logprobs: int = -1
    banned: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()

    @classmethod
    def of_row(cls, adjustments: Adjustments, row: int) -> Adjusted:
        """As a model is told."""
        bias = dict(enumerate(adjustments.logit_bias[row].tolist()))
        stops = adjustments.stop_mask[row].nonzero().flatten().tolist()
        numbers = [float(column[row]) for column in adjustments[:7]]
        return cls._of(numbers, bias, frozenset(stops))

    @classmethod
    def of_params(
        cls, params: SamplingParams, num_prompt_tokens: int, eos: Iterable[int]
    ) -> Adjusted:
        """As the caller has asked."""
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        numbers = [
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            num_prompt_tokens,
            num_prompt_tokens + params.min_tokens,
            -1 if params.logprobs is None else params.logprobs,
        ]
        return cls._of(numbers, params.logit_bias or {}, frozenset(stops))

    @classmethod
    def _of(
        cls, numbers: list[float], bias: Mapping[int, float], stops: frozenset[int]
    ) -> Adjusted:
        min_p, repetition, presence, frequency, *counts = numbers
        banned = frozenset(token for token, value in bias.items() if value == -math.inf)
        mix = round(min_p * SCALE) * MIN_P
        mix += sum(round(v * SCALE) * BIAS[t] for t, v in bias.items() if t not in banned)
        penalties = [round(value * SCALE) for value in (repetition - 1, presence, frequency)]
        return cls(mix, *penalties, *map(int, counts), banned, stops)

    @property
    def penalizes(self) -> bool:
        return bool(self.repetition or self.presence or self.frequency)

    def excluded_at(self, position: int) -> frozenset[int]:
        return self.banned | self.stops if position < self.min_length else self.banned

    def mix_with(self, prompt: Iterable[int], output: Mapping[int, int]) -> int:
        """All that goes into the hash beside the history and the plain parameters."""
        if not self.penalizes:
            return self.mix
        total = self.mix + sum(self.repetition * REPETITION[token] for token in {*prompt, *output})
        for token, count in output.items():
            total += self.presence * PRESENCE[token] + count * self.frequency * FREQUENCY[token]
        return total


@dataclass
class Counts:
    """What a device has counted of the tokens of one slot."""

    prompt: set[int] = field(default_factory=set)
    output: Counter[int] = field(default_factory=Counter)

    def see(self, token: int, in_prompt: bool) -> None:
        if in_prompt:
            self.prompt.add(token)
        else:
            self.output[token] += 1


def choose(value: int, vocab: int, excluded: frozenset[int]) -> int:
    """The token that a hash stands for, or the next one that is not excluded."""
    while value % vocab in excluded:
        value += 1
    return value % vocab


def alternatives(value: int, token: int, vocab: int) -> tuple[list[int], list[float], int]:
    """A row of `LogprobsTensors`, of the hash of the bare history: as float32 exactly."""
    ids = [(value + STRIDE * place) % vocab for place in range(vocab)]
    rank = ids.index(token) + 1
    logprobs = [-(place + value % SCALE / SCALE) / 8 for place in range(vocab)]
    likeliest = slice(0, MAX_LOGPROBS)
    return [token, *ids[likeliest]], [logprobs[rank - 1], *logprobs[likeliest]], rank


def expected_logprobs(value: int, token: int, vocab: int, most: int) -> TokenLogprobs:
    """What a caller is to get who asks for `most`."""
    ids, logprobs, rank = alternatives(value, token, vocab)
    likeliest = {ids[place]: Logprob(logprobs[place], place) for place in range(1, most + 1)}
    return {token: Logprob(logprobs[0], rank)} | likeliest
