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

    def __bool__(self) -> bool:
        return bool(self.outputs or self.errors)

    def call_back(self, fail: Callable[[str, Exception], object]) -> None:
        """Call what is due; a request whose callback raises is failed, and called no more."""
        while self._due:
            request, output = self._due.popleft()
            if request.on_output is None:
                continue
            try:
                request.on_output(output)
            except Exception as error:
                request.on_output = None
                self.errors.append(error)
                if not request.status.is_finished:
                    fail(request.request_id, error)

    def take(self) -> list[RequestOutput]:
        """All outputs.

        Raises:
            Exception: What a callback raised, one for each call; the outputs stay for the next.
        """
        if self.errors:
            raise self.errors.popleft()
        outputs, self.outputs = self.outputs, []
        return outputs
