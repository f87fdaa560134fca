"""What the stream functions cost the host, and whether many streams cost more than few.

Each figure is the least of many short runs, which is what the function costs when nobody else has
the processor. "Held" rows have the stream behind a closed gate, so nothing is completed yet.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

import neuron_streams
from benchmarks.report import Row
from neuron_streams.testing import Gate

CALLS, ROUNDS = 1000, 300
BUDGETS = {
    "event record": 0.5,
    "wait_event": 0.5,
    "event query": 0.5,
    "current_stream": 0.3,
    "with stream(s)": 1.5,
    "wait_stream": 1.0,
}
STREAMS = 1000


def run() -> list[Row]:
    idle = costs(neuron_streams)
    s = neuron_streams.Stream()
    with Gate(s):
        held = costs(neuron_streams, s)
    s.synchronize()
    peer = costs(torch.cuda) if torch.cuda.is_available() else {}
    rows = []
    for state, found in (("idle", idle), ("held", held)):
        for name, cost in found.items():
            budget = BUDGETS[name]
            beside = f"torch.cuda {peer[name]:.2f} us" if name in peer else ""
            rows.append(Row(f"{name}, {state}", cost, "us", f"{budget} us", cost <= budget, beside))
    return rows + growth()


def least(body: Callable[[int], object]) -> float:
    """Microseconds of one of the CALLS calls that `body` makes."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        body(CALLS)
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def costs(streams: ModuleType, s: Any = None) -> dict[str, float]:
    """The cost of each function, of a stream namespace; `s` may be held."""
    s, t, e = s or streams.Stream(), streams.Stream(), streams.Event()
    e.record(s)
    current, enter = streams.current_stream, streams.stream

    def record(n: int) -> None:
        for _ in range(n):
            e.record(s)

    def wait_event(n: int) -> None:
        for _ in range(n):
            t.wait_event(e)

    def query(n: int) -> None:
        for _ in range(n):
            e.query()

    def current_stream(n: int) -> None:
        for _ in range(n):
            current()

    def with_stream(n: int) -> None:
        for _ in range(n):
            with enter(s):
                pass

    def wait_stream(n: int) -> None:
        for _ in range(n):
            t.wait_stream(s)

    bodies = (record, wait_event, query, current_stream, with_stream, wait_stream)
    return {name: least(body) for name, body in zip(BUDGETS, bodies, strict=True)}


def storm(commands: int, count: int = STREAMS) -> tuple[float, float]:
    """Microseconds and bytes per command: submit to so many held streams, open, and drain."""
    streams = [neuron_streams.Stream() for _ in range(count)]
    with Gate(streams[0]) as gate:
        for s in streams[1:]:
            s.wait_stream(streams[0])
        gc.collect()
        memory, start = resident(), time.perf_counter()
        for i in range(commands):
            with neuron_streams.stream(streams[i % count]):
                neuron_streams._sleep(0)
        grown = resident() - memory
        gate.open()
        neuron_streams.synchronize()
        seconds = time.perf_counter() - start
    return seconds / commands * 1e6, grown / commands


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth() -> list[Row]:
    storm(STREAMS)  # threads and pools exist from here on
    few, many = storm(10_000), storm(100_000)
    one, same = storm(10_000, 1)[0], few[0]
    return [
        Row("1000 streams, 10 000 commands, each", same, "us", beside=f"one stream: {one:.1f} us"),
        Row("  against one stream", same / one, "ratio", "1.2", same <= 1.2 * one),
        Row("1000 streams, 100 000 commands, each", many[0], "us"),
        Row(
            "  time of one, against 10 000",
            many[0] / few[0],
            "ratio",
            "1.3",
            many[0] < 1.3 * few[0],
        ),
        Row("  memory of one while pending", many[1], "bytes"),
        Row("  memory of one, against 10 000", many[1] / max(few[1], 1.0), "ratio"),
    ]
