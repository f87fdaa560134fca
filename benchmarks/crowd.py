"""What requests that do not run cost those that do: a step, and each call, with 10 000 and with 10.

A step must not depend on their number, a call at most on its logarithm. The model computes nothing,
so what is measured is the host's part: the processor time of the thread that drives, least of many
short runs, in which few and many take turns.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import neuron_streams
from benchmarks.report import Row
from neuron_streams.decode import DecodeEngine, DecodeLoop, SamplingParams

FEW, MANY, ROWS = 10, 10_000, 4
ROUNDS, STEPS, CALLS = 40, 20, 100
BUDGET, CALL_BUDGET = 1.2, math.log(MANY) / math.log(FEW)
STATES = ("waiting", "paused", "paused with slots")


class NoModel:
    """Its tokens are zeros that lie on the device; nothing is launched."""

    max_length, vocab_size, prefill_batch = 4096, 50_000, ROWS
    batch_buckets, prompt_buckets = (ROWS,), (8,)
    eos_token_ids: frozenset[int] = frozenset()
    on_device_sampling = True

    def __init__(self, num_slots: int) -> None:
        self.device = torch.device("neuron", neuron_streams.current_device())
        self.num_slots = num_slots
        self._tokens = torch.zeros(ROWS, dtype=torch.int32).to(self.device)

    def decode(self, *inputs: Any) -> Tensor:
        """See `Model.decode`."""
        return self._tokens

    prefill = decode_gather = remap = decode


def requests(add: Callable[..., Any], prefix: str, count: int, **options: Any) -> list[Any]:
    """Add requests that would run longer than anything here."""
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    return [add(f"{prefix} {number}", [1], params, **options) for number in range(count)]


def loop_among(state: str, count: int) -> DecodeLoop:
    """A loop that runs ROWS requests, among so many others that do not run."""
    loop = DecodeLoop(NoModel(count + 4 * ROWS), policy="gather")
    if state == "paused with slots":
        for number in range(0, count, ROWS):
            requests(loop.add_request, f"other {number}", min(ROWS, count - number))
            loop.step()
            for request_id in loop.scheduler.unfinished_request_ids[number:]:
                loop.pause_request(request_id)
        loop.drain()
    requests(loop.add_request, "runs", ROWS, priority=-1)
    for _ in range(STEPS):
        loop.step()
    if state != "paused with slots":
        requests(loop.add_request, "other", count)
    if state == "paused":
        for request_id in loop.scheduler.unfinished_request_ids[ROWS:]:
            loop.pause_request(request_id)
    return loop


def engine_among(count: int) -> DecodeEngine:
    """An engine that runs ROWS requests, among so many whose streams are full and not read."""
    engine = DecodeEngine(DecodeLoop(NoModel(count + 4 * ROWS), policy="gather"), thread=False)
    kept = requests(engine.add_request, "other", count, max_queued=1)
    engine.drain()
    requests(engine.add_request, "runs", ROWS, on_output=lambda output: kept)
    for _ in range(STEPS):
        engine.turn()
    return engine


def least(bodies: Sequence[Callable[[], object]], calls: int) -> list[float]:
    """Microseconds of one of the calls that each body makes."""
    best = [float("inf")] * len(bodies)
    for _, (n, body) in itertools.product(range(ROUNDS), enumerate(bodies)):
        best[n] = min(best[n], seconds_of(body))
    return [seconds / calls * 1e6 for seconds in best]


def seconds_of(body: Callable[[], object]) -> float:
    start = time.thread_time()
    body()
    return time.thread_time() - start


def repeated(action: Callable[[], object], count: int) -> Callable[[], None]:
    def body() -> None:
        for _ in range(count):
            action()

    return body


def rows_of(what: str, few: float, many: float, budget: float = BUDGET) -> Iterator[Row]:
    yield Row(f"{what} {MANY}", many, "us", beside=f"{FEW}: {few:.1f} us")
    ratio = many / few
    yield Row(f"  against {FEW}", ratio, "ratio", f"{budget:g}", ratio <= budget)


def steps() -> Iterator[Row]:
    for state in STATES:
        loops = [loop_among(state, count) for count in (FEW, MANY)]
        costs = least([repeated(loop.step, STEPS) for loop in loops], STEPS)
        yield from rows_of(f"step of {ROWS} rows, others {state}:", *costs)
        for loop in loops:
            loop.close()
    engines = [engine_among(count) for count in (FEW, MANY)]
    costs = least([repeated(engine.turn, STEPS) for engine in engines], STEPS)
    yield from rows_of(f"engine's turn of {ROWS} rows, others not read:", *costs)
    for engine in engines:
        engine.close()


def calls() -> Iterator[Row]:
    """Each round adds requests, pauses and resumes them, and aborts them."""
    loops = [loop_among("waiting", count) for count in (FEW, MANY)]
    found: dict[str, list[list[float]]] = {}
    for _, n in itertools.product(range(ROUNDS), range(2)):
        for name, seconds in round_of_calls(loops[n]).items():
            found.setdefault(name, [[], []])[n].append(seconds / CALLS * 1e6)
    for loop in loops:
        loop.close()
    for name, (few, many) in found.items():
        yield from rows_of(f"{name}, others waiting:", min(few), min(many), CALL_BUDGET)


def round_of_calls(loop: DecodeLoop) -> dict[str, float]:
    names = [f"new {number}" for number in range(CALLS)]

    def each(call: Callable[[str], object]) -> float:
        return seconds_of(lambda: [call(name) for name in names])

    return {
        "admission": seconds_of(lambda: requests(loop.add_request, "new", CALLS)),
        "pause": each(loop.pause_request),
        "resume": each(loop.resume_request),
        "abort": each(loop.abort_request),
    }


def run() -> list[Row]:
    return [*steps(), *calls()]
