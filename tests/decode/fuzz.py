"""Async and sync give identical tokens: seeded scripts, against the synchronous loop and an oracle.

`python -m tests.decode.fuzz --scripts 100000` runs as many as one likes, on all cores.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from neuron_streams.decode import DecodeLoop, SamplingParams, SchedulerOutput
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import Results, check_idle, check_invariants, make_loop
from tests.decode.hash_adjustments import VOCAB
from tests.decode.hash_model import FakeHashModel, Sizes, reference, reference_logprobs
from tests.decode.toy_tokenizer import ToyTokenizer, reference_text

Name = tuple[str, int]
SHORTEST_MODEL = 10
VARIANTS: list[dict[str, Any]] = [
    {"policy": policy, "depth": depth}
    for policy in ("materialize", "gather")
    for depth in (1, 2, 3, 4)
]


@dataclass
class Scripted:
    """A request that arrives once so many tokens are out; what befalls it counts its own."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrives_at: int
    priority: int = 0
    abort_after: int | None = None
    pause_after: int | None = None
    preempt_after: int | None = None


def adjustments(rng: random.Random, most_min_tokens: int) -> dict[str, Any]:
    """A few of what a request may ask for beyond the plain parameters."""
    bias = rng.sample(range(VOCAB), 3)
    wanted = {
        "min_p": rng.choice([0.25, 1.0]),
        "repetition_penalty": rng.choice([0.5, 1.25]),
        "presence_penalty": rng.choice([-1.0, 0.5]),
        "frequency_penalty": rng.choice([-0.5, 0.25]),
        "logit_bias": {token: rng.choice([-math.inf, -2.5, 4.25]) for token in bias},
        "logprobs": rng.choice([0, 3, 20]),
        "min_tokens": min(most_min_tokens, rng.choice([1, 3, 6])),
    }
    return {name: value for name, value in wanted.items() if rng.random() < 0.4}


def make_script(seed: int, longest_prompt: int = 8) -> list[Scripted]:
    rng = random.Random(seed)

    def perhaps(chance: float) -> int | None:
        return rng.randint(0, 4) if rng.random() < chance else None

    script = []
    for _ in range(rng.randint(1, 9)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest_prompt))]
        max_tokens = rng.choice([1, 2, 3, 5, 8, 13, 40])
        most = min(max_tokens, SHORTEST_MODEL - len(prompt))
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=rng.choice([0.0, 0.5]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.75]),
            seed=rng.randint(-(2**63), 2**63 - 1),
            stop_token_ids=rng.choice([(), (3,), (1, 20)]),
            ignore_eos=rng.random() < 0.3,
            **(adjustments(rng, most) if rng.random() < 0.5 else {}),
        )
        script.append(
            Scripted(
                rng.choice("abcdefg"),
                prompt,
                params,
                rng.choice([0, 0, rng.randint(0, 40)]),
                rng.choice([0, 0, 0, 1, 2]),
                perhaps(0.2),
                perhaps(0.2),
                perhaps(0.2),
            )
        )
    return sorted(script, key=lambda one: one.arrives_at)


def with_stop_strings(script: list[Scripted], seed: int) -> list[Scripted]:
    """The script, some of whose requests end at a string too."""
    rng = random.Random(seed ^ 0x57)

    def stop() -> str:
        return "".join(rng.choice("aabb €") for _ in range(rng.randint(1, 4)))

    for one in script:
        one.params = replace(
            one.params,
            stop=[stop() for _ in range(rng.choice([0, 0, 1, 2]))],
            include_stop_str_in_output=rng.random() < 0.3,
        )
    return script


class Play:
    """A script on a loop: rows change places and the device moves on at random between steps."""

    def __init__(self, script: Sequence[Scripted], loop: DecodeLoop, device: Any, seed: int):
        self.loop, self.device, self.rng = loop, device, random.Random(seed)
        self.waiting = list(script)
        self.results = Results()
        self.named: dict[Name, Scripted] = {}
        self.paused: set[str] = set()
        self.done: set[tuple[Name, str]] = set()

    def run(self, model: Sizes) -> Results:
        while self.waiting or self.loop.scheduler.unfinished_request_ids or self.loop.batch_queue:
            self.admit()
            for name, one in self.named.items():
                if self.results.ended[name[0]] == name[1]:
                    self.befall(name, one)
            self.resume()
            self.device.run(self.rng.randint(0, 6))
            batch = self.loop.runner.input_batch
            if batch.num_reqs > 1 and self.rng.random() < 0.4:
                batch.swap_states(*self.rng.sample(range(batch.num_reqs), 2))
            self.results.take(self.loop.step())
            check_invariants(self.loop, model)
        self.results.take(self.loop.drain())
        check_idle(self.loop)
        assert self.loop.step() == []
        assert not self.loop.runner.requests, "the runner was not told of their end"
        assert not self.loop.runner.input_batch.num_reqs
        return self.results

    def admit(self) -> None:
        idle = not self.loop.has_unfinished_requests()
        in_use = set(self.loop.scheduler.unfinished_request_ids)
        for one in list(self.waiting):
            due = idle or one.arrives_at <= self.results.total
            if one.request_id not in in_use and due:
                self.loop.add_request(one.request_id, one.prompt, one.params, priority=one.priority)
                self.named[self.results.admit(one.request_id)] = one
                in_use.add(one.request_id)
                self.waiting.remove(one)
                idle = False

    def befall(self, name: Name, one: Scripted) -> None:
        got = len(self.results.tokens[name])
        for what, after in (
            ("abort", one.abort_after),
            ("pause", one.pause_after),
            ("preempt", one.preempt_after),
        ):
            if after is not None and got >= after and (name, what) not in self.done:
                self.done.add((name, what))
                getattr(self, what)(one.request_id)

    def abort(self, request_id: str) -> None:
        self.loop.abort_request(request_id)
        self.paused.discard(request_id)
        # Its id is free at once: whoever waits for it may come now.
        self.results.take(self.loop._outbox.outputs)
        self.loop._outbox.outputs.clear()

    def pause(self, request_id: str) -> None:
        if self.loop.pause_request(request_id):
            self.paused.add(request_id)

    def preempt(self, request_id: str) -> None:
        self.loop.scheduler.preempt_request(request_id)

    def resume(self) -> None:
        stuck = not self.loop.has_unfinished_requests()
        for request_id in sorted(self.paused):
            if stuck or self.rng.random() < 0.1:
                self.loop.resume_request(request_id)
                self.paused.discard(request_id)


def setting_of(seed: int) -> dict[str, Any]:
    """The sizes of a script's model, and whether it takes prompts in pieces."""
    rng = random.Random(~seed)
    sizes = {
        "num_slots": rng.choice([2, 3, 4, 6]),
        "batch_buckets": rng.choice([(4,), (1, 2, 4), (2, 3)]),
        "prefill_batch": rng.choice([1, 1, 2]),
        "max_length": rng.choice([SHORTEST_MODEL, 24]),
    }
    rows = rng.choice([None, None, 1, 2])
    kind = rng.choice(["", "chunks", "packs"])
    options = {
        "max_batch_size": rows,
        "chunks": kind == "chunks",
        "packs": kind == "packs",
        "max_num_batched_tokens": rng.choice([None, (rows or 4) + rng.randint(0, 3)]),
    }
    return {"sizes": sizes, **options}


def play(seed: int, *, fail: bool = False, **options: Any) -> tuple[Results, DecodeLoop]:
    """Run a script, check each request against the oracle, and give what came out."""
    setting = setting_of(seed)
    options["tokenizer"] = ToyTokenizer()
    loop, model, streams = make_loop(FakeStreams(seed), **setting, **options)
    longest = 9 if setting["chunks"] or setting["packs"] else 8
    script = with_stop_strings(make_script(seed, longest), seed)
    if fail:
        model.fail_at = {random.Random(seed).randint(0, 30)}
    game = Play(script, loop, streams, seed)
    results = game.run(model)
    assert loop.close() == ()
    streams.run()
    assert model.executed == len(model.calls), "a submitted step never ran"
    if options.get("policy") != "gather":
        check_host_ids(model)
    for name, one in game.named.items():
        check_against_oracle(results, name, one, model, options.get("steps_per_launch", 1))
        check_text(results, name, one)
    return results, loop


def check_host_ids(model: FakeHashModel) -> None:
    """Only a gather may leave tokens to the device, since no other program knows the mark."""
    for call in model.calls:
        if isinstance(call.input_ids, torch.Tensor):
            assert int(call.input_ids.min()) >= 0, call


def check_against_oracle(
    results: Results, name: Name, one: Scripted, model: Sizes, steps_per_launch: int = 1
) -> None:
    want, reason = reference(one.prompt, one.params, model.max_length)
    want, reason, *_ = reference_text(want, reason, one.params)
    got = results.tokens[name]
    failed = results.reasons[name] == "error"
    if one.abort_after is not None and one.abort_after < len(want) and not failed:
        # It is seen to where a launch's tokens are out; they may have been the last ones.
        assert one.abort_after <= len(got) < one.abort_after + steps_per_launch
        if len(got) < len(want) or results.reasons[name] == "abort":
            want, reason = want[: len(got)], "abort"
    assert results.logprobs.get(name, []) == (reference_logprobs(one.prompt, got, one.params) or [])
    if failed:
        assert isinstance(model, FakeHashModel)
        assert isinstance(results.errors[name], ArithmeticError), repr(results.errors[name])
        assert got == want[: len(got)]
        return
    assert (got, results.reasons[name]) == (want, reason)
    outputs = len(got) + (reason == "abort")
    assert -(-outputs // steps_per_launch) <= results.emissions[name] <= outputs


def check_text(results: Results, name: Name, one: Scripted) -> None:
    """Of the tokens that came out: whether those are right is checked elsewhere."""
    got, reason = results.tokens[name], results.reasons[name]
    ended = "length" if results.stop_reasons[name] in one.params.stop else reason
    _, want, text, stop_reason = reference_text(got, ended, one.params)
    assert (reason, results.texts[name], results.stop_reasons[name]) == (want, text, stop_reason)


class Arrival(NamedTuple):
    """A request that arrives once so many steps are launched, and ends at its limit."""

    after_steps: int
    max_tokens: int
    priority: int


def make_arrivals(seed: int) -> list[Arrival]:
    rng = random.Random(seed ^ 0x0C)
    priorities = rng.choice([(0,), (0, 0, 1)])
    return sorted(
        Arrival(rng.choice([0, rng.randint(0, 20)]), rng.randint(1, 7), rng.choice(priorities))
        for _ in range(rng.randint(2, 12))
    )


def steps_launched(arrivals: Sequence[Arrival], loop: DecodeLoop) -> list[list[str]]:
    """The requests of each step."""
    steps: list[list[str]] = []
    schedule, waiting = loop.scheduler.schedule, deque(enumerate(arrivals))

    def recorded() -> SchedulerOutput:
        step = schedule()
        if step.num_scheduled_tokens:
            steps.append(sorted(key.request_id for key in step.num_scheduled_tokens))
        return step

    loop.scheduler.schedule = recorded  # type: ignore[method-assign]
    while waiting or loop.has_unfinished_requests():
        idle = not loop.has_unfinished_requests()
        while waiting and (idle or waiting[0][1].after_steps <= len(steps)):
            number, one = waiting.popleft()
            params = SamplingParams(max_tokens=one.max_tokens, seed=number, ignore_eos=True)
            loop.add_request(str(number), [number, 1], params, priority=one.priority)
            idle = False
        loop.step()
    return steps


def check_occupancy(seed: int, options: dict[str, Any]) -> None:
    """Where each end is certain and slots permit, the steps are those of the synchronous loop."""
    arrivals, setting = make_arrivals(seed), setting_of(seed)
    setting["sizes"]["num_slots"] = 1 + len(arrivals)
    sync, *_ = make_loop(FakeStreams(seed), **setting, async_scheduling=False)
    loop, *_ = make_loop(FakeStreams(seed), **setting, **options)
    assert steps_launched(arrivals, loop) == steps_launched(arrivals, sync)


def check_windows(windowed: Results, want: Results) -> None:
    """Of requests that were not aborted, since an abort comes a few tokens later."""
    ours, theirs = tokens_of(windowed), tokens_of(want)
    assert ours.keys() == theirs.keys()
    for name, outcome in ours.items():
        if "abort" not in (windowed.reasons[name], want.reasons[name]):
            assert outcome == theirs[name]


def tokens_of(results: Results) -> dict[Name, Any]:
    """What must not depend on the launches, of requests that nobody aborts."""
    return {
        name: (
            results.tokens[name],
            results.logprobs.get(name),
            results.texts[name],
            reason,
            results.stop_reasons[name],
        )
        for name, reason in results.reasons.items()
    }


def check_script(seed: int, variants: Sequence[dict[str, Any]] = VARIANTS) -> Counter[str]:
    """One script in some variants of the asynchronous loop, against the synchronous one.

    Returns what it came across: fallback reasons, async steps, dropped tokens, preemptions.
    """
    met: Counter[str] = Counter()
    want, _ = play(seed, async_scheduling=False)
    for options in variants:
        windows = options | {"steps_per_launch": random.Random(seed ^ 0x3B).randint(1, 8)}
        try:
            got, loop = play(seed, **options)
            assert got == want
            windowed, launched = play(seed, **windows)
            check_windows(windowed, want)
            check_occupancy(seed, options)
            if seed // 8 % 4 == 0:
                failed, _ = play(seed, fail=True, **windows)
                met["failed"] += "error" in failed.reasons.values()
        except BaseException as error:
            raise AssertionError(f"script {seed} with {windows}: {error!r}") from error
        met.update(loop.stats.fallback_reasons)
        met["async"] += loop.stats.async_steps
        met["mixed steps"] += loop.stats.mixed_steps
        met["windows"] += launched.stats.decode_windows
        met["chunks"] += loop.stats.prompt_chunks
        met["dropped"] += loop.stats.extra_tokens_dropped
        met["preempted"] += loop.stats.preemptions
        met["logprobs"] += sum(map(len, got.logprobs.values()))
        met["stopped"] += sum(isinstance(why, str) for why in got.stop_reasons.values())
        met["paused"] += any(one.pause_after is not None for one in make_script(seed))
    return met


def in_turn(seed: int) -> list[dict[str, Any]]:
    """One of the variants, so that all of them come round in eight scripts."""
    return [VARIANTS[seed % 8]]


def _batches(count: int, size: int = 100) -> Iterator[range]:
    starts = range(0, count, size)
    return (range(start, min(count, start + size)) for start in starts)


def _check_range(seeds: range, thorough: bool) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        total.update(check_script(seed, VARIANTS if thorough else in_turn(seed)))
    return total


def main(argv: Sequence[str] | None = None) -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, help="run this one script alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--thorough", action="store_true", help="all eight variants of each script")
    options = parser.parse_args(argv)
    logging.disable()  # of the steps that fail on purpose
    if options.seed is not None:
        print(dict(check_script(options.seed)))
        return 0
    batches = list(_batches(options.scripts))
    check = partial(_check_range, thorough=options.thorough)
    with ProcessPoolExecutor(options.jobs) as pool:
        bar = tqdm(pool.map(check, batches), total=len(batches), unit="batch", disable=None)
        total = sum(bar, Counter[str]())
    print(f"{options.scripts} scripts:", dict(sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
