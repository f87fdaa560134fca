"""What requests that arrive cost those that run, and what windows hide.

Eight requests run while sixteen prompts of 30 to 400 tokens arrive in a seeded Poisson stream: the
loop with a bound on the tokens of a step, and transformers' continuous batching on the same
arrivals. CTranslate2 stands beside where it is installed, as a row without a budget: it runs the
same prompts, all there at the start. And a toy whose host needs longer than its device, one step a
launch and eight.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import neuron_streams
from benchmarks.loads import transformers_manager
from benchmarks.overlap import compute_intervals
from benchmarks.report import Row, percentile
from models.busy import BusyModel
from neuron_streams.decode import DecodeLoop, SamplingParams

ROWS, BUCKETS, BOUND = 8, (32, 128, 512), 32
"""A bound so low that a step with prompts takes about twice as long as one without."""

STEPS_PER_LAUNCH, DEVICE_MS, HOST_MS = 8, 1.0, 5.0


@dataclass(frozen=True)
class Arrival:
    """A prompt, how many tokens it gets, and when it comes, in seconds from the start."""

    prompt: Sequence[int]
    max_tokens: int
    at: float


@dataclass
class Served:
    """Seconds: of all, to each first token, between tokens; and tokens given."""

    seconds: float
    first_token: list[float] = field(repr=False)
    between_tokens: list[float] = field(repr=False)
    tokens: int = 0

    @classmethod
    def of(cls, start: float, arrivals: Sequence[Arrival], times: Sequence[Sequence[float]]) -> Any:
        """Of the moments at which the tokens of each came."""
        return cls(
            max(each[-1] for each in times) - start,
            [each[0] - start - one.at for one, each in zip(arrivals, times, strict=True)],
            [b - a for each in times for a, b in itertools.pairwise(each)],
            sum(map(len, times)),
        )


def poisson(count: int, mean_interval: float, seed: int = 0) -> list[Arrival]:
    """Eight that are there at the start, short ones, and `count` that arrive."""
    rng, at = random.Random(seed), 0.0
    made = [arrival(rng, rng.randint(30, 60), 0.0) for _ in range(ROWS)]
    for _ in range(count):
        at += rng.expovariate(1 / mean_interval)
        made.append(arrival(rng, rng.randint(30, 400), at))
    return made


def arrival(rng: random.Random, length: int, at: float) -> Arrival:
    return Arrival([rng.randrange(100, 20_000) for _ in range(length)], rng.randint(24, 64), at)


def by_loop(model: Any, arrivals: Sequence[Arrival], **options: Any) -> Served:
    """Serve them on our loop."""
    times: list[list[float]] = [[] for _ in arrivals]
    waiting = list(enumerate(arrivals))
    with DecodeLoop(model, policy="gather", **options) as loop:
        start = time.perf_counter()
        while waiting or loop.has_unfinished_requests():
            while waiting and waiting[0][1].at <= time.perf_counter() - start:
                number, one = waiting.pop(0)
                params = SamplingParams(max_tokens=one.max_tokens, ignore_eos=True)
                loop.add_request(str(number), one.prompt, params, arrived_at=start + one.at)
            if not loop.has_unfinished_requests():
                time.sleep(max(0.0, start + waiting[0][1].at - time.perf_counter()))
            for output in loop.step():
                now = time.perf_counter()
                times[int(output.request_id)] += [now] * len(output.new_token_ids)
    served: Served = Served.of(start, arrivals, times)
    return served


def by_transformers(manager: Any, arrivals: Sequence[Arrival]) -> Served:
    """The same on `generate_batch`'s manager, which works on a thread of its own."""
    start, times = time.perf_counter(), dict[str, list[float]]()
    names = []
    for one in arrivals:
        time.sleep(max(0.0, start + one.at - time.perf_counter()))
        names.append(
            manager.add_request(
                list(one.prompt), max_new_tokens=one.max_tokens, record_timestamps=True
            )
        )
    while len(times) < len(arrivals):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers failed: {result.error}")
            times[result.request_id] = result.timestamps
    served: Served = Served.of(start, arrivals, [times[name] for name in names])
    return served


def language_model(rounds: int, count: int = 16, mean_interval: float = 0.5) -> Iterator[Row]:
    """The rows of SmolLM2-135M."""
    from models.loader import load
    from models.smollm2 import smollm2

    folder = smollm2()
    model = load(
        folder,
        max_length=512,
        num_slots=ROWS + 4,
        batch_buckets=(ROWS,),
        prompt_buckets=BUCKETS,
        length_buckets=(128,),
    )
    start = time.perf_counter()
    model.warm_up(gather=True)
    yield Row("arrivals: compiling, or loading what was compiled", time.perf_counter() - start, "s")
    arrivals = poisson(count, mean_interval)
    found: dict[str, list[Served]] = {"bounded": [], "unbounded": [], "generate_batch": []}
    with transformers_manager(folder, ROWS) as manager:
        by_transformers(manager, arrivals[:2])
        for _ in range(rounds):
            bounded = by_loop(model, arrivals, max_num_batched_tokens=BOUND + ROWS)
            found["bounded"].append(bounded)
            found["unbounded"].append(by_loop(model, arrivals))
            found["generate_batch"].append(by_transformers(manager, arrivals))
    yield from rows_of(found)
    yield from by_ctranslate2(folder, arrivals)


def rows_of(found: dict[str, list[Served]]) -> Iterator[Row]:
    first = {who: first_token(runs) for who, runs in found.items()}
    for who, runs in found.items():
        gaps = [gap for run in runs for gap in run.between_tokens]
        p50, p99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
        label = f"arrivals, {who}"
        is_ours = who == "bounded"
        yield Row(f"{label}: between tokens, p50", p50 * 1e3, "ms")
        budget = ("<= 2.5 x p50", p99 <= 2.5 * p50) if is_ours else ()
        yield Row(f"{label}: between tokens, p99", p99 * 1e3, "ms", *budget)
        budget = ("<= peer", first[who] <= first["generate_batch"]) if is_ours else ()
        yield Row(f"{label}: time to first token, p50", first[who] * 1e3, "ms", *budget)
        rate = statistics.median(run.tokens / run.seconds for run in runs)
        yield Row(f"{label}: tokens", rate, "tokens/s")


def first_token(runs: Sequence[Served]) -> float:
    return statistics.median(seconds for run in runs for seconds in run.first_token)


def by_ctranslate2(folder: Path, arrivals: Sequence[Arrival]) -> Iterator[Row]:
    """Float32 on as many threads; the prompts are there at the start, and none gets more tokens."""
    if find_spec("ctranslate2") is None:
        yield Row("arrivals, CTranslate2: not installed", 0.0, "", beside="pip install ctranslate2")
        return
    import ctranslate2
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        converted = f"{scratch}/model"
        ctranslate2.converters.TransformersConverter(str(folder)).convert(converted)
        threads = torch.get_num_threads()
        generator = ctranslate2.Generator(
            converted, device="cpu", compute_type="float32", intra_threads=threads
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [tokenizer.convert_ids_to_tokens(list(one.prompt)) for one in arrivals]
        most = max(one.max_tokens for one in arrivals)
        start = time.perf_counter()
        results = generator.generate_batch(
            prompts,
            max_length=most,
            min_length=most,
            include_prompt_in_result=False,
            max_batch_size=ROWS,
        )
        seconds = time.perf_counter() - start
    tokens = sum(len(result.sequences_ids[0]) for result in results)
    yield Row("arrivals, CTranslate2, all there at the start", tokens / seconds, "tokens/s")


def windows(steps: int) -> Iterator[Row]:
    """A toy whose host needs longer for a launch than its device for a step."""
    model = BusyModel(DEVICE_MS, HOST_MS)
    model.warm_up(STEPS_PER_LAUNCH)
    for steps_per_launch in (1, STEPS_PER_LAUNCH):
        ratios = []
        for _ in range(5):  # in turns, since the speed of the processor drifts
            alone = device_alone(model, steps)
            step, stats = step_of(model, steps, steps_per_launch)
            ratios.append(step / alone)
        ratio = statistics.median(ratios)
        label = f"toy {DEVICE_MS:g} ms, host {HOST_MS:g} ms, {steps_per_launch} a launch"
        is_window = steps_per_launch > 1
        budget: Any = ("<= 1.1", ratio <= 1.1) if is_window else ()
        yield Row(f"{label}: step / device alone", ratio, "", *budget)
        share = stats.launches_per_token
        budget = (f"1/{STEPS_PER_LAUNCH}", share == 1 / STEPS_PER_LAUNCH) if is_window else ()
        yield Row(f"{label}: launches per token", share, "", *budget)
        yield Row(f"{label}: device idle share", stats.device_idle_share, "")


def device_alone(model: BusyModel, steps: int) -> float:
    """Seconds of a step where the next window is always queued."""
    ids = torch.zeros(4, dtype=torch.int32)
    run = model._windows[STEPS_PER_LAUNCH]
    for _ in range(steps // STEPS_PER_LAUNCH):
        run(ids, ids, ids, model._weight, model._last_sampled)
    neuron_streams.synchronize()
    ran = compute_intervals()[-(steps // STEPS_PER_LAUNCH) :]
    starts = [b[2] - a[2] for a, b in itertools.pairwise(ran)]
    return statistics.median(starts) / STEPS_PER_LAUNCH


def step_of(model: BusyModel, steps: int, steps_per_launch: int) -> tuple[float, Any]:
    """Seconds from step to step, and the loop's stats."""
    params = SamplingParams(max_tokens=1 + steps, ignore_eos=True)
    options: dict[str, Any] = {"policy": "gather", "steps_per_launch": steps_per_launch}
    with DecodeLoop(model, **options) as loop:
        for _ in loop.generate([[1, 2, 3]] * 4, params):
            pass
        stats = loop.stats
    neuron_streams.synchronize()
    ran = compute_intervals()[-(steps // steps_per_launch) :]
    starts = [b[2] - a[2] for a, b in itertools.pairwise(ran)]
    return statistics.median(starts) / steps_per_launch, stats


def run(rounds: int, *, with_model: bool) -> Iterator[Row]:
    """All of these rows."""
    yield from windows(256)
    if with_model:
        yield from language_model(rounds)
