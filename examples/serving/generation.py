"""One request: its body, its sequences in the engine, its answer, and a client that leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from examples.serving.answers import Answer
from examples.serving.door import Door, Sequences
from examples.serving.errors import ApiError, error_response, to_api_error, to_json
from examples.serving.form import Form, read_form
from examples.serving.tokens import Tokenizer
from neuron_streams.decode import RequestOutput, RequestStream

__all__ = ["BODY_SECONDS", "MAX_BODY", "Generation"]

logger = logging.getLogger(__name__)

MAX_BODY = 1 << 20
"""Most bytes of a body."""

BODY_SECONDS = 30.0
"""In which it must come."""

_F = TypeVar("_F", bound=Form)
_Arrivals = asyncio.Queue[tuple[int, "RequestOutput | Exception | None"]]

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generation(Generic[_F]):
    """The ASGI endpoint of one form.

    Args:
        door: To the engine.
        form: What the body must be.
        answer: What is made of it.
    """

    def __init__(
        self,
        door: Door,
        form: type[_F],
        answer: Callable[[_F, list[list[int]], Tokenizer], Answer[_F]],
    ) -> None:
        self._door = door
        self._form = form
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            form = read_form(self._form, await read_body(Request(scope, receive)))
            self._door.check_model(form.model)
            with self._door.room(form.num_prompts * form.num_candidates):
                await self._generate(form, scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception as error:
            self._note(error)
            await error_response(error)(scope, receive, send)

    async def _generate(self, form: _F, scope: Scope, receive: Receive, send: Send) -> None:
        tokenizer = self._door.tokenizer
        try:
            params = form.sampling_params()
            prompts = await anyio.to_thread.run_sync(form.token_ids, tokenizer)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        answer = self._answer(form, prompts, tokenizer)
        with self._door.admit(answer.id, prompts, params) as sequences:
            reply = self._stream if form.stream else self._whole
            await unless_gone(receive, reply(answer, sequences, scope, send))

    async def _whole(
        self, answer: Answer[_F], sequences: Sequences, scope: Scope, send: Send
    ) -> None:
        streams = sequences.streams
        outputs: list[RequestOutput] = []
        results = await asyncio.gather(
            *(stream.aresult() for stream in streams), return_exceptions=True
        )
        for stream, result in zip(streams, results, strict=True):
            if isinstance(result, BaseException):
                sequences.note_failure(stream)
                raise result
            sequences.note(result)
            outputs.append(result)
        content = to_json(answer.whole(outputs))
        headers = {"x-request-id": answer.id}
        response = Response(content, headers=headers, media_type="application/json")
        await response(scope, _receive_nothing, send)

    async def _stream(
        self, answer: Answer[_F], sequences: Sequences, scope: Scope, send: Send
    ) -> None:
        headers = [*_STREAM_HEADERS, (b"x-request-id", answer.id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            for index in range(answer.num_choices):
                for choice in answer.opening(index):
                    await _send_event(send, to_json(answer.chunk(choice)))
            num_output_tokens = 0
            async with arrivals(sequences) as outputs:
                async for index, output in outputs:
                    sequences.note(output)
                    num_output_tokens += len(output.new_token_ids)
                    for choice in answer.pieces(index, output):
                        await _send_event(send, to_json(answer.chunk(choice)))
            if answer.form.includes_usage:
                await _send_event(send, to_json(answer.usage_chunk(num_output_tokens)))
        except Exception as error:
            # The status is out already; OpenAI's clients raise on an event of this form.
            self._note(error)
            await _send_event(send, to_json(to_api_error(error).body), more=False)
        else:
            await _send_event(send, "[DONE]", more=False)

    def _note(self, error: Exception) -> None:
        status = to_api_error(error).status
        self._door.metrics.count_refusal(status)
        if status == 500:
            logger.error("a request failed", exc_info=error)


async def read_body(request: Request) -> bytes:
    """The body of a request for JSON.

    Raises:
        ApiError: It is announced as something else, is too large, or does not come.
        ClientDisconnect: The client has gone away.
    """
    # A page of another site cannot have a browser post this type without asking here first.
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" or "content-encoding" in request.headers:
        raise ApiError(
            415, "The body must be JSON, not compressed, and content-type application/json."
        )
    body = bytearray()
    with anyio.move_on_after(BODY_SECONDS):
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise ApiError(413, f"The body has more than {MAX_BODY} bytes; shorten it.")
        return bytes(body)
    raise ApiError(408, f"The body did not come within {BODY_SECONDS:g} s; send it at once.")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, and leave it when the client goes away.

    Raises:
        ClientDisconnect: It has.
        Exception: What `work` raises.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


@asynccontextmanager
async def arrivals(
    sequences: Sequences,
) -> AsyncIterator[AsyncIterator[tuple[int, RequestOutput]]]:
    """The outputs of several sequences as they arrive, each with the number of its sequence.

    One at a time is taken from a stream: a slow reader is the stream's to see. What a stream raises
    is raised here.
    """
    queue: _Arrivals = asyncio.Queue(1)
    tasks = [
        asyncio.ensure_future(_forward(index, stream, queue))
        for index, stream in enumerate(sequences.streams)
    ]

    async def take() -> AsyncIterator[tuple[int, RequestOutput]]:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                sequences.note_failure(sequences.streams[index])
                raise item
            else:
                yield index, item

    try:
        yield take()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(index: int, stream: RequestStream, queue: _Arrivals) -> None:
    try:
        async for output in stream:
            if output.finish_reason != "error":  # what it raises next is the cause
                await queue.put((index, output))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _receive_nothing() -> Message:
    raise AssertionError("a plain response receives nothing")


async def _send_event(send: Send, data: str, *, more: bool = True) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": more})
