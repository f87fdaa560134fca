"""`/v1/completions`, by OpenAI's own client."""

from __future__ import annotations

import math

import openai
import pytest

from neuron_streams.decode import SamplingParams
from tests.decode.hash_model import reference_logprobs
from tests.decode.toy_tokenizer import PIECES, piece
from tests.examples.serving import MAX_LENGTH, MODEL, ChatTokenizer, expected, serving

PROMPT = [1, 5, 3]


@pytest.fixture(scope="module")
def client():
    with serving() as made:
        yield made


def ask(client, prompt=PROMPT, **options):
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "seed": 1} | options)


def test_a_whole_answer(client):
    answer = ask(client, max_tokens=9, extra_body={"ignore_eos": True})
    tokens, reason, text, _ = expected(PROMPT, 1, max_tokens=9, ignore_eos=True)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.id.startswith("cmpl-")
    assert answer._request_id == answer.id
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, text, reason)
    assert choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 9, 12)
    assert len(tokens) == 9


def test_the_defaults_are_those_of_openai(client):
    answer = ask(client, extra_body={"ignore_eos": True})
    _, reason, text, _ = expected(PROMPT, 1, temperature=1.0, max_tokens=16, ignore_eos=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, reason)
    assert answer.usage.completion_tokens == 16


def test_an_end_of_sequence_token_is_a_stop(client):
    seeds = {expected(PROMPT, seed, max_tokens=40)[1]: seed for seed in range(20)}
    for reason in ("stop", "length"):
        answer = ask(client, seed=seeds[reason], max_tokens=40)
        assert answer.choices[0].finish_reason == reason
        assert answer.choices[0].text == expected(PROMPT, seeds[reason], max_tokens=40)[2]


@pytest.mark.parametrize("stop", ["ba", ["ba"], ["€€€", "b", "ba"]])
def test_stop_strings(client, stop):
    options = {"max_tokens": 40, "ignore_eos": True}
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    _, reason, text, _ = expected(PROMPT, 2, stop=stops, **options)
    answer = ask(client, seed=2, stop=stop, max_tokens=40, extra_body={"ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, reason)
    assert reason == "stop"


def test_a_stream_is_the_whole_answer_in_pieces(client):
    whole = ask(client, max_tokens=20)
    *chunks, last = ask(client, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in [*chunks, last]) == whole.choices[0].text
    assert len(chunks) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(chunks)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {last.id} != {whole.id}
    assert last.usage is None
    assert "usage" not in last.model_fields_set


def test_usage_in_a_stream_comes_last(client):
    options = {"include_usage": True}
    *chunks, last = ask(client, max_tokens=7, stream=True, stream_options=options, echo=True)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 7)
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)


def test_the_bytes_of_a_stream(client):
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=3, stream=True
    ) as response:
        lines = response.read().decode().split("\n\n")
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: {") and "\n" not in line for line in lines[:-2])


def test_the_forms_of_a_prompt(client):
    encode = ChatTokenizer().encode
    for prompt, each in [
        ("ab €", [encode("ab €")]),
        (["ab", "€ b"], [encode("ab"), encode("€ b")]),
        (PROMPT, [PROMPT]),
        ([PROMPT, [4]], [PROMPT, [4]]),
    ]:
        answer = ask(client, prompt)
        assert [choice.text for choice in answer.choices] == [expected(p, 1)[2] for p in each]
        assert [choice.index for choice in answer.choices] == list(range(len(each)))
        assert answer.usage.prompt_tokens == sum(map(len, each))


def test_several_choices_have_a_seed_each(client):
    texts = [expected(prompt, 5 + at)[2] for prompt in ([1], [2]) for at in range(3)]
    answer = ask(client, [[1], [2]], n=3, seed=5)
    assert [choice.text for choice in answer.choices] == texts
    streamed = [""] * 6
    for chunk in ask(client, [[1], [2]], n=3, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_the_last_seed_is_followed_by_the_first(client):
    answer = ask(client, n=2, seed=2**63 - 1)
    want = [expected(PROMPT, seed)[2] for seed in (2**63 - 1, -(2**63))]
    assert [choice.text for choice in answer.choices] == want


def test_without_a_seed_answers_differ(client):
    answer = ask(client, seed=None, n=8, max_tokens=30)
    assert len({choice.text for choice in answer.choices}) > 1


@pytest.mark.parametrize("most", [0, 3])
def test_logprobs(client, most):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=most)
    tokens = expected(PROMPT, 1, max_tokens=12, logprobs=most)[0]
    want = reference_logprobs(PROMPT, tokens, params)
    names = [spelled(token) for token in tokens]
    found = ask(client, max_tokens=12, logprobs=most).choices[0].logprobs
    assert found.tokens == names
    assert any(name.startswith("bytes:\\x") for name in names)
    assert found.token_logprobs == pytest.approx(
        [w[t].logprob for w, t in zip(want, tokens, strict=True)]
    )
    if most == 0:
        assert found.top_logprobs is None
    else:
        assert found.top_logprobs == [
            {spelled(t): pytest.approx(each.logprob) for t, each in w.items()} for w in want
        ]
    data = [b"".join(map(piece, tokens[:at])) for at in range(len(tokens))]
    assert found.text_offset == [sum(byte & 0xC0 != 0x80 for byte in text) for text in data]


def spelled(token):
    try:
        return piece(token).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece(token))


def test_logprobs_of_a_stream_are_those_of_the_whole(client):
    whole = ask(client, max_tokens=12, logprobs=2).choices[0].logprobs
    chunks = [c.choices[0].logprobs for c in ask(client, max_tokens=12, logprobs=2, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for c in chunks if c for each in getattr(c, name)] == getattr(whole, name)


def test_best_of(client):
    means = {}
    for seed in range(3, 8):
        params = SamplingParams(max_tokens=6, temperature=1.0, seed=seed, logprobs=0)
        tokens, _, text, _ = expected(PROMPT, seed, max_tokens=6, logprobs=0)
        each = reference_logprobs(PROMPT, tokens, params)
        means[text] = math.fsum(w[t].logprob for w, t in zip(each, tokens, strict=True)) / len(
            tokens
        )
    answer = ask(client, seed=3, n=2, best_of=5, max_tokens=6)
    best = sorted(means, key=means.get, reverse=True)
    assert [choice.text for choice in answer.choices] == best[:2]
    assert answer.choices[0].logprobs is None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens > 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["ab", "€"], [[2], [10]]], ids=["texts", "tokens"])
def test_echo(client, stream, prompts):
    answer = ask(client, prompts, echo=True, n=2, stream=stream)
    texts = [""] * 4
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [
        text + expected([token], seed)[2]
        for text, token in (("ab", 2), ("€", 10))
        for seed in (1, 2)
    ]


def test_penalties_bias_and_the_fields_of_vllm_reach_the_loop(client):
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "top_p": 0.5}
    more = {"top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 4}
    bias = {5: -100.0, 6: 2.0}
    answer = ask(client, logit_bias={"5": -100, "6": 2}, **options, extra_body=more)
    assert answer.choices[0].text == expected(PROMPT, 1, logit_bias=bias, **options, **more)[2]
    more = {"stop_token_ids": [4, 9], "include_stop_str_in_output": True}
    answer = ask(client, max_tokens=40, extra_body=more)
    assert answer.choices[0].text == expected(PROMPT, 1, max_tokens=40, **more)[2]


def test_an_answer_ends_where_the_model_ends(client):
    answer = ask(client, max_tokens=10**6, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == MAX_LENGTH
    assert answer.choices[0].finish_reason == "length"


def test_fields_that_change_nothing_are_taken(client):
    extra = {"user": "me", "suffix": "", "metadata": {"a": "b"}, "store": False, "best_of": 1}
    assert ask(client, extra_body=extra).choices[0].text == expected(PROMPT, 1)[2]
    nothing = dict.fromkeys(["stop", "logit_bias", "n", "top_p", "logprobs", "tools", "whatever"])
    assert ask(client, extra_body=nothing).choices[0].text == expected(PROMPT, 1)[2]


def test_the_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "neuron_streams")
    with pytest.raises(openai.NotFoundError, match="'other/one' does not exist here") as caught:
        client.models.retrieve("other/one")
    assert caught.value.code == "model_not_found"


def test_the_alphabet_is_what_these_tests_think():
    assert ChatTokenizer().encode("ab €") == [2, 5, len(PIECES) - 1]
