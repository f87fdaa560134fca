"""The runtime on libnrt, against the test double of the library: never on hardware as yet.

Executions of 1 ms that depend on each other. How long does the device stand idle between two of
them, when the host waits, or works half of the time; what does a submission cost the host; and
beside them, in the same run, a naive loop that waits for each completion before it schedules the
next. The device's clock is the double's: an execution that was queued in time begins when the one
before has ended.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.report import Row, percentile
from models.busy import spin
from neuron_streams._context import context, core
from neuron_streams._runtime.port import Ticket
from neuron_streams.testing import use_runtime
from tests.runtime.nrt.doubled import ABIS, DoubleRuntime, payload

STEPS, SECONDS = 200, 0.001
CALLS, ROUNDS = 40, 20
WAITERS, TURNS = 16, 15
BUDGETS = {"idle": 15.0, "half busy": 50.0}
INPUTS = dict.fromkeys("xabcde", 256)


class Chain:
    """Executions of six inputs, each of which reads what the one before made."""

    def __init__(self, runtime: Any, seconds: float) -> None:
        self.runtime = runtime
        self.lane = self.runtime.open_lane(0)
        self.handle = self.runtime.load(payload("sum", INPUTS, {"y": 256}, seconds), 0)
        self.views = [self._view() for _ in INPUTS]
        for view in self.views:
            view.on_host().zero_()

    def _view(self) -> Any:
        return core().View(context().port.allocate(0, 1024), torch.float32, (256,), (1,))

    def step(self) -> Ticket:
        made = self._view()
        command = core().Execute(self.handle, self.views, [made])
        self.views = [made, *self.views[1:]]
        ticket: Ticket = self.runtime.submit(self.lane, command)
        return ticket


def idle_rows(who: str, runtime: Any, budget: float | None) -> Iterator[Row]:
    ran = [record for record in runtime.double.history() if record.xu == runtime.double.compute]
    idle = [max(b.began - a.ended, 0.0) * 1e6 for a, b in itertools.pairwise(ran[-STEPS:])]
    median = statistics.median(idle)
    yield Row(
        f"idle between executions, {who}",
        median,
        "us",
        "" if budget is None else f"<= {budget:g}",
        None if budget is None else median <= budget,
        f"p90 {percentile(idle, 0.9):.1f}, p99 {percentile(idle, 0.99):.1f}",
    )


def chain(runtime: Any, host: str) -> None:
    """Queue all steps, and be the host until they have run."""
    steps = Chain(runtime, SECONDS)
    for _ in range(STEPS):
        last = steps.step()
    if host == "idle":
        runtime.wait(last)
    while runtime.completed(last.lane) < last.value:
        time.sleep(SECONDS)
        spin(SECONDS)


def naive(runtime: Any) -> None:
    steps = Chain(runtime, SECONDS)
    for _ in range(STEPS):
        runtime.wait(steps.step())


def rows_of_idle(abi: str) -> Iterator[Row]:
    for host, budget in BUDGETS.items():
        with use_runtime(DoubleRuntime(1, abi)) as runtime:
            chain(runtime, host)
            yield from idle_rows(f"SDK {abi}, host {host}", runtime, budget)
    with use_runtime(DoubleRuntime(1, abi)) as runtime:
        naive(runtime)
        yield from idle_rows(f"SDK {abi}, a loop that waits for each", runtime, None)


def best(call: Callable[[], object], after: Callable[[], object]) -> float:
    """Microseconds of one call; `after` clears up behind each round."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
        after()
    return min(times) * 1e6


def rows_of_cost(abi: str) -> Iterator[Row]:
    for what, in_flight in (("scheduled at once", 63), ("behind others", 1)):
        with use_runtime(DoubleRuntime(1, abi, in_flight=in_flight)) as runtime:
            double, steps = runtime.double, Chain(runtime, 0.0)
            double.set_depth(2 * CALLS)
            double.hold(0, double.compute, 0)
            if in_flight == 1:
                steps.step()

            def let_go(steps: Chain = steps, double: Any = double) -> None:
                double.release(0, double.compute, 0, -1)
                last = steps.runtime.submitted(steps.lane)
                steps.runtime.wait(Ticket(steps.lane, last))
                double.hold(0, double.compute, 0)

            yield Row(f"submit, 6 tensors, SDK {abi}, {what}", best(steps.step, let_go), "us")
            double.release(0, double.compute, 0, -1)


def rows_of_waiters(abi: str) -> Iterator[Row]:
    """Many threads wait for one execution: how long until the last of them is awake."""
    with use_runtime(DoubleRuntime(1, abi)) as runtime:
        late, registered = [], 0
        steps, double = Chain(runtime, 0.0), runtime.double
        for _ in range(TURNS):
            double.hold(0, double.compute, 0)
            before = double.count("registered") + double.count("handles")
            ticket, awake, all_are = steps.step(), list[float](), threading.Lock()
            all_are.acquire()

            def wait(
                ticket: Ticket = ticket, awake: list[float] = awake, all_are: Any = all_are
            ) -> None:
                runtime.wait(ticket)
                awake.append(time.monotonic())
                with all_are:  # or the others would wait for this thread's end as well
                    pass

            threads = [threading.Thread(target=wait) for _ in range(WAITERS)]
            for thread in threads:
                thread.start()
            time.sleep(0.01)
            double.release(0, double.compute, 0, -1)
            while len(awake) < WAITERS:
                time.sleep(0.001)
            all_are.release()
            for thread in threads:
                thread.join()
            late.append((max(awake) - double.history()[-1].ended) * 1e3)
            after = double.count("registered") + double.count("handles")
            registered = max(registered, after - before)
    median = statistics.median(late)
    beside = f"worst {max(late):.2f}, {registered} registrations at most"
    yield Row(f"{WAITERS} waiters awake, SDK {abi}", median, "ms", "<= 1", median <= 1, beside)


def run() -> Sequence[Row]:
    """All rows; some 10 seconds."""
    parts = rows_of_idle, rows_of_cost, rows_of_waiters
    return [row for abi in ABIS for part in parts for row in part(abi)]
