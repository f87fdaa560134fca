"""A stream namespace of torch.cuda's names and no more, whose device runs only when told or waited
for. Nothing here orders two streams but waits: a tensor read too early raises."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

UNWRITTEN = -99


class FakeTensor:
    """A device tensor: no value until the command that writes it has run."""

    def __init__(self, streams: FakeStreams, *shape: int, dtype: torch.dtype = torch.int32) -> None:
        self.streams = streams
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.value: list[Any] | None = None
        self.error: Exception | None = None

    def read(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        if self.value is None:
            raise AssertionError("a device tensor was read before it was written")
        return self.value

    def to(self, device: str, non_blocking: bool = False) -> torch.Tensor:
        assert device == "cpu"
        host = torch.full(self.shape, UNWRITTEN, dtype=self.dtype)
        self.streams.copies += 1
        stream = self.streams.current_stream()
        stream.submit(lambda: host.copy_(torch.tensor(self.read())))
        if not non_blocking:
            self.streams.blocking_reads += 1
            self.streams.reach(stream, stream.submitted)
            self.read()
        return host


class FakeStream:
    def __init__(self, streams: FakeStreams) -> None:
        self.streams = streams
        self.queue: deque[tuple[Callable[[], Any] | None, FakeStream | None, int]] = deque()
        self.submitted = self.completed = 0
        self.held = False
        self.errors: list[tuple[int, Exception]] = []

    def submit(self, command: Callable[[], Any] | None, after: FakeStream | None = None) -> None:
        with self.streams.lock:
            self.submitted += 1
            self.queue.append((command, after, after.submitted if after else 0))

    def wait_stream(self, stream: FakeStream) -> None:
        self.submit(None, stream)

    def synchronize(self) -> None:
        self.streams.wait(self, self.submitted)

    def step(self) -> bool:
        if self.held or not self.queue:
            return False
        command, after, value = self.queue[0]
        if after is not None and after.completed < value:
            return False
        self.queue.popleft()
        try:
            if command is not None:
                command()
        except Exception as error:
            self.errors.append((self.completed + 1, error))
        self.completed += 1
        return True


class FakeEvent:
    def __init__(self, streams: FakeStreams, enable_timing: bool = False) -> None:
        self.streams = streams
        self.enable_timing = enable_timing
        self.ticket: tuple[FakeStream, int] | None = None
        self.at: float | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.streams.current_stream()
        if self.enable_timing:
            self.at = None
            stream.submit(self._stamp)
        self.ticket = (stream, stream.submitted)

    def _stamp(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.enable_timing
        assert end.enable_timing
        assert self.at is not None, "an event was asked for its time before it completed"
        assert end.at is not None, "an event was asked for its time before it completed"
        return (end.at - self.at) * 1e3

    def query(self) -> bool:
        return self.ticket is None or self.ticket[0].completed >= self.ticket[1]

    def synchronize(self) -> None:
        if self.ticket is not None:
            self.streams.wait(*self.ticket)


class FakeStreams:
    """The namespace. `rng` decides in which order waits step the lanes."""

    def __init__(self, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.rng = random.Random(seed)
        self.lanes: list[FakeStream] = []
        self.copies = self.blocking_reads = 0
        self._local = threading.local()
        self._default = self.Stream()

    def Stream(self, device: Any = None) -> FakeStream:
        stream = FakeStream(self)
        self.lanes.append(stream)
        return stream

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing)

    def current_stream(self, device: Any = None) -> FakeStream:
        current: FakeStream = getattr(self._local, "current", self._default)
        return current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._local.current = stream
        try:
            yield
        finally:
            self._local.current = before

    @contextmanager
    def hold(self, stream: FakeStream) -> Iterator[None]:
        stream.held = True
        try:
            yield
        finally:
            stream.held = False

    def run(self, limit: int | None = None) -> int:
        count = 0
        while count != limit and self._step_any():
            count += 1
        return count

    def wait(self, stream: FakeStream, value: int) -> None:
        """Also tells of all that has failed there so far, however old."""
        self.reach(stream, value)
        errors = [error for at, error in stream.errors if at <= value]
        if errors:
            raise errors[0]

    def reach(self, stream: FakeStream, value: int) -> None:
        while stream.completed < value:
            with self.lock:
                if stream.completed < value and not self._step_any():
                    raise RuntimeError("deadlock: nothing on the device can move")

    def _step_any(self) -> bool:
        with self.lock:
            first = int(self.rng.random() * len(self.lanes))
            return any(lane.step() for lane in self.lanes[first:] + self.lanes[:first])
