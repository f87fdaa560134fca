"""Refusals, in the form that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

__all__ = ["ApiError", "error_response", "to_api_error", "to_json"]


class ApiError(Exception):
    """What a client is told in place of an answer.

    Args:
        status: Of HTTP.
        message: What was asked, why it cannot be, what to do.
        param: The field of the request that is at fault.
        code: For programs, such as `"model_not_found"`.
        headers: Of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        described = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": described}


def to_api_error(error: Exception) -> ApiError:
    """What to tell the client of an error, whichever it is."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}.", headers=error.headers)
    return ApiError(500, str(error) or repr(error))


def error_response(error: Exception) -> Response:
    told = to_api_error(error)
    return Response(
        to_json(told.body), told.status, headers=told.headers, media_type="application/json"
    )


def to_json(content: Mapping[str, Any]) -> str:
    """One line of ASCII: no character of a text can break a header or an event stream."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)
