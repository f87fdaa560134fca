"""Servers to test with: the hash model behind them, whose answers an oracle knows."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import openai
from starlette.types import ASGIApp

from examples.serving.app import make_app
from examples.serving.door import Door
from examples.serving.server import make_server
from neuron_streams.decode import DecodeEngine, SamplingParams
from tests.decode.engines import make_engine
from tests.decode.hash_model import reference
from tests.decode.toy_tokenizer import PIECES, ToyTokenizer, piece, reference_text

MODEL = "hash"
MAX_LENGTH = 64
SIZES = {"max_length": MAX_LENGTH, "prompt_buckets": (8, 32, MAX_LENGTH - 1)}


class ChatTokenizer(ToyTokenizer):
    """With what a server asks beyond it; a chat is what its messages say, a space behind each."""

    def encode(self, text: str, /) -> list[int]:
        left, ids = text.encode(), []
        while left:
            fits = [token for token, data in enumerate(PIECES) if left.startswith(data)]
            if not fits:
                raise ValueError(f"{text!r} has a character that is not of the toy's alphabet")
            ids.append(max(fits, key=lambda token: len(PIECES[token])))
            left = left[len(PIECES[ids[-1]]) :]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]], /) -> list[int]:
        if any(message["role"] not in ("system", "user", "assistant") for message in messages):
            raise ValueError("the chat template refuses these messages: an unknown role")
        return self.encode("".join(f"{message['content']} " for message in messages))

    def token_bytes(self, token_id: int, /) -> bytes:
        return piece(token_id)


def expected(
    prompt: list[int], seed: int, **options: Any
) -> tuple[list[int], str, str, int | str | None]:
    """Tokens, finish reason, text and stop reason of a request with OpenAI's defaults."""
    params = SamplingParams(**({"temperature": 1.0, "seed": seed} | options))
    tokens, reason = reference(prompt, params, MAX_LENGTH)
    return reference_text(tokens, reason, params)


def make_door(
    *, thread: bool = False, max_sequences: int = 256, max_queued: int = 64, **options: Any
) -> tuple[Door, DecodeEngine]:
    tokenizer = ChatTokenizer()
    engine, *_ = make_engine(
        thread=thread,
        max_queued=max_queued,
        tokenizer=tokenizer,
        sizes=SIZES,
        policy="gather",
        **options,
    )
    return Door(engine, tokenizer, MODEL, max_sequences), engine


@contextmanager
def listening(door: Door, **options: Any) -> Iterator[int]:
    """A server on a thread of its own; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit it
    server = make_server(make_app(door), door, log_config=None, **options)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(**options: Any) -> Iterator[openai.OpenAI]:
    """A client of a server of its own."""
    door, engine = make_door(thread=True, **options)
    with engine, listening(door) as port, client_of(port) as client:
        yield client


def client_of(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


class Call:
    """One request to an app, without a socket: the test decides when its client takes and leaves.

    Args:
        app: The app.
        path: Of the route.
        body: As JSON, or as it is.
    """

    def __init__(
        self, app: ASGIApp, path: str, body: Any, headers: Any = (), method: str = "POST"
    ) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self.takes = asyncio.Event()
        self.takes.set()
        self._left = asyncio.Event()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._parts: list[dict[str, Any]] = [{"type": "http.request", "body": data}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        lines = self.body.decode().split("\n\n")
        return [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return self._parts.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.ended = not message.get("more_body", False)


@asynccontextmanager
async def turning(engine: DecodeEngine) -> AsyncIterator[None]:
    """The engine goes on whenever nothing else does."""

    async def turn() -> None:
        while True:
            engine.turn()
            await asyncio.sleep(0)

    task = asyncio.ensure_future(turn())
    try:
        yield
    finally:
        task.cancel()


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)
