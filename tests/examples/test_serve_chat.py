"""`/v1/chat/completions`, by OpenAI's own client."""

from __future__ import annotations

import pytest

from neuron_streams.decode import SamplingParams
from tests.decode.hash_model import reference_logprobs
from tests.decode.toy_tokenizer import piece
from tests.examples.serving import MAX_LENGTH, MODEL, ChatTokenizer, expected, serving

MESSAGES = [{"role": "system", "content": "ab"}, {"role": "user", "content": "€ a"}]
PROMPT = ChatTokenizer().encode("ab € a ")


@pytest.fixture(scope="module")
def client():
    with serving() as made:
        yield made


def ask(client, messages=MESSAGES, **options):
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "seed": 1} | options
    )


def test_a_whole_answer(client):
    answer = ask(client, max_completion_tokens=9)
    tokens, reason, text, _ = expected(PROMPT, 1, max_tokens=9)
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, reason, None)
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(tokens)


def test_a_stream_opens_with_the_role_and_ends_with_the_reason(client):
    options = {"include_usage": True}
    chunks = list(ask(client, max_tokens=12, stream=True, n=2, stream_options=options))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks.pop().usage.prompt_tokens == len(PROMPT)
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert [choice.delta.role for choice in mine[1:]] == [None] * (len(mine) - 1)
        assert mine[-1].delta.content is None
        reasons = [choice.finish_reason for choice in mine]
        _, reason, text, _ = expected(PROMPT, 1 + index, max_tokens=12)
        assert reasons == [None] * (len(mine) - 1) + [reason]
        assert "".join(choice.delta.content or "" for choice in mine) == text


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, MAX_LENGTH),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_completion_tokens": 6, "max_tokens": 4}, 6),
    ],
    ids=str,
)
def test_how_long_it_may_be(client, options, most):
    answer = ask(client, **options, extra_body={"ignore_eos": True})
    tokens, reason, *_ = expected(PROMPT, 1, max_tokens=most, ignore_eos=True)
    assert answer.usage.completion_tokens == len(tokens)
    assert answer.choices[0].finish_reason == reason == "length"


@pytest.mark.parametrize("most", [None, 0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, most, stream):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=most or 0)
    tokens = expected(PROMPT, 1, max_tokens=12, logprobs=most or 0)[0]
    want = reference_logprobs(PROMPT, tokens, params)
    options = {"logprobs": True, "max_tokens": 12}
    if most is not None:
        options["top_logprobs"] = most
    answer = ask(client, stream=stream, **options)
    found = [
        each
        for part in (answer if stream else [answer])
        for choice in part.choices
        if choice.logprobs
        for each in choice.logprobs.content
    ]
    assert [bytes(each.bytes) for each in found] == [piece(token) for token in tokens]
    assert [each.token for each in found if b"\xe2" == bytes(each.bytes)[:1] != b"\xe2\x82\xac"]
    for each, token, logprobs in zip(found, tokens, want, strict=True):
        assert each.logprob == pytest.approx(logprobs[token].logprob)
        likeliest = {bytes(t.bytes): t.logprob for t in each.top_logprobs}
        ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)[: most or 0]
        assert likeliest == {piece(t): pytest.approx(one.logprob) for t, one in ranked}


def test_a_part_of_a_character_is_spelled_in_hexadecimal(client):
    names = {piece(token) for token in range(11)}
    answer = ask(client, max_tokens=30, logprobs=True, extra_body={"ignore_eos": True})
    for each in answer.choices[0].logprobs.content:
        assert bytes(each.bytes) in names
        try:
            assert each.token == bytes(each.bytes).decode()
        except UnicodeDecodeError:
            assert each.token == "".join(f"\\x{byte:02x}" for byte in each.bytes)


def test_the_forms_of_a_message(client):
    text = ask(client).choices[0].message.content
    parts = [{"type": "text", "text": "€"}, {"type": "text", "text": " a"}]
    messages = [
        {"role": "developer", "content": "ab", "name": "ignored"},
        {"role": "user", "content": parts},
    ]
    assert ask(client, messages).choices[0].message.content == text


def test_what_asks_for_nothing_is_taken(client):
    nothing = {
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "tools": [],
        "audio": None,
    }
    text = ask(client).choices[0].message.content
    assert ask(client, extra_body=nothing).choices[0].message.content == text
