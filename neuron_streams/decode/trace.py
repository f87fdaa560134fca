"""What each step of a loop did and when: on the host's threads, and on the device.

The device's span of a step lies between two timing events, recorded before and after the model's
call. The first completes when the step before has ended or, on an idle device, at once: so host
work inside the model's call, ahead of its first command, counts as the device's where it idles.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from neuron_streams.decode.output import AsyncModelRunnerOutput
    from neuron_streams.decode.runner import ModelRunner
    from neuron_streams.decode.sampled import ModelRunnerOutput
    from neuron_streams.decode.schedule import SchedulerOutput

__all__ = ["ROWS", "Span", "StepRecord", "StepTrace"]

ENGINE, WORKER, DEVICE, OUTPUT = ROWS = (
    "engine core",
    "worker main thread",
    "device",
    "output thread",
)
"""The rows of a picture. The first two are one thread: a loop is its own engine core and worker."""


class Span(NamedTuple):
    """From `start` to `end`, in seconds of `time.perf_counter`."""

    row: str
    name: str
    start: float
    end: float


@dataclass(slots=True, eq=False)
class StepRecord:
    """One launched step. A span is None while it has not ended, or if it was not recorded.

    Attributes:
        number: Counts the launched steps of the loop from 1.
        kind: `"prefill"`, `"chunk"` where a piece of a prompt is among them, `"mixed"` beside rows
            that decode, `"decode"`, or `"window"` of several decode steps.
        num_steps: Decode steps of a window, else 1.
        num_tokens: Tokens that it computes of each of its requests.
        request_ids: Whose step it is, in scheduling order.
        path: `"async"`, the reason of the fallback (see `DecodeStats`), or `"sync"` for a step of
            the synchronous mode.
        schedule: The scheduler chooses the step.
        prepare: Its states are updated and its inputs built; includes the wait for the steps
            before it where the async flow breaks.
        launch: The model is called and, in asynchronous mode, the copy of its tokens submitted.
        read: Its tokens are waited for and taken, on the output thread, or on the worker's where
            the flow breaks or is synchronous.
        update: The scheduler takes its tokens in.
        device: It runs.
    """

    number: int = 0
    kind: str = ""
    request_ids: tuple[str, ...] = ()
    path: str = ""
    num_steps: int = 1
    num_tokens: tuple[int, ...] = ()
    schedule: Span | None = None
    prepare: Span | None = None
    launch: Span | None = None
    read: Span | None = None
    update: Span | None = None
    device: Span | None = None
    _events: tuple[Any, Any] | None = field(default=None, repr=False)
    _thread: int = field(default_factory=threading.get_ident, repr=False)

    @property
    def spans(self) -> list[Span]:
        """Those that have ended, in the order of the attributes."""
        every = (self.schedule, self.prepare, self.launch, self.read, self.update, self.device)
        return [span for span in every if span is not None]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record the time inside as `read`, on the row of this thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            row = WORKER if threading.get_ident() == self._thread else OUTPUT
            self.read = Span(row, "read", start, time.perf_counter())


class StepTrace:
    """Records the newest steps of a loop while it is entered; `DecodeLoop.trace` makes one.

    It may be entered again, and then goes on. To be used by the thread that drives the loop.

    Args:
        runner: The loop's.
        max_steps: Steps that are kept; older ones are forgotten.

    Raises:
        ValueError: max_steps below 1.
    """

    def __init__(self, runner: ModelRunner, max_steps: int = 1000) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it must be 1 or more.")
        self._runner = runner
        self._records: deque[StepRecord] = deque(maxlen=max_steps)
        self._own_spans: deque[Span] = deque(maxlen=max_steps)
        self._launched: dict[int, StepRecord] = {}
        self._current = StepRecord()
        self._now = 0.0
        self._reference: tuple[Any, float] | None = None
        self._thread = 0
        # Of neuron_streams; the ranges of torch.cuda.nvtx are for NVIDIA's tools.
        self._ranges: list[Any] = getattr(getattr(runner.streams, "nvtx", None), "listeners", [])

    def __enter__(self) -> StepTrace:
        """Begin. Host: blocks until the loop's stream is idle, to compare its clock with ours.

        Raises:
            RuntimeError: Another trace of this loop is on.
        """
        if self._runner.trace is not None:
            raise RuntimeError("trace: the loop is being traced already; leave that trace first.")
        if self._reference is None:
            tries = [self._compare_clocks() for _ in range(5)]
            self._reference = min(tries, key=lambda a_try: a_try[2])[:2]
        self._runner.trace = self
        self._thread = threading.get_ident()
        self._ranges.append(self._take_range)
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.trace = None
        self._ranges.remove(self._take_range)
        self._launched.clear()

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The steps, oldest first; those still in flight have no `device` yet. Never waits."""
        for record in self._records:
            self._place(record)
        return tuple(self._records)

    @property
    def spans(self) -> list[Span]:
        """All spans of `records`, and the caller's own: of `span` and of nvtx ranges."""
        return [span for record in self.records for span in record.spans] + [*self._own_spans]

    @contextmanager
    def span(self, name: str, row: str = ENGINE) -> Iterator[None]:
        """Record the time inside as a span of the caller's own, such as detokenising."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._own_spans.append(Span(row, name, start, time.perf_counter()))

    def _take_range(self, name: str, start: float, end: float) -> None:
        row = ENGINE if threading.get_ident() == self._thread else OUTPUT
        self._own_spans.append(Span(row, name, start, end))

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON that chrome://tracing and ui.perfetto.dev show."""
        content = {"displayTimeUnit": "ms", "traceEvents": self.chrome_events()}
        Path(path).write_text(json.dumps(content), encoding="utf-8")

    def chrome_events(self, process: str = "decode loop", pid: int = 1) -> list[dict[str, Any]]:
        """What `save` writes, from 0 us on, to be put into one file with other traces.

        Args:
            process: The heading of its rows.
            pid: Another number for each trace of a file; they are shown in this order.
        """
        steps = {span: record for record in self.records for span in record.spans}
        spans = self.spans
        origin = min((span.start for span in spans), default=0.0)
        events = _headings(process, pid) + [
            _event_of(span, origin, steps.get(span)) for span in spans
        ]
        return [{"pid": pid, **event} for event in events]

    # What the loop and the runner call.

    def begin(self) -> None:
        """A step is about to be scheduled."""
        self._current, self._now = StepRecord(), time.perf_counter()

    def scheduled(self) -> None:
        """It is."""
        self._current.schedule = self._lap(ENGINE, "schedule")

    def launching(self, start: Any) -> None:
        """Its inputs are there, and the event before it is recorded."""
        self._current.prepare = self._lap(WORKER, "prepare")
        self._current._events = (start, None)

    def launched(self, end: Any) -> None:
        """The model has submitted it, and the event behind it is recorded."""
        assert self._current._events is not None
        self._current._events = (self._current._events[0], end)
        if not self._runner.use_async_scheduling:
            self._current.launch = self._lap(WORKER, "launch")

    def note_path(self, kind: str, reason: str | None) -> None:
        """How it was launched; in synchronous mode its tokens are there too."""
        self._current.kind, self._current.path = kind, reason or "async"
        if not self._runner.use_async_scheduling:
            self._current.path = "sync"
            self._current.read = self._lap(WORKER, "read")

    def end(
        self,
        scheduler_output: SchedulerOutput,
        output: ModelRunnerOutput | AsyncModelRunnerOutput,
    ) -> None:
        """Its output object is there and about to be queued; nothing is kept of a refused one."""
        record = self._current
        if record._events is None or record._events[1] is None:
            return
        if self._runner.use_async_scheduling and output.error is None:
            record.launch = self._lap(WORKER, "launch")
            output.record = record  # type: ignore[union-attr]
        record.number = self._runner.stats.steps
        record.num_steps = scheduler_output.num_steps
        record.request_ids = tuple(key.request_id for key in scheduler_output.num_scheduled_tokens)
        record.num_tokens = tuple(scheduler_output.num_scheduled_tokens.values())
        self._launched[id(scheduler_output)] = record
        self._records.append(record)

    @contextmanager
    def updating(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Record the time inside as `update` of the step that is being retired."""
        start = time.perf_counter()
        yield
        record = self._launched.pop(id(scheduler_output), None)
        if record is not None:  # or it was launched before the trace
            record.update = Span(ENGINE, "update", start, time.perf_counter())

    def _lap(self, row: str, name: str) -> Span:
        start, self._now = self._now, time.perf_counter()
        return Span(row, name, start, self._now)

    def _event(self) -> Any:
        event = self._runner.streams.Event(enable_timing=True)
        event.record(self._runner.compute_stream)
        return event

    def _compare_clocks(self) -> tuple[Any, float, float]:
        """An event, when it completed on our clock, and how uncertain that is."""
        before = time.perf_counter()
        event = self._event()
        try:
            event.synchronize()
        except Exception:
            if not event.query():
                raise  # the waiting has failed, not some step of long ago
        after = time.perf_counter()
        return event, (before + after) / 2, after - before

    def _place(self, record: StepRecord) -> None:
        if record._events is None or not record._events[1].query():
            return
        assert self._reference is not None
        reference, at = self._reference
        start, end = (at + reference.elapsed_time(event) / 1e3 for event in record._events)
        name = f"window of {record.num_steps}" if record.num_steps > 1 else record.kind
        record.device = Span(DEVICE, name, start, end)
        record._events = None


def _headings(process: str, pid: int) -> list[dict[str, Any]]:
    headings: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "args": {"name": process}},
        {"ph": "M", "name": "process_sort_index", "args": {"sort_index": pid}},
    ]
    for tid, row in enumerate(ROWS):
        headings += [
            {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": row}},
            {"ph": "M", "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}},
        ]
    return headings


def _event_of(span: Span, origin: float, record: StepRecord | None) -> dict[str, Any]:
    """A complete event of the Chrome trace format, in microseconds."""
    event: dict[str, Any] = {
        "ph": "X",
        "name": span.name,
        "tid": ROWS.index(span.row),
        "ts": (span.start - origin) * 1e6,
        "dur": (span.end - span.start) * 1e6,
    }
    if record is not None:
        event["name"] = f"{span.name} {record.number}"
        tokens = zip(record.request_ids, record.num_tokens, strict=True)
        event["args"] = {
            "path": record.path,
            "requests": ", ".join(record.request_ids),
            "tokens": ", ".join(f"{request_id}: {count}" for request_id, count in tokens),
        }
    return event
