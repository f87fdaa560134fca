"""Input that is bad, or meant to be: a sentence each, in OpenAI's form, and the server goes on."""

from __future__ import annotations

import http.client
import json

import openai
import pytest

from examples.serving.generation import MAX_BODY
from tests.examples.serving import MODEL, client_of, expected, listening, make_door

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def port():
    door, engine = make_door(thread=True, max_sequences=16)
    with engine:
        with listening(door) as port:
            yield port
            with client_of(port) as client:
                answer = client.completions.create(model=MODEL, prompt=[1], seed=1)
            assert answer.choices[0].text == expected([1], 1)[2]
        # The server has ended: an answer that is being sent keeps its place until it is out.
        assert door.num_sequences == 0
        assert engine.unfinished_request_ids == ()


def post(port, path, body, headers=JSON, method="POST"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())["error"]
    finally:
        connection.close()


def refused(port, path=TEXT, **fields):
    default = {"prompt": [1]} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    status, error = post(port, path, json.dumps({"model": MODEL} | default | fields))
    assert status == 400
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more."),
        ({"temperature": -1}, "temperature is -1.0; it must be a finite number, 0 or more"),
        ({"temperature": 1e300}, "temperature is 1e+300; it must be a finite number"),
        ({"top_p": 0}, "top_p is 0.0; it must be above 0 and at most 1 (off)."),
        ({"seed": 2**63}, f"seed is {2**63}; it must fit a signed 64-bit integer."),
        ({"logprobs": 21}, "logprobs is 21; it must be from 0"),
        ({"stop": ""}, "stop is ('',); it must be strings, none of them empty."),
        ({"min_tokens": 20}, "min_tokens is 20; it must be from 0 (off) to max_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it must be a finite number above"),
        ({"prompt": []}, "has an empty prompt; give it one token at least."),
        ({"prompt": [1] * 64}, "has a prompt of 64 tokens; this model takes 63 at most."),
        ({"prompt": [31]}, "has token ids from 31 to 31; this model knows 0 to 30."),
        ({"prompt": [10**30]}, f"has token ids from {10**30} to"),
        ({"prompt": [-1]}, "has token ids from -1 to -1; this model knows 0 to 30."),
        ({"logit_bias": {"31": 1}}, "has logit_bias of token 31; this model knows 0 to 30."),
        ({"stop_token_ids": [99]}, "has stop_token_ids of token 99; this model knows 0 to 30."),
    ],
    ids=str,
)
def test_the_sentence_is_the_loops_own(port, fields, sentence):
    param, message = refused(port, **fields)
    assert sentence in message
    assert param is None


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"max_tokens": "5"}, "max_tokens", "max_tokens: Input should be a valid integer."),
        ({"max_tokens": 5.0}, "max_tokens", "max_tokens: Input should be a valid integer."),
        ({"max_tokens": True}, "max_tokens", "max_tokens: Input should be a valid integer."),
        ({"temperature": "hot"}, "temperature", "temperature: Input should be a valid number."),
        ({"temperature": 10**400}, "temperature", "temperature: Input should be a valid number"),
        ({"stream": 1}, "stream", "stream: Input should be a valid boolean."),
        ({"n": 0}, "n", "n: Input should be greater than or equal to 1."),
        ({"model": 5}, "model", "model: Input should be a valid string."),
        ({"prompt": 5}, "prompt", "prompt: it must be a string, a list of strings,"),
        ({"prompt": ["a", 1]}, "prompt", "prompt: it must be a string, a list of strings,"),
        ({"prompt": [[1], "a"]}, "prompt", "prompt: it must be a string, a list of strings,"),
        ({"prompt": [True]}, "prompt", "prompt: it must be a string, a list of strings,"),
        ({"prompt": [[[1]]]}, "prompt", "prompt: it must be a string, a list of strings,"),
        ({"stop": 5}, "stop", "stop: it must be a string or a list of strings."),
        ({"stop": ["a"] * 5}, "stop", "stop: it has 5 strings; at most 4 can be given."),
        ({"logit_bias": [1]}, "logit_bias", "logit_bias: it must be an object"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: 'a' is no token id."),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias: '-1' is no token id."),
        ({"logit_bias": {"1": "x"}}, "logit_bias", "logit_bias: the bias of token 1 must be"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias", "logit_bias: the bias of token 1 must be"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", "stop_token_ids.0: Input should be"),
        ({"stream_options": {}}, "stream_options", "stream_options is given and stream is not"),
        ({"stream_options": {"x": 1}}, "stream_options", "stream_options: x is not supported by"),
        ({"n": 3, "best_of": 2}, "best_of", "best_of is 2; it must be n, 3, or more."),
        ({"best_of": 2, "stream": True}, "best_of", "best_of is above n, and the best are known"),
        ({"echo": True, "logprobs": 1}, "echo", "echo with logprobs asks for those of the prompt"),
        ({"suffix": "end"}, "suffix", "suffix is not supported by this server; leave it out."),
        ({"no_such": 1}, "no_such", "no_such is not supported by this server; leave it out."),
        ({"n": 17}, None, "The request asks for 17 sequences, prompts times n (or best_of);"),
        ({"n": 10**9}, None, "The request asks for 1000000000 sequences"),
        ({"prompt": [[1]] * 9, "n": 2}, None, "The request asks for 18 sequences"),
        ({"prompt": "a\ud800"}, None, "The body is not JSON:"),
        ({"prompt": "z"}, None, "'z' has a character that is not of the toy's alphabet"),
    ],
    ids=ascii,
)
def test_what_a_completion_cannot_be(port, fields, param, sentence):
    found, message = refused(port, **fields)
    assert message.startswith(sentence)
    assert found == param


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"messages": []}, "messages", "messages: List should have at least 1 item"),
        ({"messages": "hi"}, "messages", "messages: Input should be a valid list."),
        ({"messages": [{}]}, "messages", "messages.0.role: Field required."),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0.content: Field required."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "messages.0.content: its parts must be of type 'text', with a text each.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages",
            "messages.0.content: its parts must be of type 'text', with a text each.",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            None,
            "the chat template refuses these messages: an unknown role",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is given and logprobs is not true;"),
        ({"logprobs": 2}, "logprobs", "logprobs: Input should be a valid boolean."),
        ({"tools": [{}]}, "tools", "tools is not supported by this server; leave it out."),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format is not"),
        ({"prompt": "a"}, "prompt", "prompt is not supported by this server; leave it out."),
    ],
    ids=str,
)
def test_what_a_chat_cannot_be(port, fields, param, sentence):
    found, message = refused(port, CHAT, **fields)
    assert message.startswith(sentence)
    assert found == param


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "The body is not JSON: EOF while parsing"),
        (b"nope", "The body is not JSON:"),
        (b"\xff\xfe", "The body is not JSON:"),
        (b'{"model": "hash", ', "The body is not JSON:"),
        (b"[" * 500_000, "The body is not JSON: recursion limit exceeded"),
        (b'{"a":' * 100_000, "The body is not JSON: recursion limit exceeded"),
        (b'{"temperature": NaN}', "The body is not JSON:"),
        (b'{"seed": %s}' % (b"9" * 5000), "The body is not JSON: number out of range"),
        (b"[1]", "The body must be a JSON object."),
        (b"null", "The body must be a JSON object."),
        (b"{}", "model: Field required."),
    ],
    ids=range(11),
)
def test_bodies_that_are_no_form(port, path, body, sentence):
    status, error = post(port, path, body)
    assert status == 400
    assert error["message"].startswith(sentence)


@pytest.mark.parametrize(
    "body",
    [
        {"model": MODEL, "prompt": [{}] * 300_000},
        {"model": MODEL, "prompt": [[]] * 300_000},
        {"model": MODEL, "prompt": "a", "stop": [{}] * 300_000},
        {"model": MODEL, "prompt": "a", "stop_token_ids": [{}] * 300_000},
        {"model": MODEL, "prompt": "a", "logit_bias": {f"x{at}": 1 for at in range(70_000)}},
        {"model": MODEL, "prompt": "a"} | {f"x{at}": 1 for at in range(70_000)},
        {"model": MODEL, "messages": [{}] * 300_000},
        {"model": MODEL, "messages": [{"role": "user", "content": [{}] * 300_000}]},
        {"model": MODEL, "prompt": "a", "stream_options": {f"x{at}": 1 for at in range(70_000)}},
    ],
    ids=range(9),
)
def test_a_body_of_many_faults_is_refused_for_one(port, body):
    path = CHAT if "messages" in body else TEXT
    status, error = post(port, path, json.dumps(body, separators=(",", ":")))
    assert status == 400
    assert len(error["message"]) < 300


def test_a_body_that_is_too_large(port):
    for length in ({}, {"transfer-encoding": "chunked"}):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        parts = iter([b" " * MAX_BODY, b" "]) if length else b" " * (MAX_BODY + 1)
        connection.request("POST", TEXT, parts, JSON | length, encode_chunked=bool(length))
        response = connection.getresponse()
        assert response.status == 413
        assert (
            "The body has more than 1048576 bytes"
            in json.loads(response.read())["error"]["message"]
        )
        connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=str,
)
def test_a_body_that_is_announced_as_something_else(port, headers):
    status, error = post(port, TEXT, b"{}", headers)
    assert status == 415
    assert error["message"].startswith("The body must be JSON, not compressed")


def test_a_content_type_may_say_more(port):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert post(port, TEXT, b"{}", headers)[0] == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", TEXT, 405), ("PUT", CHAT, 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404)],
)
def test_other_routes(port, method, path, status):
    found, error = post(port, path, None, {}, method)
    assert found == status
    assert error["type"] == "invalid_request_error"


def test_another_model(port):
    with client_of(port) as client, pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt", prompt="a")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "The model 'gpt' does not exist here; ask for 'hash'." in str(caught.value)


def test_the_client_raises_its_own_errors(port):
    with client_of(port) as client, pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
        client.completions.create(model=MODEL, prompt="a", max_tokens=0)
