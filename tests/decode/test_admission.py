from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from neuron_streams.decode import SamplingParams, Scheduler
from neuron_streams.decode.admission import check_request
from tests.decode.engines import make_engine
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import drive, make_loop
from tests.decode.hash_model import EOS, VOCAB, FakeHashModel, reference
from tests.decode.toy_tokenizer import SpecialTokenizer

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


# Prompts, ids, priorities and parameters of every kind


class Name(str):
    def __hash__(self) -> int:
        raise ZeroDivisionError

    def __str__(self) -> str:
        return "another"


def kind(value: Any) -> str:
    return type(value).__name__


PROMPTS = [[1, 2], (1, 2), range(1, 3), iter([1, 2]), np.array([1, 2]), torch.tensor([1, 2])]


@pytest.mark.parametrize("prompt", [*PROMPTS, [np.int32(1), True + 1], {1: 0, 2: 0}], ids=kind)
def test_prompts_of_other_types_become_lists_of_ints(prompt: Any) -> None:
    token_ids = check_request(make(), "x", prompt).prompt_token_ids
    assert (token_ids, {*map(type, token_ids)}) == ([1, 2], {int})


@pytest.mark.parametrize(
    "prompt",
    [
        *("2024", b"ab", bytearray(b"ab"), [1.7], ["3"], [None], None, 5, 1.5, object()),
        *([[1, 2]], np.array([[1, 2]]), torch.tensor([[3]]), np.array([1.0]), torch.tensor([1.0])),
        *(np.array(3), torch.tensor(3), [Decimal(1)], {"input_ids": [1]}, [10**400], [-1], []),
    ],
    ids=lambda prompt: f"{type(prompt).__name__} {prompt!r:.16}",
)
def test_what_is_no_list_of_token_ids_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(ValueError, match="(prompt of request|^Request) 'x' "):
        check_request(make(), "x", prompt)


@pytest.mark.parametrize("request_id", [3, None, b"a", ["x"], ("x",), object()], ids=kind)
def test_what_is_no_string_is_no_id(request_id: Any) -> None:
    scheduler = Scheduler(make())
    with pytest.raises(ValueError, match="^request_id is .*; it must be a string"):
        scheduler.add_request(request_id, [1])
    with pytest.raises(ValueError, match="^request_id is .*; it must be a string"):
        make_engine()[0].add_request(request_id, [1])


def test_an_id_of_another_class_becomes_a_plain_string() -> None:
    request_id = check_request(make(), Name("x"), [1]).request_id
    assert (type(request_id), request_id) == (str, "x")
    engine, _, _ = make_engine()
    stream = engine.add_request(Name("x"), [1], SamplingParams(max_tokens=1))
    while engine.turn():
        pass
    assert stream.result().request_id == "x"


@pytest.mark.parametrize(
    ("priority", "plain"),
    [
        (True, 1),
        (2**70 + 1, 2**70 + 1),
        (np.float32(0.5), 0.5),
        (Fraction(1, 2), 0.5),
        (-1e999, -math.inf),
    ],
)
def test_priorities_become_plain_numbers(priority: Any, plain: float) -> None:
    got = check_request(make(), "x", [1], priority=priority).priority
    assert (type(got), got) == (type(plain), plain)


@pytest.mark.parametrize(
    "priority", ["1", None, math.nan, 1j, [1], np.array([1, 2]), Decimal("nan")]
)
def test_what_cannot_be_compared_is_no_priority(priority: Any) -> None:
    with pytest.raises(ValueError, match="^Request 'x' has priority .*; it must be a number"):
        check_request(make(), "x", [1], priority=priority)


@pytest.mark.parametrize("params", [{}, {"max_tokens": 3}, 0, "greedy", SamplingParams, [None]])
def test_what_are_no_parameters_is_refused(params: Any) -> None:
    with pytest.raises(ValueError, match="^Request 'x' has sampling_params .*; they must be Samp"):
        Scheduler(make()).add_request("x", [1], params)


def test_what_is_changed_after_admission_reaches_no_step() -> None:
    loop, model, _ = make_loop()
    params, prompt = SamplingParams(max_tokens=3, seed=1, logit_bias={3: 1.0}), [1, 2]
    want = reference(prompt, params, model.max_length)[0]
    loop.add_request("x", prompt, params)
    params.logit_bias["oops"] = "oops"  # type: ignore[index]
    prompt.append(10**9)
    assert [t for output in drive(loop, model) for t in output.new_token_ids] == want
    with pytest.raises(ValueError, match="^logit_bias has 'oops'"):
        loop.add_request("y", [1], params)


@pytest.mark.parametrize(
    ("option", "value"), [("on_output", 3), ("on_output", "print"), ("arrived_at", "now")]
)
def test_other_options_are_checked_too(option: str, value: Any) -> None:
    scheduler = Scheduler(make())
    with pytest.raises(ValueError, match=f"^{option} is "):
        scheduler.add_request("x", [1], **{option: value})
    assert not scheduler.unfinished_request_ids


def test_a_stop_string_that_the_text_cannot_show_is_refused() -> None:
    tokenizer = SpecialTokenizer()
    with pytest.raises(ValueError, match=r"stop string 'a<end>', .* Use stop_token_ids=\(30,\)"):
        check_request(make(), "x", [1], SamplingParams(stop="a<end>"), tokenizer=tokenizer)
    check_request(make(), "x", [1], SamplingParams(stop="ab"), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="stop strings, and the loop no tokenizer"):
        check_request(make(), "x", [1], SamplingParams(stop="ab"))


def test_a_loop_takes_no_tokenizer_that_cannot_decode() -> None:
    with pytest.raises(ValueError, match="^tokenizer is "):
        make_loop(tokenizer="words")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"prompts": 5}, "prompts"),
        ({"prompts": "2024"}, "prompts"),
        ({"prompts": [1, 2]}, "The prompt of request '0'"),
        ({"prompts": [[1]], "sampling_params": 3}, "sampling_params"),
        ({"prompts": [[1]], "sampling_params": [{}]}, "Request '0' has sampling_params"),
        ({"prompts": [[1]], "request_ids": "a"}, "request_ids"),
        ({"prompts": [[1]], "request_ids": [1]}, "request_id"),
    ],
)
def test_generate_takes_lists_alone(options: dict[str, Any], name: str) -> None:
    loop, _, _ = make_loop()
    with pytest.raises(ValueError, match=f"^{name} "):
        loop.generate(**options)
    assert not loop.scheduler.unfinished_request_ids


def test_generate_takes_lists_of_other_types() -> None:
    loop, model, _ = make_loop()
    params = SamplingParams(max_tokens=3, seed=1)
    want = reference([1, 2], params, model.max_length)[0]
    for prompts in (np.array([[1, 2]]), torch.tensor([[1, 2]]), iter([iter([1, 2])])):
        outputs = loop.generate(prompts, iter([params]), request_ids=(Name("x"),))  # type: ignore[arg-type]
        assert [token for output in outputs for token in output.new_token_ids] == want


@pytest.mark.parametrize("most", [0, "many", 1.5, None, np.array([1, 2])])
def test_a_queue_takes_a_whole_number_alone(most: Any) -> None:
    with pytest.raises(ValueError, match="^max_queued (is|has) "):
        make_engine(max_queued=most)
