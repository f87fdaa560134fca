"""Async and sync give identical tokens: seeded scripts, token by token, against an oracle too."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import Results, Scripted, make_loop, make_script, play
from tests.decode.hash_model import reference

SCRIPTS = 40


def sizes_for(seed: int) -> dict[str, Any]:
    rng = random.Random(~seed)
    return {
        "num_slots": rng.choice([2, 3, 6]),
        "batch_buckets": rng.choice([(4,), (1, 2, 4), (2, 3)]),
        "prefill_batch": rng.choice([1, 1, 2]),
        "max_length": rng.choice([9, 24]),
    }


def results_of(seed: int, **options: Any) -> Results:
    loop, model, streams = make_loop(
        FakeStreams(seed),
        sizes=sizes_for(seed),
        max_batch_size=random.Random(seed).choice([None, 1, 2]),
        **options,
    )
    results, named = play(make_script(seed), loop, model, streams, seed)
    assert loop.close() == ()
    assert streams.run() >= 0
    assert model.executed == len(model.calls), "a submitted step never ran"
    for name, one in named.items():
        check_against_oracle(results, name, one, model.max_length)
    return results


def check_against_oracle(
    results: Results, name: tuple[str, int], one: Scripted, max_length: int
) -> None:
    tokens, reason = reference(one.prompt, one.params, max_length)
    if one.abort_after is not None and one.abort_after < len(tokens):
        tokens, reason = tokens[: one.abort_after], "abort"
    assert results.tokens[name] == tokens
    assert results.reasons[name] == reason


@pytest.mark.parametrize("output_thread", [False, True], ids=["by hand", "thread"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_async_gives_the_tokens_of_sync(depth: int, output_thread: bool) -> None:
    for seed in range(SCRIPTS):
        want = results_of(seed, async_scheduling=False)
        got = results_of(seed, depth=depth, output_thread=output_thread)
        assert set(got.tokens) == set(want.tokens), f"script {seed}"


def test_scripts_reach_every_path() -> None:
    """A fuzz that never falls back, drops or aborts proves nothing."""
    reasons = set()
    dropped = async_steps = 0
    for seed in range(SCRIPTS):
        loop, model, streams = make_loop(FakeStreams(seed), sizes=sizes_for(seed))
        play(make_script(seed), loop, model, streams, seed)
        reasons |= set(loop.stats.fallback_reasons)
        dropped += loop.stats.extra_tokens_dropped
        async_steps += loop.stats.async_steps
    assert reasons == {"composition", "prefill", "reorder", "shape"}
    assert dropped > 10
    assert async_steps > 100
