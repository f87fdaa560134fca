"""The decode loop: synchronous, `materialize` and `gather` in turns, transformers beside them.

First a toy with a set device time: the gain over the synchronous loop at each device time and
length of response, since the gain should fall as device time grows and the async share rise with
the length. Then SmolLM2-135M, once with requests that all start and end together, once with
requests that come and go, where `materialize` has to fall back. Every figure is the median of its
rounds; device idle is the time between two executions by the runtime's own timestamps.

`NEURON_STREAMS_BENCHMARK_BATCHES=1,8,32` chooses the batch sizes; without it they are 1 and 8.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import neuron_streams
from benchmarks.overlap import (
    ToyModel,
    _burn,
    alone,
    compute_intervals,
    smollm2_model,
    transformers_generate,
)
from benchmarks.report import Row, percentile, spin, timed
from neuron_streams.decode import DecodeLoop, SamplingParams
from neuron_streams.decode.model import SamplingTensors

MODES: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False},
    "materialize": {"policy": "materialize"},
    "gather": {"policy": "gather"},
}
DEVICE_MS, LENGTHS, HOST_MS = (1.0, 5.0, 20.0), (8, 64, 512), 2.0
TOKENS, ROUNDS = 64, 3
PROMPT = "Tell me a long story about the sea."


class GatherToy(ToyModel):
    """The toy with a table of the tokens sampled last; prefill fills up its rows with scratch."""

    def __init__(self, device_ms: float, host_ms: float) -> None:
        super().__init__(device_ms, host_ms)
        layers = max(1, round(device_ms / self._layer_ms()))
        ids, table = torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
        self.last_sampled = table.to("neuron")
        self.gathered = neuron_streams.compile(
            _gathered(_burn(layers)),
            (ids, ids, ids, self.weight, table),
            mutates=("last_sampled",),
            name="toy step with gather",
        )

    def prefill(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sampling: SamplingTensors,
    ) -> torch.Tensor:
        rows = (input_ids[:, 0].contiguous(), lengths, slots)
        missing = 4 - lengths.shape[0]
        filled = [torch.nn.functional.pad(row, (0, missing)) for row in rows]
        output: torch.Tensor = self.gathered(*filled, self.weight_there, self.last_sampled)
        return output

    def decode_gather(
        self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        spin(self.host_ms / 1e3)
        inputs = (input_ids, positions, slots, self.weight_there, self.last_sampled)
        output: torch.Tensor = self.gathered(*inputs)
        return output


def _gathered(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        weight: torch.Tensor,
        last_sampled: torch.Tensor,
    ) -> torch.Tensor:
        where = slots.long()
        tokens = step(torch.where(ids < 0, last_sampled[where], ids), positions, slots, weight)
        last_sampled.index_put_((where,), tokens)
        return tokens

    return run


@dataclass(frozen=True)
class Load:
    """Prompts and how many tokens each gets, all queued at the start."""

    name: str
    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]


@dataclass
class Measured:
    """One run, in seconds but for `idle_us`; `step` is from one step's start to the next's."""

    seconds: float
    tokens: int
    async_share: float
    step: float
    idle_us: list[float] = field(repr=False)
    first_token: float
    between_tokens: list[float] = field(repr=False)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def drive(model: Any, load: Load, **options: Any) -> Measured:
    """Run a load once."""
    times: dict[str, list[float]] = {}
    with DecodeLoop(model, **options) as loop:
        start = time.perf_counter()
        for n, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True)):
            loop.add_request(str(n), prompt, SamplingParams(max_tokens=length, ignore_eos=True))
        while loop.has_unfinished_requests():
            for output in loop.step():
                times.setdefault(output.request_id, []).append(time.perf_counter())
        seconds = time.perf_counter() - start
        stats = loop.stats
        share = stats.async_share if options.get("policy") == "gather" else stats.decode_async_share
    neuron_streams.synchronize()
    ran = [x for x in compute_intervals() if x[2] >= start]
    return Measured(
        seconds,
        sum(map(len, times.values())),
        share,
        statistics.median(b[2] - a[2] for a, b in itertools.pairwise(ran)),
        [(b[2] - a[3]) * 1e6 for a, b in itertools.pairwise(ran)],
        statistics.median(each[0] - start for each in times.values()),
        [b - a for each in times.values() for a, b in itertools.pairwise(each)],
    )


def in_turns(model: Any, load: Load, rounds: int, label: str) -> dict[str, list[Measured]]:
    runs: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    for _ in tqdm(range(rounds), desc=label, leave=False):
        for mode, options in MODES.items():
            runs[mode].append(drive(model, load, **options))
    return runs


def median_of(runs: Sequence[Measured], what: Callable[[Measured], float]) -> float:
    return statistics.median(map(what, runs))


# The seed's two claims, on the toy


def sweep() -> Iterator[Row]:
    gains: dict[tuple[float, int], float] = {}
    shares: dict[tuple[float, int], float] = {}
    for device_ms in DEVICE_MS:
        model = GatherToy(device_ms, HOST_MS)
        for length in LENGTHS:
            where = f"toy {device_ms:g} ms, {length} tokens"
            runs = in_turns(
                model, toy_load(length), 1 if device_ms * length > 5000 else ROUNDS, where
            )
            rates = {mode: median_of(found, lambda run: run.rate) for mode, found in runs.items()}
            for mode in ("materialize", "gather"):
                gain = rates[mode] / rates["sync"] - 1
                share = median_of(runs[mode], lambda run: run.async_share)
                yield Row(f"{where}: {mode}, gain over sync", gain * 100, "%")
                yield Row(f"{where}: {mode}, async share", share, "")
                if mode == "materialize":
                    gains[device_ms, length], shares[device_ms, length] = gain, share
    longest = [gains[device_ms, LENGTHS[-1]] for device_ms in DEVICE_MS if device_ms >= HOST_MS]
    yield Row(
        "toy: the gain falls as device time grows",
        longest[-1] / longest[0],
        "of it",
        "< 1",
        longest[-1] < longest[0],
    )
    rising = [shares[DEVICE_MS[1], length] for length in LENGTHS]
    yield Row(
        "toy: the async share rises with the length",
        rising[-1] - rising[0],
        "more",
        "> 0",
        rising == sorted(rising),
    )


def toy_load(length: int) -> Load:
    """About as many steps whatever the length; lengths differ, so that requests come and go."""
    count = max(6, 512 // length)
    lengths = [max(1, round(length * (0.75 + 0.5 * (n * 7 % count) / count))) for n in range(count)]
    return Load("toy", [[1, 2, 3]] * count, lengths)


# SmolLM2


def language_model(batch: int) -> Iterator[Row]:
    from models.smollm2 import smollm2
    from models.tokenizer import Tokenizer

    folder = smollm2()
    prompt = Tokenizer.load(folder).encode_chat(PROMPT)
    model = smollm2_model(folder, batch)
    model.warm_up(gather=True)
    rows = torch.zeros(batch, dtype=torch.int32)
    device = statistics.median(_device_step(model, rows) for _ in range(ROUNDS))
    lengths = [8 + (n * 37) % TOKENS for n in range(3 * batch)]
    loads = [
        Load("steady", [prompt] * batch, [TOKENS] * batch),
        Load("coming and going", [prompt] * (3 * batch), lengths),
    ]
    generate = transformers_generate(folder, prompt, batch, TOKENS)
    for each in loads:
        label = f"SmolLM2 batch {batch}, {each.name}"
        runs = in_turns(model, each, ROUNDS, label)
        beside = {"continuous batching": sum(each.lengths) / continuous_batching(folder, each)}
        if each.name == "steady":
            beside["generate"] = batch * TOKENS / timed(generate, ROUNDS)
        yield from rows_of(label, runs, device, beside)


def _device_step(model: Any, rows: torch.Tensor) -> float:
    alone(lambda ids: model.decode(ids, rows + 16, rows), len(rows), 24)()
    neuron_streams.synchronize()
    ran = compute_intervals()[-20:]
    return statistics.median(b[2] - a[2] for a, b in itertools.pairwise(ran))


def continuous_batching(folder: Path, load: Load) -> float:
    """Seconds that transformers' continuous batching takes for a load, warm."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = ContinuousBatchingConfig(page_size=16, num_blocks=1024, max_batch_tokens=512)
    with model.continuous_batching_context_manager(
        config, continuous_batching_config=blocks
    ) as manager:

        def run() -> None:
            for prompt, length in zip(load.prompts, load.lengths, strict=True):
                manager.add_request(list(prompt), max_new_tokens=length)
            left = len(load.prompts)
            while left:
                result = manager.get_result(timeout=1)
                left -= result is not None and result.is_finished()

        run()
        return timed(run, 1)


def rows_of(
    label: str, runs: dict[str, list[Measured]], device: float, beside: dict[str, float]
) -> Iterator[Row]:
    peer = ", ".join(f"transformers {name} {rate:.1f}" for name, rate in beside.items())
    for mode, found in runs.items():
        rate = median_of(found, lambda run: run.rate)
        yield Row(
            f"{label}, {mode}",
            rate,
            "tokens/s",
            "" if mode == "sync" else ">= peers",
            None if mode == "sync" else rate >= max(beside.values()),
            peer,
        )
        ratio = median_of(found, lambda run: run.step) / device
        budget = ("<= 1.02", ratio <= 1.02) if mode != "sync" else ()
        yield Row(f"{label}, {mode}: step / device alone", ratio, "", *budget)
        yield Row(f"{label}, {mode}: async share", median_of(found, lambda r: r.async_share), "")
        idle = [gap for run in found for gap in run.idle_us]
        yield Row(f"{label}, {mode}: device idle, median", percentile(idle, 0.5), "us")
        first = median_of(found, lambda run: run.first_token)
        yield Row(f"{label}, {mode}: time to first token", first * 1e3, "ms")
        gaps = [gap * 1e3 for run in found for gap in run.between_tokens]
        yield Row(f"{label}, {mode}: between tokens, p50", percentile(gaps, 0.5), "ms")
        yield Row(f"{label}, {mode}: between tokens, p99", percentile(gaps, 0.99), "ms")


def run() -> list[Row]:
    """All rows. Takes some minutes, a good part of them the 20 ms toy and transformers."""
    rows = list(sweep())
    if os.environ.get("NEURON_STREAMS_BENCHMARK_MODEL", "1") != "0":
        for batch in os.environ.get("NEURON_STREAMS_BENCHMARK_BATCHES", "1,8").split(","):
            rows += language_model(int(batch))
    return rows
