"""How long a device stands idle between two queued executions, and what a call costs the host.

The emulated runtime, and beside it the same compiled step behind
`concurrent.futures` and behind the queue of a child process. Every step is queued before the first
one ends; then the host does nothing, or is half busy or always busy in Python, with and without a
thread that waits for each step.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import torch

import neuron_streams
from benchmarks.report import Row, percentile
from models.busy import spin
from neuron_streams._context import core
from neuron_streams._runtime.port import Payload
from neuron_streams._runtime.program import load_on_cpu
from neuron_streams.testing import EmulatedRuntime, Gate, use_runtime

STEPS = 150  # executions in a row, of about 2 ms
CALLS, ROUNDS = 40, 40  # the best of the rounds counts: the machine has other things to do
TURNS = 7  # of what is compared; the median turn counts
HOSTS = ("idle", "half busy", "always busy")
Span = tuple[float, float]


def step(x: torch.Tensor, w: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    """Some 2 ms on one core."""
    for _ in range(5):
        x = torch.tanh(x @ w)
    return x + sum(more)


def step_of_six(
    x: torch.Tensor,
    w: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> torch.Tensor:
    return step(x, w, a, b, c, d)


def inputs(rows: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(512, 512, generator=generator) / 23
    return [torch.randn(rows, 512, generator=generator), weight, *[torch.zeros(rows, 512)] * 4]


def act(host: str, over: Callable[[], bool], wait: Callable[[], object]) -> None:
    """Be the host until all is done."""
    if host == "idle":
        wait()
    while not over():
        if host == "half busy":
            time.sleep(0.001)
        spin(0.001)


def gap_rows(who: str, spans: Sequence[Span], budget: float | None) -> Iterator[Row]:
    idle = [(b[0] - a[1]) * 1e6 for a, b in itertools.pairwise(spans)]
    median = statistics.median(idle)
    said = "" if budget is None else f"<= {budget:g}"
    length = statistics.median((end - start) * 1e3 for start, end in spans)
    yield Row(
        f"idle between steps, {who}",
        median,
        "us",
        said,
        None if budget is None else median <= budget,
        f"p90 {percentile(idle, 0.9):.1f}, p99 {percentile(idle, 0.99):.1f}, step {length:.2f} ms",
    )


# -- the runtime ------------------------------------------------------------------------------


class Waiter:
    """A thread that waits for each event it is given, as an output thread does."""

    def __init__(self) -> None:
        self.events: SimpleQueue[neuron_streams.Event | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while (event := self.events.get()) is not None:
            event.synchronize()

    def close(self) -> None:
        self.events.put(None)
        self.thread.join()


def spans_on(
    runtime: EmulatedRuntime, exe: neuron_streams.Executable, host: str, waiting: bool
) -> list[Span]:
    tensors = [tensor.to("neuron") for tensor in inputs()]
    stream, waiter = neuron_streams.Stream(), Waiter() if waiting else None
    with neuron_streams.stream(stream):
        for _ in range(STEPS):
            tensors[0] = exe(*tensors)
            if waiter is not None:
                waiter.events.put(stream.record_event())
    act(host, stream.query, stream.synchronize)
    if waiter is not None:
        waiter.close()
    ran = [item for item in runtime.busy_intervals() if item[4] == exe.name]
    return [(start, end) for _, _, start, end, _ in ran[-STEPS:]]


def best(call: Callable[[], object], before: Callable[[], object] = int) -> float:
    """Microseconds of one call on a device that `before` has put into some state."""
    times = []
    for _ in range(ROUNDS):
        before()
        start = time.perf_counter()
        kept = [call() for _ in range(CALLS)]
        times.append((time.perf_counter() - start) / CALLS)
        neuron_streams.synchronize()
        del kept
    return min(times) * 1e6


def cost_rows(runtime: EmulatedRuntime) -> Iterator[Row]:
    tiny = [tensor[:1].contiguous() for tensor in inputs(1)]
    tiny[1] = inputs()[1]
    exe = neuron_streams.compile(step_of_six, tiny, name="tiny_step")
    long = neuron_streams.compile(step_of_six, inputs(), name="step")
    tensors = [tensor.to("neuron") for tensor in tiny]
    others = [tensor.to("neuron") for tensor in inputs()]
    lane = runtime.open_lane(0)
    gates: list[Gate] = []

    def held() -> None:
        while gates:
            gates.pop()
        gates.append(Gate())

    def opened() -> float:
        times = []
        for _ in range(ROUNDS):
            held()
            start = time.perf_counter()
            kept = [exe(*tensors) for _ in range(CALLS)]
            times.append((time.perf_counter() - start) / CALLS)
            gates[-1].open()
            neuron_streams.synchronize()
            del kept
        return min(times) * 1e6

    def busy() -> None:
        for _ in range(2):
            long(*others)

    def alone() -> float:
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            kept = exe(*tensors)
            times.append(time.perf_counter() - start)
            neuron_streams.synchronize()
            del kept
        return statistics.median(times) * 1e6

    costs = {"held": opened(), "busy": best(lambda: exe(*tensors), busy)}
    for state, cost in costs.items():
        what = f"executable call, 6 tensors, device {state}"
        yield Row(what, cost, "us", "<= 15", cost <= 15)
    yield Row("executable call, 6 tensors, device idle", alone(), "us")
    marker = core().Marker()
    yield Row("marker submitted", best(lambda: runtime.submit(lane, marker)), "us")


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds that STEPS rounds of calls take, everything included."""
    neuron_streams.synchronize(0)
    neuron_streams.synchronize(1)
    start = time.perf_counter()
    for _ in range(STEPS // 2):
        for call in calls:
            call()
    neuron_streams.synchronize(0)
    neuron_streams.synchronize(1)
    return time.perf_counter() - start


def overlap_rows(exe: neuron_streams.Executable) -> Iterator[Row]:
    def on(device: int, stream: neuron_streams.Stream) -> Callable[[], object]:
        tensors = [tensor.to(f"neuron:{device}") for tensor in inputs()]

        def call() -> object:
            with neuron_streams.stream(stream):
                return exe(*tensors)

        return call

    one = on(0, neuron_streams.Stream(0))
    pairs = {
        "two devices": on(1, neuron_streams.Stream(1)),
        "two streams of one device": on(0, neuron_streams.Stream(0)),
    }
    for where, other in pairs.items():
        speeds = [2 * seconds([one]) / seconds([one, other]) for _ in range(TURNS)]
        speed = statistics.median(speeds)
        yield Row(f"two executables on {where}: overlap", speed, "times")


def rows_of() -> Iterator[Row]:
    with use_runtime(EmulatedRuntime(2)) as runtime:
        exe = neuron_streams.compile(step_of_six, inputs(), name="step")
        for waiting in (False, True):
            for host in HOSTS:
                who = f"host {host}{', waited for' if waiting else ''}"
                spans = spans_on(runtime, exe, host, waiting)
                yield from gap_rows(who, spans, 60.0 if waiting else 13.0)
        yield from cost_rows(runtime)
        yield from overlap_rows(exe)


# -- the peers --------------------------------------------------------------------------------


def steps_of(payload: Payload) -> Callable[[], Span]:
    """A function that runs the compiled step once, without the GIL, and says when."""
    handle, given = load_on_cpu(payload, 0), inputs()

    def run_one() -> Span:
        start = time.perf_counter()
        handle.run(given)
        return start, time.perf_counter()

    run_one()
    return run_one


def pool_rows(payload: Payload) -> Iterator[Row]:
    run_one = steps_of(payload)
    for host in HOSTS:
        with ThreadPoolExecutor(1) as pool:
            futures = [pool.submit(run_one) for _ in range(STEPS)]
            act(host, futures[-1].done, futures[-1].result)
        spans = [future.result() for future in futures]
        yield from gap_rows(f"concurrent.futures, host {host}", spans, None)


def child(path: str, pipe: Connection) -> None:
    """Runs a step for each message, and says at the end when each ran."""
    torch.set_num_threads(1)
    run_one = steps_of(neuron_streams.Executable.load(path)._payload)
    pipe.send(None)
    spans = []
    while pipe.recv():
        spans.append(run_one())
    pipe.send(spans)


def child_rows(exe: neuron_streams.Executable) -> Iterator[Row]:
    context = multiprocessing.get_context("spawn")
    for host in HOSTS:
        with TemporaryDirectory() as folder:
            path = str(Path(folder) / "step.neuron")
            exe.save(path)
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(path, theirs))
            process.start()
            ours.recv()
        for more in [True] * STEPS + [False]:
            ours.send(more)
        act(host, ours.poll, functools.partial(ours.poll, 60))
        spans = ours.recv()
        process.join()
        yield from gap_rows(f"child process and a pipe, host {host}", spans, None)


def run() -> Sequence[Row]:
    """All rows; some 30 seconds, and the compiler's the first time."""
    rows = list(rows_of())
    with use_runtime(EmulatedRuntime(2)):
        exe = neuron_streams.compile(step_of_six, inputs(), name="step")
        rows += pool_rows(exe._payload)
        rows += child_rows(exe)
    return rows
