from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from neuron_streams.decode import SamplingParams
from neuron_streams.decode.sampling_params import FLOAT32_MAX


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "^max_tokens is 0; it must be 1 or more"),
        ({"temperature": -0.1}, "^temperature is -0.1; it must be a finite number"),
        ({"temperature": float("nan")}, "^temperature is nan"),
        ({"temperature": float("inf")}, "^temperature is inf"),
        ({"temperature": 1e39}, "^temperature is 1e\\+39"),
        ({"top_k": -1}, "^top_k is -1; it must be 0"),
        ({"top_k": 2**31}, "^top_k is 2147483648; .* fit a signed 32-bit"),
        ({"top_k": 2.5}, "^top_k has 2.5; it must be a whole number"),
        ({"max_tokens": 4.5}, "^max_tokens has 4.5"),
        ({"min_tokens": 1.0}, "^min_tokens has 1.0"),
        ({"logprobs": 2.0}, "^logprobs has 2.0"),
        ({"seed": "1"}, "^seed has '1'"),
        ({"stop_token_ids": (1.0,)}, "^stop_token_ids has 1.0"),
        ({"logit_bias": {"3": 1.0}}, "^logit_bias has '3'"),
        ({"top_p": 0.0}, "^top_p is 0.0; it must be above 0"),
        ({"top_p": 1.1}, "^top_p is 1.1"),
        ({"seed": 2**63}, "^seed is 9223372036854775808; it must fit"),
        ({"min_p": -0.1}, "^min_p is -0.1; it must be from 0"),
        ({"min_p": 1.1}, "^min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "^repetition_penalty is 0.0; it must be a finite number"),
        ({"repetition_penalty": 1e-39}, "^repetition_penalty is 1e-39"),
        ({"repetition_penalty": math.inf}, "^repetition_penalty is inf"),
        ({"repetition_penalty": math.nan}, "^repetition_penalty is nan"),
        ({"presence_penalty": math.nan}, "^presence_penalty is nan; it must be a finite number"),
        ({"frequency_penalty": -math.inf}, "^frequency_penalty is -inf"),
        ({"frequency_penalty": 1e39}, "^frequency_penalty is 1e\\+39"),
        ({"logit_bias": {3: math.nan}}, "^logit_bias of token 3 is nan; it must be a number"),
        ({"logit_bias": {3: math.inf}}, "^logit_bias of token 3 is inf"),
        ({"logit_bias": {3: 1e39}}, "^logit_bias of token 3 is 1e\\+39"),
        ({"logprobs": -1}, "^logprobs is -1; it must be from 0"),
        ({"logprobs": 21}, "^logprobs is 21; it must be from 0 .* to 20"),
        ({"min_tokens": -1}, "^min_tokens is -1; it must be from 0"),
        ({"min_tokens": 17}, "^min_tokens is 17; .* max_tokens, which is 16"),
        ({"stop": ""}, "^stop is \\('',\\); it must be strings"),
        ({"stop": ("a", 1)}, "^stop is \\('a', 1\\)"),
    ],
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_the_ends_of_the_ranges_are_taken() -> None:
    SamplingParams(min_p=1, logprobs=20, min_tokens=16, repetition_penalty=FLOAT32_MAX)
    SamplingParams(logit_bias={3: -math.inf, 4: FLOAT32_MAX}, presence_penalty=-FLOAT32_MAX)
    SamplingParams(temperature=FLOAT32_MAX, top_k=2**31 - 1)


def test_whole_numbers_of_other_types_become_ints() -> None:
    params = SamplingParams(top_k=np.int64(3), stop_token_ids=(True,), logit_bias={np.int32(4): 1})
    assert repr((params.top_k, params.stop_token_ids, params.logit_bias)) == "(3, (1,), {4: 1})"


def test_defaults_are_greedy_and_adjust_nothing() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (16, 0.0, 0, 1.0)
    assert params.seed is None
    assert not params.adjusts
    assert params.adjustments == ()


def test_sequences_are_copied() -> None:
    bias = {3: 1.0}
    params = SamplingParams(stop_token_ids=[1, 2], stop="ab", logit_bias=bias)  # type: ignore[arg-type]
    bias[4] = 2.0
    assert params.stop_token_ids == (1, 2)
    assert params.stop == ("ab",)
    assert params.logit_bias == {3: 1.0}
    assert SamplingParams(logit_bias={}).logit_bias is None


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"repetition_penalty": 0.9},
        {"presence_penalty": -1.0},
        {"frequency_penalty": 0.5},
        {"logit_bias": {1: 0.0}},
        {"logprobs": 0},
        {"min_tokens": 1},
    ],
)
def test_each_adjustment_is_named(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert params.adjusts
    assert params.adjustments == tuple(options)


def test_what_ends_a_request() -> None:
    eos = frozenset({7, 8})
    assert SamplingParams(stop_token_ids=(3, 7)).stop_ids(eos) == {3, 7, 8}
    assert SamplingParams(stop_token_ids=(3,), ignore_eos=True).stop_ids(eos) == {3}
    assert SamplingParams(ignore_eos=True).stop_ids(eos) == set()
