"""A Llama in the loop: prompts in company, in chunks and beside windows change no token."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

import neuron_streams
from models import toy
from models.llama import Llama
from neuron_streams.decode import DecodeLoop, SamplingParams
from neuron_streams.testing import ManualRuntime, use_runtime

SIZES: dict[str, Any] = {"batch_buckets": (4,), "prompt_buckets": (8, 32), "num_slots": 8}
EXPORTED = partial(neuron_streams.compile, target="exported")


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    return [
        (
            [rng.randrange(3, 97) for _ in range(rng.randint(1, 30))],
            SamplingParams(max_tokens=rng.randint(2, 14), temperature=rng.choice([0, 0.9]), seed=n),
        )
        for n in range(9)
    ]


def served(model: Llama, **options: Any) -> tuple[dict[str, list[int]], DecodeLoop]:
    """What came of each; some arrive while others run."""
    waiting, tokens = list(enumerate(requests())), dict[str, list[int]]()
    with DecodeLoop(model, output_thread=False, **options) as loop:
        while waiting or loop.has_unfinished_requests():
            if waiting and (loop.stats.steps % 3 == 0 or not loop.has_unfinished_requests()):
                number, one = waiting.pop(0)
                loop.add_request(str(number), *one)
            for output in loop.step():
                assert output.error is None
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens, loop


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_token_depends_on_how_steps_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_STREAMS_IMPLICIT_WAITS", "0")
    with use_runtime(ManualRuntime()):
        model = toy.toy(compile=EXPORTED, **SIZES)
        want, _ = served(model, async_scheduling=False)
        for policy in ("materialize", "gather"):
            bounded, loop = served(model, policy=policy, max_num_batched_tokens=8)
            assert bounded == want
            assert loop.stats.mixed_steps > 5 < loop.stats.prompt_chunks
            windowed, loop = served(model, policy=policy, depth=3, steps_per_launch=4)
            assert windowed == want
            assert loop.stats.decode_windows
            if policy == "gather":
                assert not loop.stats.fallback_reasons
