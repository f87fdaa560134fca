from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_streams.decode import SamplingParams, Scheduler
from neuron_streams.decode.admission import check_request
from tests.decode.fake_streams import FakeStreams
from tests.decode.hash_model import EOS, VOCAB, FakeHashModel

BUT_EOS = {token: -math.inf for token in range(VOCAB) if token != EOS}


def make(**sizes: Any) -> FakeHashModel:
    return FakeHashModel(FakeStreams(), **sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": (3, 31)}, "has stop_token_ids of token 31; this model knows 0 to 30"),
        ({"stop_token_ids": (-1,)}, "has stop_token_ids of token -1;"),
        ({"logit_bias": {31: 1.0}}, "has logit_bias of token 31; this model knows 0 to 30"),
        ({"logit_bias": dict.fromkeys(range(31), -math.inf)}, "excludes all 31 tokens"),
        ({"logit_bias": dict.fromkeys(range(31), -1e39)}, "excludes all 31 tokens"),
        ({"logit_bias": BUT_EOS, "min_tokens": 1}, "excludes all 31 tokens"),
        ({"stop_token_ids": range(31), "min_tokens": 1}, "excludes all 31 tokens"),
        ({"min_tokens": 15, "max_tokens": 99}, "min_tokens of 15; behind a prompt of 10 .* for 14"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Request 'x' .*{message}"):
        check_request(make(prompt_buckets=(16,)), "x", [1] * 10, SamplingParams(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": BUT_EOS},
        {"logit_bias": BUT_EOS, "min_tokens": 1, "ignore_eos": True},
        {"stop_token_ids": range(31)},
        {"logit_bias": dict.fromkeys(range(31), -1e38)},
        {"min_tokens": 14, "max_tokens": 99},
    ],
)
def test_what_leaves_a_token_is_taken(options: dict[str, Any]) -> None:
    check_request(make(prompt_buckets=(16,)), "x", [1] * 10, SamplingParams(**options))


def test_a_model_that_adjusts_nothing_is_not_asked_to() -> None:
    model: Any = make(adjusts_logits=False)
    with pytest.raises(ValueError, match="asks for min_p, logprobs, and FakeHashModel adjusts no"):
        check_request(model, "x", [1], SamplingParams(min_p=0.5, logprobs=0))
    check_request(model, "x", [1], SamplingParams(temperature=1.0, stop_token_ids=(3,)))
    bare: Any = SimpleNamespace(
        max_length=24, prompt_buckets=(8,), vocab_size=31, eos_token_ids=frozenset()
    )
    with pytest.raises(ValueError, match="^Request 'x' asks for min_tokens"):
        check_request(bare, "x", [1], SamplingParams(min_tokens=1))


def test_more_alternatives_than_tokens_are_refused() -> None:
    model = make(vocab_size=8)
    check_request(model, "x", [1], SamplingParams(logprobs=8))
    with pytest.raises(ValueError, match="logprobs of 9 tokens; this model knows 8"):
        check_request(model, "x", [1], SamplingParams(logprobs=9))


def test_others_go_on_after_a_refusal() -> None:
    scheduler = Scheduler(make())
    scheduler.add_request("a", [1])
    with pytest.raises(ValueError, match="^Request 'x'"):
        scheduler.add_request("x", [1], SamplingParams(logit_bias={99: 1.0}))
    assert scheduler.unfinished_request_ids == ("a",)
