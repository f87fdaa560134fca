from __future__ import annotations

import pytest

from neuron_streams.decode import Request, RequestOutput, RequestStatus, SamplingParams
from neuron_streams.decode.request import RequestKey

EOS = frozenset({7})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "^max_tokens is 0; it must be 1 or more"),
        ({"temperature": -0.1}, "^temperature is -0.1; it must be a finite number"),
        ({"temperature": float("nan")}, "^temperature is nan"),
        ({"temperature": float("inf")}, "^temperature is inf"),
        ({"top_k": -1}, "^top_k is -1; it must be 0"),
        ({"top_p": 0.0}, "^top_p is 0.0; it must be above 0"),
        ({"top_p": 1.1}, "^top_p is 1.1"),
        ({"seed": 2**63}, "^seed is 9223372036854775808; it must fit"),
    ],
)
def test_sampling_params_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_sampling_params_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (16, 0.0, 0, 1.0)
    assert params.seed is None
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


def test_status_knows_its_finish_reason() -> None:
    reasons = [status.finish_reason for status in RequestStatus]
    assert reasons == [None, None, "stop", "length", "abort", "error"]


def make(**options: object) -> Request:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return Request(RequestKey("a", 0), [1], params, params.max_tokens, 0)


@pytest.mark.parametrize(
    ("options", "token", "reason"),
    [
        ({}, 5, None),
        ({}, 7, "stop"),
        ({"ignore_eos": True}, 7, None),
        ({"stop_token_ids": (5,)}, 5, "stop"),
        ({"stop_token_ids": (7,), "ignore_eos": True}, 7, "stop"),
        ({"max_tokens": 1}, 5, "length"),
        ({"max_tokens": 1}, 7, "stop"),
    ],
)
def test_a_token_may_end_a_request(
    options: dict[str, object], token: int, reason: str | None
) -> None:
    request = make(**options)
    request.output_token_ids.append(token)
    assert request.status_after(token, EOS).finish_reason == reason


def test_the_limit_counts_tokens_in_flight() -> None:
    request = make(max_tokens=3)
    request.output_token_ids.append(5)
    request.num_output_placeholders = 1
    assert not request.is_ending
    request.num_output_placeholders = 2
    assert request.is_ending


def test_an_output_tells_whether_it_is_the_last() -> None:
    assert not RequestOutput("a", (1,), 1).finished
    assert RequestOutput("a", (1,), 1, "stop").finished
