"""What a loop has to tell: outputs that no step has given yet, and callbacks that are due."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from neuron_streams.decode.request import Request, RequestOutput

__all__ = ["Outbox"]


class Outbox:
    """Outputs on their way to the caller of `step`; nothing is lost where a callback raises.

    Args:
        due: Outputs of requests that have a callback, each with its request, oldest first.
    """

    def __init__(self, due: deque[tuple[Request, RequestOutput]]) -> None:
        self.outputs: list[RequestOutput] = []
        self.errors: deque[Exception] = deque()
        self._due = due
        self._begun: RequestOutput | None = None
        self._done: RequestOutput | None = None

    def __bool__(self) -> bool:
        return bool(self.outputs or self.errors)

    def call_back(self, fail: Callable[[str, Exception], object]) -> None:
        """Call what is due; a request whose callback raises is failed, and called no more.

        So is one whose callback was interrupted: whether it has taken its output is not known.
        """
        while self._due:
            request, output = self._due[0]
            error = self._call(request, output)
            if error is not None:
                request.on_output = None
                self.errors.append(error)
                if not request.status.is_finished:
                    fail(request.request_id, error)
            del self._due[0]

    def raise_error(self) -> None:
        """
        Raises:
            Exception: What a callback raised, one for each call; the outputs stay for the next.
        """
        if self.errors:
            error = self.errors[0]
            del self.errors[0]
            raise error

    def _call(self, request: Request, output: RequestOutput) -> Exception | None:
        if request.on_output is None or output is self._done:
            return None
        if output is self._begun:
            return RuntimeError(f"The callback of request {request.request_id!r} was interrupted.")
        self._begun = output
        try:
            request.on_output(output)
        except Exception as error:
            return error
        self._done = output
        return None
