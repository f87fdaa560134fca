"""How much host work the asynchronous loop hides behind the device.

A toy model with a set device time and a set host time per step, then SmolLM2. Device time is a
compiled executable at work, host time a Python loop that holds the GIL, and device idle comes from
the runtime's own timestamps. Overlap efficiency is (sync - async) / (sync - device alone), each the
median time from one step's start to the next; the three take turns, and the median turn counts.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

import neuron_streams
from benchmarks.report import Row, percentile, timed
from models.busy import BusyModel, BusyStep, spin
from neuron_streams._runtime import process
from neuron_streams._runtime.emulated import EmulatedRuntime
from neuron_streams._runtime.port import Unit
from neuron_streams.decode import DecodeLoop, SamplingParams
from neuron_streams.testing import is_ready, use_runtime

if TYPE_CHECKING:
    from models.llama import Llama

DEVICE_MS, HOST_MS = 5.0, 2.0
ROUNDS, STEPS, WARM = 31, 24, 8  # short turns: the speed of the processor drifts in seconds


def compute_intervals() -> list[tuple[int, int, float, float, str]]:
    """What the compute units ran lately, oldest first."""
    return [x for x in process.runtime().busy_intervals() if x[1] == Unit.COMPUTE]


@dataclass(frozen=True)
class Run:
    """One run: milliseconds from step to step, device idle between steps in µs, async share."""

    step_ms: float
    idle_us: list[float]
    async_share: float = 1.0
    tokens_per_second: float = 0.0

    @property
    def idle(self) -> float:
        """Median device idle between steps, in µs."""
        return statistics.median(self.idle_us)


def measure(drive: Callable[[], tuple[float, float]], steps: int) -> Run:
    """Run `drive`, which returns (async share, tokens/s); look at the device's last steps."""
    share, rate = drive()
    neuron_streams.synchronize()
    ran = compute_intervals()[-steps:]
    starts = [start for _, _, start, _, _ in ran]
    gaps = [(b[2] - a[3]) * 1e6 for a, b in itertools.pairwise(ran)]
    periods = [b - a for a, b in itertools.pairwise(starts)]
    return Run(statistics.median(periods) * 1e3, gaps, share, rate)


def by_loop(
    model: Any, prompts: Sequence[Sequence[int]], steps: int, asynchronous: bool
) -> Callable[[], tuple[float, float]]:
    """Generate `steps` tokens for each prompt; the async share is that of decode steps."""

    def drive() -> tuple[float, float]:
        params = SamplingParams(max_tokens=steps, ignore_eos=True)
        with DecodeLoop(model, async_scheduling=asynchronous) as loop:
            start = time.perf_counter()
            for _ in loop.generate(prompts, params):
                pass
            seconds = time.perf_counter() - start
            stats = loop.stats
            decodes = stats.async_steps + stats.sync_fallback_steps
            decodes -= stats.fallback_reasons["prefill"]
            return stats.async_steps / max(1, decodes), len(prompts) * steps / seconds

    return drive


def alone(step: Callable[[torch.Tensor], torch.Tensor], rows: int, steps: int) -> Any:
    """The device with nothing to wait for: `steps` executions queued one behind the other."""

    def drive() -> tuple[float, float]:
        future = step(torch.zeros(rows, dtype=torch.int32))
        for _ in range(steps - 1):
            future = step(future)
        future.cpu()
        return 1.0, 0.0

    return drive


def compare(
    label: str, model: Any, prompts: Sequence[Sequence[int]], steps: int, rounds: int
) -> Iterator[Row]:
    rows = model.batch_buckets[0]
    positions = torch.full((rows,), 48, dtype=torch.int32)
    numbers = positions, torch.arange(1, rows + 1, dtype=torch.int32)  # slots as a loop has them
    runs: dict[str, list[Run]] = {"device": [], "sync": [], "async": []}
    still = getattr(model, "step", model.decode)
    drives = {
        "device": alone(lambda ids: still(ids, *numbers), rows, steps),
        "sync": by_loop(model, prompts, steps, asynchronous=False),
        "async": by_loop(model, prompts, steps, asynchronous=True),
    }
    for _ in tqdm(range(rounds), desc=label, leave=False):
        for name, drive in drives.items():
            runs[name].append(measure(drive, steps - WARM))
    yield from rows_of(label, runs)


def rows_of(label: str, runs: dict[str, list[Run]]) -> Iterator[Row]:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    turns = list(zip(runs["device"], runs["sync"], runs["async"], strict=True))
    for name, found in runs.items():
        yield Row(f"{label}: {name}, one step", median([run.step_ms for run in found]), "ms")
    efficiency = [(s.step_ms - a.step_ms) / max(1e-9, s.step_ms - d.step_ms) for d, s, a in turns]
    by_idle = median([(s.idle - a.idle) / max(1e-9, s.idle - d.idle) for d, s, a in turns])
    ratio = median([a.step_ms / d.step_ms for d, _, a in turns])
    worth = median(efficiency)
    goal = {"toy": 0.98, "toy, Python worker": 0.95}.get(label)
    budget = () if goal is None else (f">= {goal}", worth >= goal)
    yield Row(f"{label}: overlap efficiency", worth, "", *budget)
    # The device's own speed drifts by some percent between turns; its idle time does not.
    yield Row(f"{label}: the same by device idle alone", by_idle, "")
    most = 1.05 if "Python" in label else 1.02
    yield Row(f"{label}: async step / device alone", ratio, "", f"<= {most}", ratio <= most)
    yield Row(
        f"{label}: async share of decode steps", median([a.async_share for _, _, a in turns]), ""
    )
    for name in ("sync", "async"):
        idle = [gap for run in runs[name] for gap in run.idle_us]
        yield Row(
            f"{label}: device idle between steps, {name}, median", percentile(idle, 0.5), "us"
        )
        yield Row(f"{label}: device idle between steps, {name}, p99", percentile(idle, 0.99), "us")


def gil_share() -> Iterator[Row]:
    """How much of its solo speed a Python thread keeps while an executable runs beside it."""
    ids = torch.zeros(4, dtype=torch.int32)
    inputs = (ids, ids, ids, torch.randn(256, 256), ids)
    busy = neuron_streams.compile(
        BusyStep(200), inputs, mutates=("last_sampled",), name="busy step of 200 layers"
    )
    there = [tensor.to("neuron") for tensor in inputs[3:]]

    def beside() -> tuple[int, float]:
        start = time.perf_counter()
        done = busy(ids, ids, ids, *there)
        count = 0
        while not is_ready(done):
            count += spin(0.002)
        return count, time.perf_counter() - start

    beside()
    shares = []
    for _ in range(9):
        count, seconds = beside()
        shares.append(count / max(1, spin(seconds)))
    share = statistics.median(shares)
    yield Row(
        "iterations of another Python thread beside an executable",
        share,
        "of solo",
        ">= 0.9",
        share >= 0.9,
    )


def smollm2_model(folder: Path, batch: int) -> Llama:
    """The language model with one decode bucket, compiled."""
    from models.loader import load

    model = load(
        folder,
        max_length=512,
        num_slots=batch + 4,
        batch_buckets=(batch,),
        prompt_buckets=(64, 512),
        length_buckets=(128,),
    )
    model.warm_up()
    return model


def language_model(tokens: int = 64) -> Iterator[Row]:
    """SmolLM2-135M at batch 1 and 8: overlap, tokens/s, and transformers' `generate` beside it."""
    from models.smollm2 import smollm2
    from models.tokenizer import Tokenizer

    folder = smollm2()
    prompt = Tokenizer.load(folder).encode_chat("Tell me a long story about the sea.")
    for batch in (1, 8):
        label = f"SmolLM2 batch {batch}"
        model = smollm2_model(folder, batch)
        yield from compare(label, model, [prompt] * batch, tokens, rounds=3)
        peer, ours = [], []
        generate = transformers_generate(folder, prompt, batch, tokens)
        loop = by_loop(model, [prompt] * batch, tokens, asynchronous=True)
        for _ in range(3):
            peer.append(batch * tokens / timed(generate, 1))
            ours.append(loop()[1])
        rate, beside = statistics.median(ours), statistics.median(peer)
        yield Row(
            f"{label}: prefill and {tokens} tokens each",
            rate,
            "tokens/s",
            ">= peer",
            rate >= beside,
            f"transformers generate {beside:.1f}",
        )


def transformers_generate(
    folder: Path, prompt: Sequence[int], batch: int, tokens: int
) -> Callable[[], object]:
    """The peer, warm: same weights, dtype, prompts and threads; static cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([list(prompt)] * batch)

    def generate() -> object:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
        )

    generate()
    return generate


def run() -> list[Row]:
    """All rows. Takes a minute or two, most of it the language model."""
    rows = list(gil_share())
    with use_runtime(EmulatedRuntime(1)):
        model = BusyModel(DEVICE_MS, HOST_MS)
        rows += compare("toy", model, [[1, 2, 3]] * 4, STEPS, ROUNDS)
    if os.environ.get("NEURON_STREAMS_BENCHMARK_MODEL", "1") != "0":
        rows += language_model()
    return rows
