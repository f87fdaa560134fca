"""Tools for tests of stream code: Gates, which hold a stream, and runtimes to step by hand.

Public, for tests of code that uses neuron_streams as well as for our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import torch
from typing_extensions import Self

from neuron_streams._context import context, core, replace
from neuron_streams._runtime import process
from neuron_streams._runtime.emulated import EmulatedRuntime
from neuron_streams._runtime.manual import DeadlockError, ManualRuntime
from neuron_streams._runtime.port import Runtime
from neuron_streams._stream import as_stream, current_stream

__all__ = ["DeadlockError", "EmulatedRuntime", "Gate", "ManualRuntime", "is_ready", "use_runtime"]

R = TypeVar("R", bound=Runtime)


class Gate:
    """Hold a stream: what is submitted to it from now on runs only after `open()`.

    It makes "not done yet" testable without a sleep. As a context manager it opens at the end, so
    that a failing test cannot leave the stream held.

    Args:
        stream: which; None is the current one.

    Host: returns at once. Stream: waits until `open()`.
    """

    def __init__(self, stream: torch.Stream | None = None) -> None:
        state = (current_stream() if stream is None else as_stream(stream))._state
        self._runtime = runtime = context().runtime
        self._lane = runtime.open_lane(state.device, host=True)
        ticket = runtime.submit(self._lane, core().Pledge("gate"))
        assert ticket is not None
        self._ticket = ticket
        state.wait(ticket)
        state.ticket()  # the wait counts from now on, not from the next command

    @property
    def is_open(self) -> bool:
        process.check_fork()
        return self._runtime.completed(self._lane) >= self._ticket.value

    def open(self, error: BaseException | None = None) -> None:
        """Let the stream go on; opening twice does nothing. Host: returns at once."""
        process.check_fork()
        self._runtime.complete(self._ticket, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.open()

    def __del__(self) -> None:
        if hasattr(self, "_lane"):
            self._runtime.close_lane(self._lane)


def is_ready(tensor: torch.Tensor) -> bool:
    """Whether the last command that writes a device tensor has completed. Host: returns at once."""
    writer = core().buffer_of(tensor).writer
    return writer is None or context().runtime.completed(writer.lane) >= writer.value


@contextmanager
def use_runtime(runtime: R) -> Iterator[R]:
    """Run a block on a runtime of its own, and close it afterwards.

    Streams, events and tensors made inside must not be used outside.

    Example:
        >>> with use_runtime(ManualRuntime()) as device:
        ...     device.ready()
        []
    """
    before = replace(runtime)
    try:
        yield runtime
    finally:
        replace(before)
        runtime.close(1.0)
