from __future__ import annotations

import pytest

from neuron_streams.decode import Logprob, Request, RequestOutput, RequestStatus, SamplingParams
from neuron_streams.decode.request import RequestKey

EOS = frozenset({7})


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


def test_logprobs_are_told_to_those_who_ask() -> None:
    one = ({5: Logprob(-1.0, 1)},)
    assert make(logprobs=0).output((5,), one).logprobs == one
    assert make(logprobs=0).output().logprobs == ()
    assert make().output((5,)).logprobs is None
