"""600 scripts; `python -m tests.decode.fuzz --scripts 100000` for more."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

import neuron_streams
from neuron_streams.decode import DecodeLoop
from neuron_streams.testing import EmulatedRuntime, ManualRuntime, use_runtime
from tests.decode import fuzz
from tests.decode.compiled_hash_model import CompiledHashModel


@pytest.mark.timeout(300)
def test_async_gives_the_tokens_of_sync() -> None:
    command = [sys.executable, "-m", "tests.decode.fuzz", "--scripts", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("600 scripts:")


def test_scripts_reach_every_path() -> None:
    """A fuzz that never falls back, drops, aborts, pauses or preempts proves nothing."""
    met: Counter[str] = Counter()
    for seed in range(80):
        met.update(fuzz.check_script(seed, fuzz.in_turn(seed)))
    assert set(met) >= {"composition", "prefill", "reorder", "shape"}
    assert min(met["dropped"], met["preempted"], met["paused"], met["failed"], met["stopped"]) > 10
    assert met["async"] > 100
    assert met["logprobs"] > 100


class Idle:
    """In the place of a device that is stepped by hand: an emulated one moves by itself."""

    def run(self, steps: int) -> None:
        pass


@pytest.mark.parametrize("output_thread", [False, True], ids=["by hand", "thread"])
@pytest.mark.parametrize("policy", ["materialize", "gather"])
@pytest.mark.parametrize("runtime", [ManualRuntime, EmulatedRuntime])
def test_scripts_on_a_runtime_without_implicit_waits(
    runtime: Any, policy: str, output_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_STREAMS_IMPLICIT_WAITS", "0")
    with use_runtime(runtime()) as device:
        model = CompiledHashModel(neuron_streams.compile, "neuron:0", num_slots=4)
        for seed in range(10):
            model.calls.clear()
            loop = DecodeLoop(model, policy=policy, depth=1 + seed % 4, output_thread=output_thread)
            stepped = device if runtime is ManualRuntime else Idle()
            game = fuzz.Play(fuzz.make_script(seed), loop, stepped, seed)
            results = game.run(model)
            for name, one in game.named.items():
                fuzz.check_against_oracle(results, name, one, model)
            assert loop.close() == ()
