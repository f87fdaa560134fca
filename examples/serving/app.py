"""The routes."""

from __future__ import annotations

import time

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from examples.serving.answers import ChatAnswer, TextAnswer
from examples.serving.chat_form import ChatForm
from examples.serving.door import Door
from examples.serving.errors import ApiError, error_response, to_json
from examples.serving.generation import Generation
from examples.serving.text_form import TextForm

__all__ = ["make_app"]


def make_app(door: Door) -> Starlette:
    """The ASGI application in front of a door; the engine stays its maker's to close."""
    model = {
        "id": door.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "neuron_streams",
    }

    async def models(request: Request) -> Response:
        return _json(to_json({"object": "list", "data": [model]}))

    async def one_model(request: Request) -> Response:
        door.check_model(request.path_params["name"])
        return _json(to_json(model))

    async def health(request: Request) -> Response:
        try:
            door.engine.abort("")  # nobody's id: raises what has ended the engine, if anything has
        except Exception as error:
            raise ApiError(503, str(error)) from error
        return Response()

    async def metrics(request: Request) -> Response:
        return Response(door.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    completions = Generation(door, TextForm, TextAnswer)
    chat = Generation(door, ChatForm, ChatAnswer)
    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _refuse, ApiError: _refuse},
    )


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    return error_response(error)
