"""The decode loop, its models and its example, unchanged, on the nrt runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict

import pytest

from models.toy import toy
from neuron_streams._runtime.nrt.status import NrtError, Status
from neuron_streams.decode import DecodeLoop, SamplingParams
from neuron_streams.testing import EmulatedRuntime, use_runtime
from tests.decode import fuzz
from tests.decode.compiled_hash_model import CompiledHashModel
from tests.decode.test_fuzz import Idle
from tests.runtime.nrt.doubled import Double, compile_for_double
from tests.runtime.nrt.neuronx import XLA, environment


@pytest.fixture
def device(make):
    """Memory that the host does not reach, small queues, and completions that come unevenly."""
    runtime = make(reachable=False, in_flight=3)
    double = runtime.double
    double.set_depth(3)
    double.set_latency(0, 500_000)
    for unit in {double.read, double.write, double.compute}:
        double.refuse(0, unit, 0, 3, Status.QUEUE_FULL)
    return runtime


@pytest.mark.parametrize("policy", ["materialize", "gather"])
def test_scripts_give_the_tokens_of_the_oracle(device, policy):
    model = CompiledHashModel(compile_for_double, "neuron:0", num_slots=4)
    for seed in range(8):
        model.calls.clear()
        loop = DecodeLoop(model, policy=policy, depth=1 + seed % 4, output_thread=bool(seed % 2))
        game = fuzz.Play(fuzz.make_script(seed), loop, Idle(), seed)
        results = game.run(model)
        for name, one in game.named.items():
            fuzz.check_against_oracle(results, name, one, model)
        assert loop.close() == ()
    assert device.statistics.queue_full > 0


@pytest.mark.parametrize("policy", ["materialize", "gather"])
def test_scripts_with_failures_lose_the_requests_of_the_failed_step_alone(device, policy):
    model = CompiledHashModel(compile_for_double, "neuron:0", num_slots=4)
    met = Counter()
    for seed in range(6):
        model.calls.clear()
        device.double.fail(0, device.double.compute, 0, 3 + 2 * seed, Status.EXEC_OOB)
        loop = DecodeLoop(model, policy=policy, depth=1 + seed % 4)
        game = fuzz.Play(fuzz.make_script(seed), loop, Idle(), seed)
        results = game.run(model)
        for name, one in game.named.items():
            reason = results.reasons[name]
            met[reason] += 1
            if reason != "error":
                fuzz.check_against_oracle(results, name, one, model)
                continue
            assert isinstance(results.errors[name], NrtError)
            got = results.tokens[name]
            assert got == fuzz.reference(one.prompt, one.params, model.max_length)[0][: len(got)]
        loop.close()
    assert met["error"] >= 6
    assert met["length"] > 0


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def tokens_of(loop):
    with loop:
        return [output.new_token_ids for output in loop.generate(PROMPTS, GREEDY)], loop.stats


def played(model):
    """All outputs of a loop whose steps may fail."""
    loop, outputs = DecodeLoop(model), []
    for number, prompt in enumerate(PROMPTS):
        loop.add_request(str(number), prompt, GREEDY)
    while loop.has_unfinished_requests():
        outputs += loop.step()
    loop.close()
    return outputs


@pytest.fixture(scope="module")
def expected():
    with use_runtime(EmulatedRuntime(1)):
        return tokens_of(DecodeLoop(toy(batch_buckets=(4,))))[0]


@pytest.mark.parametrize("policy", ["materialize", "gather"])
def test_the_toy_model_gives_the_tokens_that_it_gives_on_the_cpu(device, expected, policy):
    model = toy(batch_buckets=(4,), compile=compile_for_double)
    tokens, stats = tokens_of(DecodeLoop(model, policy=policy))
    assert tokens == expected
    assert stats.async_steps > 5


def test_warm_up_and_chunks_leave_nothing_in_a_queue(device, expected):
    """Nobody reads the results of warm-ups, nor those of all pieces of a prompt but the last."""
    model = toy(batch_buckets=(4,), prompt_buckets=(4,), compile=compile_for_double)
    model.warm_up()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with DecodeLoop(model) as loop:
        found = defaultdict(list)
        for output in loop.generate([[1, 2, 3] * 4] * 3, params):
            found[output.request_id] += output.new_token_ids
    first, *others = found.values()
    assert len(first) == 12
    assert others == [first, first]
    device.drain()
    assert not any(queue.flight or queue.ready for queue in device._queues)


def test_a_failed_step_ends_its_requests_with_its_error(device):
    model = toy(batch_buckets=(4,), compile=compile_for_double)
    device.double.fail(0, device.double.compute, 0, 5, Status.EXEC_COMPLETED_WITH_NUM_ERR)
    errors = [output.error for output in played(model) if output.error is not None]
    assert errors
    assert all(isinstance(error, NrtError) for error in errors)


def test_a_lost_device_ends_all_requests(device):
    model = toy(batch_buckets=(4,), compile=compile_for_double)
    device.double.fail(0, device.double.compute, 0, 5, Status.EXEC_UNIT_UNRECOVERABLE)
    reasons = [output.finish_reason for output in played(model) if output.finished]
    assert reasons == ["error"] * 3


EXAMPLE = """
import runpy
from tests.runtime.nrt import doubled
double = doubled.Double({abi!r})
runpy.run_path("examples/decode_loop.py", run_name="__main__")
import neuron_streams
from neuron_streams._runtime import process
assert process.runtime().name == "nrt"
assert double.violations() == [], double.violations()
"""


def test_the_example_runs_unchanged(tmp_path):
    """As a program that knows nothing of nrt: the environment alone says so."""
    double = Double("2.30")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXAMPLE.format(abi="2.30"))],
        env={
            **os.environ,
            **environment(tmp_path, XLA),
            "NEURON_STREAMS_RUNTIME": "nrt",
            "NEURON_STREAMS_LIBNRT": double.path,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens as in a plain loop:" in done.stdout
    assert "steps: synchronized, chained, chained, chained, remapped, chained" in done.stdout
