"""What an eager operator costs the host, beside the same operator on the CPU in the same run.

Each figure is the least of many short runs. "Held" rows have the stream behind a closed gate, so
that nothing but the submission is measured; in "free" rows the device runs meanwhile, and takes
part of the processor where there are few.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import neuron_streams
from benchmarks.report import Row
from neuron_streams.testing import Gate

CALLS = 800  # at a time: a device has 1 024 commands outstanding at most
BUDGETS = {"add": 5, "mm": 5, "view": 2, "add_": 5, "cat": 5, "linear": 5, "layer_norm": 5}
LAYERS, MODEL_BUDGET, BUSY_BUDGET, COMPILE_BUDGET = 30, 3.0, 1.1, 20.0


def run(quick: bool = False) -> list[Row]:
    rounds = 5 if quick else 40
    found = {name: costs(name, rounds) for name in BUDGETS}
    rows = []
    for name, (held, free, host) in found.items():
        budget = BUDGETS[name]
        beside = f"free {free:.2f} us, CPU eager {host:.2f} us"
        rows.append(Row(f"{name}, held", held, "us", f"{budget} us", held <= budget, beside))
    rows += whole_model(rounds)
    rows += busy_host(3 if quick else 12)
    return rows if quick else [*rows, compile_time()]


def operators(device: str) -> dict[str, Callable[[], object]]:
    """Calls on tiny tensors of a device."""
    x, y = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device)
    weight, bias = torch.ones(8, 8, device=device), torch.ones(8, device=device)
    functional = nn.functional
    return {
        "add": lambda: torch.add(x, y),
        "mm": lambda: torch.mm(x, y),
        "view": lambda: x.view(64),
        "add_": lambda: y.add_(x),
        "cat": lambda: torch.cat((x, y)),
        "linear": lambda: functional.linear(x, weight, bias),
        "layer_norm": lambda: functional.layer_norm(x, (8,), bias, bias),
    }


def costs(name: str, rounds: int) -> tuple[float, float, float]:
    """Microseconds of a call: with the device held, with it free, and on the CPU."""
    call = operators("neuron")[name]
    return (
        least(call, rounds, Gate),
        least(call, rounds),
        least(operators("cpu")[name], rounds),
    )


def least(
    call: Callable[[], object],
    rounds: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    calls: int = CALLS,
) -> float:
    """Microseconds of one of the calls, which are made inside of `around`."""
    best = float("inf")
    with torch.no_grad():
        for _ in range(rounds):
            with around():
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                best = min(best, time.perf_counter() - start)
            neuron_streams.synchronize()
    return best / calls * 1e6


class Layer(nn.Module):
    """Norm, linear, activation and the way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.inner(x)
        return x + inner


def model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(LAYERS)))


def whole_model(rounds: int) -> list[Row]:
    """To enqueue a forward pass of tiny tensors, against the CPU's whole time for it."""
    net, x = model(16), torch.ones(4, 16)
    host = least(lambda: net(x), rounds, calls=1)
    net, x = net.to("neuron"), x.to("neuron")
    held = least(lambda: net(x), rounds, Gate, calls=1)
    ratio, beside = held / host, f"{held:.0f} us to enqueue, CPU eager {host:.0f} us"
    return [
        Row(
            f"forward of {LAYERS} layers, enqueued, against the CPU's whole time",
            ratio,
            "ratio",
            f"{MODEL_BUDGET:g}",
            ratio <= MODEL_BUDGET,
            beside,
        )
    ]


def busy_host(rounds: int) -> list[Row]:
    """The device's time for a queued forward pass: the host computes in Python, or sleeps."""
    net, x = model(256).to("neuron"), torch.ones(64, 256, device="neuron")
    times = {False: float("inf"), True: float("inf")}
    with torch.no_grad():
        net(x)
        for _ in range(rounds):
            for busy in times:
                times[busy] = min(times[busy], device_time(net, x, busy))
    ratio = times[True] / times[False]
    beside = f"{times[True]:.2f} ms busy, {times[False]:.2f} ms idle"
    what = "device time of a forward, host busy against host idle"
    return [Row(what, ratio, "ratio", f"{BUSY_BUDGET:g}", ratio <= BUSY_BUDGET, beside)]


def device_time(net: nn.Module, x: torch.Tensor, busy: bool) -> float:
    """Milliseconds between events around a forward pass that is queued as a whole."""
    first, last = (neuron_streams.Event(enable_timing=True) for _ in range(2))
    with Gate():
        first.record()
        net(x)
        last.record()
    while busy and not last.query():
        sum(range(1000))
    last.synchronize()
    return first.elapsed_time(last)


def compile_time() -> Row:
    """The first use of all, with an empty cache, on as many processors as there are."""
    code = (
        "import time, torch; start = time.perf_counter(); import neuron_streams; "
        "neuron_streams.init(); print(time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NEURON_STREAMS_CACHE": folder}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    seconds = float(done.stdout)
    budget = f"{COMPILE_BUDGET:g} s"
    met = seconds <= COMPILE_BUDGET
    return Row("first use, compiled", seconds, "s", budget, met, f"{os.cpu_count()} processors")
