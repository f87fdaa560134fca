"""The decode loop: synchronous, `materialize` and `gather` in turns, transformers beside them.

First a toy with a set device time: the gain over the synchronous loop at each device time and
length of response, since the gain should fall as device time grows and the async share rise with
the length; then what windows hide of a slow host, and what arrivals cost (`arrivals`). Then
SmolLM2-135M, once with requests that all start and end together, once with
requests that come and go, where `materialize` has to fall back. Every figure is the median of its
rounds, in each of which all take their turn; device idle is the time between two executions by the
runtime's own timestamps.

`NEURON_STREAMS_BENCHMARK_BATCHES=1,8` chooses other batch sizes than 1, 8 and 32.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import neuron_streams
from benchmarks import arrivals
from benchmarks.loads import MODES, Load, Measured, continuous_batching, drive
from benchmarks.overlap import alone as queued
from benchmarks.overlap import compute_intervals, smollm2_model, transformers_generate
from benchmarks.report import Row, percentile, timed
from models.busy import BusyModel

DEVICE_MS, HOST_MS = (1.0, 5.0, 20.0), 2.0
PROMPT = "Tell me a long story about the sea."


@dataclass(frozen=True)
class Plan:
    """How much to measure: `steps` is about how many one run of the sweep takes."""

    lengths: tuple[int, ...] = (8, 64, 512)
    steps: int = 128
    batches: tuple[int, ...] = (1, 8, 32)
    tokens: int = 64
    rounds: int = 3


QUICK = Plan(lengths=(8, 64), steps=32, batches=(1, 8), tokens=12, rounds=1)


@dataclass
class Found:
    """What a picture is drawn from: the sweep by (ms, tokens), tokens/s by load and who."""

    gain: dict[tuple[float, int], float] = field(default_factory=dict)
    share: dict[tuple[float, int], float] = field(default_factory=dict)
    rates: dict[str, dict[str, float]] = field(default_factory=dict)


def in_turns(model: Any, load: Load, rounds: int, label: str) -> dict[str, list[Measured]]:
    runs: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    for _ in tqdm(range(rounds), desc=label, leave=False):
        for mode, options in MODES.items():
            runs[mode].append(drive(model, load, **options))
    return runs


def median_of(runs: Sequence[Measured], what: Callable[[Measured], float]) -> float:
    return statistics.median(map(what, runs))


# The two claims of docs/async-decode.md, "Where it helps", on the toy


def sweep(plan: Plan, found: Found) -> Iterator[Row]:
    for device_ms in DEVICE_MS:
        model = BusyModel(device_ms, HOST_MS)
        for length in plan.lengths:
            where = f"toy {device_ms:g} ms, {length} tokens"
            rounds = 1 if device_ms * length > 5000 else plan.rounds
            runs = in_turns(model, toy_load(length, plan.steps), rounds, where)
            rates = {mode: median_of(each, lambda run: run.rate) for mode, each in runs.items()}
            for mode in ("materialize", "gather"):
                gain = rates[mode] / rates["sync"] - 1
                share = median_of(runs[mode], lambda run: run.async_share)
                yield Row(f"{where}: {mode}, gain over sync", gain * 100, "%")
                yield Row(f"{where}: {mode}, async share", share, "")
                if mode == "materialize":
                    found.gain[device_ms, length], found.share[device_ms, length] = gain, share
    yield from claims(plan, found)


def claims(plan: Plan, found: Found) -> Iterator[Row]:
    """Of `materialize`. Below HOST_MS the host is what takes long, so the gain cannot rise."""
    longest = [found.gain[ms, plan.lengths[-1]] for ms in DEVICE_MS if ms >= HOST_MS]
    yield Row(
        "toy: the gain falls as device time grows",
        longest[-1] / longest[0],
        "of it",
        "< 1",
        longest[-1] < longest[0],
    )
    rising = [found.share[DEVICE_MS[1], length] for length in plan.lengths]
    yield Row(
        "toy: the async share rises with the length",
        rising[-1] - rising[0],
        "more",
        "> 0",
        rising == sorted(rising) and rising[-1] > rising[0],
    )


def toy_load(length: int, steps: int) -> Load:
    """About as many steps whatever the length; lengths differ, so that requests come and go."""
    count = max(6, 4 * steps // length)
    lengths = [max(1, round(length * (0.75 + 0.5 * (n * 7 % count) / count))) for n in range(count)]
    return Load("toy", 4, [[1, 2, 3]] * count, lengths)


# SmolLM2


def language_model(batch: int, plan: Plan, found: Found) -> Iterator[Row]:
    from models.smollm2 import smollm2
    from models.tokenizer import Tokenizer

    folder = smollm2()
    prompt = Tokenizer.load(folder).encode_chat(PROMPT)
    model = smollm2_model(folder, batch)
    model.warm_up(gather=True)
    slots = torch.arange(1, batch + 1, dtype=torch.int32)
    with ExitStack() as stack:
        peers = Peers(folder, prompt, batch, plan.tokens, stack)
        for load in language_loads(prompt, batch, plan):
            label = f"SmolLM2 batch {batch}, {load.name}"
            runs: dict[str, list[Measured]] = {}
            rates: dict[str, list[float]] = {}
            alone: list[float] = []
            for _ in tqdm(range(plan.rounds), desc=label, leave=False):
                alone.append(device_step(model, slots))
                for mode, options in MODES.items():
                    runs.setdefault(mode, []).append(drive(model, load, **options))
                peers.take_turns(load, runs, rates)
            yield from rows_of(label, runs, alone, rates, found)


def language_loads(prompt: Sequence[int], batch: int, plan: Plan) -> list[Load]:
    count = 3 * batch
    lengths = [8 + n * 37 % plan.tokens for n in range(count)]
    return [
        Load("steady", batch, [prompt] * batch, [plan.tokens] * batch),
        Load("coming and going", batch, [prompt] * count, lengths),
    ]


class Peers:
    """transformers on the same weights, prompts and threads, warm."""

    def __init__(
        self, folder: Path, prompt: Sequence[int], batch: int, tokens: int, stack: ExitStack
    ) -> None:
        self.tokens = batch * tokens
        self.generate = transformers_generate(folder, prompt, batch, tokens)
        self.continuous = stack.enter_context(continuous_batching(folder, batch))
        self.continuous(Load("warm", batch, [prompt] * batch, [4] * batch))

    def take_turns(
        self, load: Load, runs: dict[str, list[Measured]], rates: dict[str, list[float]]
    ) -> None:
        """`generate` knows no requests that come and go."""
        found = self.continuous(load)
        runs.setdefault("generate_batch", []).append(found)
        rates.setdefault("generate_batch", []).append(found.rate)
        if load.name == "steady":
            rates.setdefault("generate", []).append(self.tokens / timed(self.generate, 1))


def device_step(model: Any, slots: torch.Tensor) -> float:
    """Seconds of a decode step where the next one is always queued, on slots as a loop has them."""
    positions = torch.full_like(slots, 48)
    queued(lambda ids: model.decode(ids, positions, slots), len(slots), 24)()
    neuron_streams.synchronize()
    ran = compute_intervals()[-20:]
    return statistics.median(b[2] - a[2] for a, b in itertools.pairwise(ran))


def rows_of(
    label: str,
    runs: dict[str, list[Measured]],
    alone: list[float],
    peers: dict[str, list[float]],
    found: Found,
) -> Iterator[Row]:
    beside = {name: statistics.median(rates) for name, rates in peers.items()}
    rates = {mode: median_of(runs[mode], lambda run: run.rate) for mode in MODES}
    found.rates[label] = rates | beside
    for name, rate in beside.items():
        yield Row(f"{label}, transformers {name}", rate, "tokens/s")
    best = max(beside.values())
    for mode, rate in rates.items():
        yield Row(f"{label}, {mode}", rate, "tokens/s")
        budget = (">= 1", rate >= best) if mode != "sync" else ()
        yield Row(f"{label}, {mode}: of the faster peer", rate / best, "", *budget)
        if mode != "sync":
            yield Row(f"{label}, {mode}: of sync", rate / rates["sync"], "")
            share = median_of(runs[mode], lambda run: run.async_share)
            yield Row(f"{label}, {mode}: async share", share, "")
        idle = [gap for run in runs[mode] for gap in run.idle_us]
        yield Row(f"{label}, {mode}: device idle, median", percentile(idle, 0.5), "us")
        ratio = statistics.median(
            run.step / device for run, device in zip(runs[mode], alone, strict=True)
        )
        # Prefills lie between the steps of requests that come and go.
        counts = mode != "sync" and label.endswith("steady")
        budget = ("<= 1.02", ratio <= 1.02) if counts else ()
        yield Row(f"{label}, {mode}: step / device alone", ratio, "", *budget)
    for who in (*MODES, "generate_batch"):
        yield from latencies(f"{label}, {who}", runs[who])


def latencies(label: str, runs: Sequence[Measured]) -> Iterator[Row]:
    first = median_of(runs, lambda run: run.first_token)
    yield Row(f"{label}: time to first token", first * 1e3, "ms")
    gaps = [gap * 1e3 for run in runs for gap in run.between_tokens]
    yield Row(f"{label}: between tokens, p50", percentile(gaps, 0.5), "ms")
    yield Row(f"{label}: between tokens, p99", percentile(gaps, 0.99), "ms")


def run(*, quick: bool = False, plot: str | None = None) -> list[Row]:
    """All rows: half an hour on two cores, most of it batch 32; a minute or two when quick.

    Args:
        quick: One round of short runs, at batch 1 and 8.
        plot: Where to save a picture of it, if anywhere.
    """
    if plot is not None:
        from benchmarks.pictures import save  # before anything is measured
    plan, found = QUICK if quick else Plan(), Found()
    with_model = os.environ.get("NEURON_STREAMS_BENCHMARK_MODEL", "1") != "0"
    rows = list(sweep(plan, found))
    rows += arrivals.run(plan.rounds, with_model=with_model)
    if with_model:
        batches = os.environ.get("NEURON_STREAMS_BENCHMARK_BATCHES")
        for batch in map(int, batches.split(",")) if batches else plan.batches:
            rows += language_model(batch, plan, found)
    if plot is not None:
        save(found, plot)
    return rows
