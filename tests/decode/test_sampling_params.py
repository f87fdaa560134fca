from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

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
        ({"stop": ("a", 1)}, "^stop is 1; it must be a string"),
    ],
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_the_ends_of_the_ranges_are_taken() -> None:
    SamplingParams(min_p=1, logprobs=20, min_tokens=16, repetition_penalty=FLOAT32_MAX)
    SamplingParams(logit_bias={3: -math.inf, 4: FLOAT32_MAX}, presence_penalty=-FLOAT32_MAX)
    SamplingParams(temperature=FLOAT32_MAX, top_k=2**31 - 1)


NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
WHOLE = ("max_tokens", "top_k", "seed", "logprobs", "min_tokens")
FLAGS = ("ignore_eos", "include_stop_str_in_output")
LISTS = ("stop", "stop_token_ids")


class Word(str):
    def __str__(self) -> str:
        return "another text"


class Hostile:
    """Raises whatever it is asked."""

    def _fail(self, *args: object) -> Any:
        raise ZeroDivisionError

    __index__ = __float__ = __eq__ = __iter__ = __len__ = __repr__ = __getattr__ = _fail
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "half",
    [np.array(0.5), np.float32(0.5), torch.tensor(0.5), Decimal("0.5"), Fraction(1, 2)],
    ids=repr,
)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_other_types_become_floats(name: str, half: Any) -> None:
    value = getattr(SamplingParams(**{name: half}), name)
    assert (type(value), value) == (float, 0.5)


@pytest.mark.parametrize("one", [np.int64(1), np.array(1), torch.tensor(1), True], ids=repr)
@pytest.mark.parametrize("name", [*WHOLE, *NUMBERS])
def test_whole_numbers_of_other_types_become_pythons_own(name: str, one: Any) -> None:
    value = getattr(SamplingParams(**{name: one}), name)
    assert (type(value), value) == (int if name in WHOLE else float, 1)


@pytest.mark.parametrize("of", [bool, int, float, np.bool_, np.array, torch.tensor])
@pytest.mark.parametrize("name", FLAGS)
def test_what_equals_a_bool_becomes_one(name: str, of: Any) -> None:
    for value in (True, False):
        assert getattr(SamplingParams(**{name: of(value)}), name) is value


@pytest.mark.parametrize(
    "ids",
    [[3, 4], range(3, 5), np.array([3, 4]), torch.tensor([3, 4]), iter([3, 4]), {3: 0, 4: 0}],
    ids=lambda value: type(value).__name__,
)
def test_lists_of_other_types_become_tuples(ids: Any) -> None:
    assert repr(SamplingParams(stop_token_ids=ids).stop_token_ids) == "(3, 4)"


def test_strings_of_other_types_become_plain_ones() -> None:
    for stop in (Word("ab"), [Word("ab")], iter(["ab"]), np.array(["ab"]), {"ab"}):
        (text,) = SamplingParams(stop=stop).stop  # type: ignore[arg-type]
        assert (type(text), text) == (str, "ab")


def test_a_bias_becomes_a_dict_of_floats() -> None:
    bias: Any = {np.int32(4): 1, 5: Decimal("0.5"), True: torch.tensor(2.0)}
    params = SamplingParams(logit_bias=MappingProxyType(bias))
    assert repr(params.logit_bias) == "{4: 1.0, 5: 0.5, 1: 2.0}"


@pytest.mark.parametrize("huge", [-(10**400), -Fraction(10**400), Decimal("-1e400"), -1e400])
def test_a_bias_below_every_float_excludes_the_token(huge: Any) -> None:
    assert SamplingParams(logit_bias={1: huge}).logit_bias == {1: -math.inf}


NO_NUMBERS = [
    *("hot", "0.5", b"0.5", bytearray(b"0.5"), np.str_("0.5"), None, 1j, (), [0.5], {}, object()),
    *(np.array([0.5]), np.array([1, 0]), torch.tensor([0.5])),
    *(math.nan, Decimal("nan"), Decimal("snan"), 10**400, -(10**400), -(10**5000), Hostile()),
]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_finite_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        SamplingParams(**{name: value})
    if not isinstance(value, int) or value > 0:
        with pytest.raises(ValueError, match="^logit_bias of (token )?3 is "):
            SamplingParams(logit_bias={3: value})


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_whole_number_in_range_is_refused(name: str, value: Any) -> None:
    if name == "max_tokens" and type(value) is int and value > 0:
        assert SamplingParams(max_tokens=value).max_tokens == value
    elif value is None and name in ("seed", "logprobs"):
        assert getattr(SamplingParams(**{name: value}), name) is None
    else:
        with pytest.raises(ValueError, match=f"^{name} (is|has) "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [*NO_NUMBERS, 2, "False"], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", FLAGS)
def test_what_equals_no_bool_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .* it must be True or False"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "value",
    [5, 1.5, None, b"ab", [None], [1.5], np.array(3), np.array([[3]]), object(), Hostile()],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", LISTS)
def test_what_is_no_list_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} (is|has) "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("ids", ["12", [Hostile()], torch.tensor([1.0])])
def test_what_are_no_token_ids_is_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match="^stop_token_ids (is|has) "):
        SamplingParams(stop_token_ids=ids)


@pytest.mark.parametrize(
    "bias",
    [[(3, 1.0)], [], 0, "", {Hostile(): 1}, {None: 1}, {1.0: 1}, {(): 1}, {10**400: math.nan}],
)
def test_what_is_no_bias_is_refused(bias: Any) -> None:
    with pytest.raises(ValueError, match="^logit_bias (is|has|of) "):
        SamplingParams(logit_bias=bias)


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
