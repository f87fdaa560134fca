"""Connections that stall, and how a server ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import uvicorn
from uvicorn.server import ServerState

from examples.serve import warm_up
from examples.serving import server as module
from examples.serving.app import make_app
from examples.serving.server import Connection
from tests.examples.serving import MAX_LENGTH, MODEL, client_of, expected, listening, make_door

ROOT = Path(__file__).parents[2]
LARGE = {
    "model": MODEL,
    "prompt": [1],
    "n": 64,
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
}


class ReaderOfNothing:
    """A client that asks for more than fits into the buffers on its way, and takes the head."""

    def __init__(self, port):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", port))
        body = json.dumps(LARGE).encode()
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert self.socket.recv(15) == b"HTTP/1.1 200 OK"

    def wait_until_cut_off(self):
        poll = select.poll()
        poll.register(self.socket, 0)
        assert poll.poll()

    def read(self):
        """All the rest; an end by force is an end."""
        parts = []
        try:
            while part := self.socket.recv(1 << 16):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_a_client_that_does_not_ask_is_cut_off(sent):
    door, engine = make_door(thread=True)
    with (
        engine,
        listening(door, stall_seconds=0.05) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_a_client_that_does_not_read_is_cut_off():
    door, engine = make_door(thread=True)
    options = {"drain_seconds": 1e6, "stall_seconds": 0.05}
    with engine:
        with listening(door, **options) as port, ReaderOfNothing(port) as reader:
            reader.wait_until_cut_off()
            assert b"[DONE]" not in reader.read()
        assert door.num_sequences == 0
        assert engine.unfinished_request_ids == ()


@pytest.fixture
def connection(monkeypatch):
    """One whose timers go off as soon as the event loop runs; its transport notes what is done."""
    monkeypatch.setattr(module, "cut_off", lambda transport: transport.done.append("cut off"))
    loop = asyncio.new_event_loop()
    door, _ = make_door()
    config = uvicorn.Config(make_app(door), log_config=None, ws="none")
    made = Connection(config, ServerState(), {}, loop)
    made.stall_seconds = 0.0
    made.connection_made(FakeTransport())
    yield made
    made.connection_lost(None)
    loop.close()


def run_timers(connection):
    for _ in range(3):
        connection.loop.run_until_complete(asyncio.sleep(0))
    return connection.transport.done


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n"


def test_a_head_that_is_whole_ends_the_wait_for_it(connection):
    connection.data_received(HEAD)
    connection.data_received(b"\r\n")
    assert run_timers(connection) == []


def test_a_head_in_pieces_is_waited_for_once(connection):
    connection.data_received(HEAD[:20])
    connection.data_received(HEAD[20:])
    assert run_timers(connection) == ["cut off"]


def test_a_reader_that_takes_something_has_more_time(connection):
    connection.data_received(HEAD + b"\r\n")
    connection.transport.sizes = [9, 8, 7, 7, 6]
    connection.pause_writing()
    assert run_timers(connection) == ["cut off"]
    assert connection.transport.sizes == [6]


def test_a_reader_that_takes_it_all_is_left_alone(connection):
    connection.data_received(HEAD + b"\r\n")
    connection.transport.sizes = [9]
    connection.pause_writing()
    connection.resume_writing()
    assert run_timers(connection) == []


def test_a_reader_that_takes_nothing_gains_nothing_by_sending(connection):
    connection.data_received(HEAD + b"\r\n")
    connection.transport.sizes = [9, 9]
    connection.pause_writing()
    connection.data_received(b"123456789")
    assert run_timers(connection) == ["cut off"]


class FakeTransport:
    def __init__(self):
        self.done = []
        self.sizes = []

    def get_extra_info(self, name):
        return None

    def get_write_buffer_size(self):
        return self.sizes.pop(0)

    def is_closing(self):
        return False

    def write(self, data):
        pass

    def close(self):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


def test_whoever_takes_nothing_of_the_goodbye_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "GOODBYE_SECONDS", 0.05)
    door, engine = make_door(thread=True)
    with engine:
        with listening(door, drain_seconds=0.05) as port:
            reader = ReaderOfNothing(port)
        with reader:
            assert b"[DONE]" not in reader.read()
        assert engine.unfinished_request_ids == ()


class Process:
    """The command, on a port of its own; its device waits in the middle of the first request."""

    def __init__(self, *arguments, module="tests.examples.hash_server"):
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, "--port", "0", "--lazy", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.port = int(self.wait_for(r"running on http://127.0.0.1:(\d+)"))

    def wait_for(self, pattern):
        for line in self.child.stderr:
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(f"{pattern} was never said")

    def stop(self, number=signal.SIGTERM):
        """Ask it to end, and wait until it lets nothing in."""
        self.child.send_signal(number)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionRefusedError:
                return

    def go_on(self):
        self.child.stdin.close()

    def code(self):
        self.child.stderr.read()
        return self.child.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()
        self.child.stdin.close()
        self.child.stderr.close()


@contextmanager
def asked(process):
    """A stream that has begun."""
    with client_of(process.port) as client:
        stream = client.completions.create(
            model=MODEL,
            prompt=[1],
            seed=1,
            max_tokens=40,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        with stream:
            yield next(stream).choices[0].text, stream


def test_a_signal_waits_for_what_is_there_and_lets_nothing_more_in():
    with Process() as process, asked(process) as (text, stream):
        process.stop()
        assert process.child.poll() is None
        process.go_on()
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == expected([1], 1, max_tokens=40, ignore_eos=True)[2]
        assert process.code() == 0


@pytest.mark.parametrize("another", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_aborts_and_tells(another):
    with Process() as process, asked(process) as (_, stream):
        process.stop()
        process.child.send_signal(another)
        assert process.wait_for("aborting (.*) sequences") == "1"
        process.go_on()
        with pytest.raises(openai.APIError, match="The server is shutting down; try again"):
            list(stream)
        assert process.code() == 0


def test_the_time_to_drain_ends():
    with Process("--drain-seconds", "0.1") as process, asked(process) as (_, stream):
        process.stop()
        assert process.wait_for("aborting (.*) sequences") == "1"
        process.go_on()
        with pytest.raises(openai.APIError, match="The server is shutting down; try again"):
            list(stream)
        assert process.code() == 0


def test_an_idle_server_ends_at_once():
    with Process() as process, client_of(process.port) as client:
        process.go_on()
        answer = client.completions.create(model=MODEL, prompt=[1], seed=1)
        assert answer.choices[0].text == expected([1], 1)[2]
        process.stop(signal.SIGINT)
        assert process.code() == 130


def test_what_requests_need_is_compiled_by_requests():
    _, engine = make_door(thread=True)
    with engine:
        warm_up(engine, MAX_LENGTH)
        assert engine.stats.generated_tokens == 12  # of two lengths and three kinds, two each
        assert engine.unfinished_request_ids == ()


def test_a_model_that_is_not_there_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "examples/serve.py", "--model", "/no/such/model"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("serve: /no/such/model is no folder")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_answers_while_another_reader_is_slow():
    arguments = ("--batch", "3", "--max-length", "512")
    with Process(*arguments, module="examples.serve") as process, client_of(process.port) as client:
        asked = {"model": "SmolLM2-135M-Instruct", "temperature": 0}
        slow = client.chat.completions.create(
            messages=[{"role": "user", "content": "Write one sentence about the sea."}],
            max_tokens=24,
            stream=True,
            **asked,
        )
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(messages=question, max_tokens=24, **asked)
        assert "Paris" in answer.choices[0].message.content
        text = "".join(chunk.choices[0].delta.content or "" for chunk in slow)
        assert "sea" in text
        process.stop()
        assert process.code() == 0
