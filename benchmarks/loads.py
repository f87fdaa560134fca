"""Requests to serve, and what is measured while they are: by our loop, and by transformers' own."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import neuron_streams
from benchmarks.overlap import compute_intervals
from neuron_streams.decode import DecodeLoop, SamplingParams

MODES: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False},
    "materialize": {"policy": "materialize"},
    "gather": {"policy": "gather"},
}


@dataclass(frozen=True)
class Load:
    """Prompts and how many tokens each gets, all queued at the start; `batch` run at a time."""

    name: str
    batch: int
    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]


@dataclass
class Measured:
    """One run, in seconds but for `idle_us`; `step` is from one step's start to the next's."""

    seconds: float
    tokens: int
    first_token: float
    between_tokens: list[float] = field(repr=False)
    async_share: float = 0.0
    step: float = 0.0
    idle_us: list[float] = field(default_factory=list, repr=False)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def measured(start: float, times: Sequence[Sequence[float]]) -> Measured:
    """Of the moments at which the tokens of each request came; all began at `start`."""
    return Measured(
        max(each[-1] for each in times) - start,
        sum(map(len, times)),
        statistics.median(each[0] - start for each in times),
        [b - a for each in times for a, b in itertools.pairwise(each)],
    )


def drive(model: Any, load: Load, **options: Any) -> Measured:
    """Run a load once on our loop, and look at the device."""
    times: dict[str, list[float]] = {}
    with DecodeLoop(model, **options) as loop:
        start = time.perf_counter()
        for n, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True)):
            loop.add_request(str(n), prompt, SamplingParams(max_tokens=length, ignore_eos=True))
        while loop.has_unfinished_requests():
            for output in loop.step():
                now = [time.perf_counter()] * len(output.new_token_ids)
                times.setdefault(output.request_id, []).extend(now)
        stats = loop.stats
    neuron_streams.synchronize()
    found = measured(start, list(times.values()))
    gather = options.get("policy") == "gather"
    found.async_share = stats.async_share if gather else stats.decode_async_share
    ran = [interval for interval in compute_intervals() if interval[2] >= start]
    found.step = statistics.median(b[2] - a[2] for a, b in itertools.pairwise(ran))
    found.idle_us = [(b[2] - a[3]) * 1e6 for a, b in itertools.pairwise(ran)]
    return found


@contextmanager
def transformers_manager(folder: Path, batch: int) -> Iterator[Any]:
    """What transformers' `generate_batch` runs on, kept warm, since that would start it each time.

    Blocks are not shared, since all prompts are the same and ours are computed each time.
    """
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = ContinuousBatchingConfig(
        page_size=16,
        num_blocks=1024,
        max_batch_tokens=512,
        max_requests_per_batch=batch,
        allow_block_sharing=False,
    )
    with model.continuous_batching_context_manager(
        config, continuous_batching_config=blocks
    ) as manager:
        yield manager


@contextmanager
def continuous_batching(folder: Path, batch: int) -> Iterator[Callable[[Load], Measured]]:
    """Runs a load on `transformers_manager`."""
    with transformers_manager(folder, batch) as manager:

        def run(load: Load) -> Measured:
            start = time.perf_counter()
            for prompt, length in zip(load.prompts, load.lengths, strict=True):
                manager.add_request(list(prompt), max_new_tokens=length, record_timestamps=True)
            times: list[list[float]] = []
            while len(times) < len(load.prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"transformers failed: {result.error}")
                    times.append(result.timestamps)
            return measured(start, times)

        yield run
