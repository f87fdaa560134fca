"""The loop on neuron_streams itself: manual runtime, emulated runtime, several devices."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import neuron_streams
from models.toy import toy
from neuron_streams.decode import DecodeLoop, ModelRunner, RequestOutput, SamplingParams
from neuron_streams.testing import (
    DeadlockError,
    EmulatedRuntime,
    Gate,
    ManualRuntime,
    is_ready,
    use_runtime,
)
from tests.decode.compiled_hash_model import CompiledHashModel
from tests.decode.fuzz import Play, make_script
from tests.decode.hash_model import reference

MODES: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False},
    "materialize": {},
    "gather": {"policy": "gather"},
}
LONG = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)


@pytest.fixture(params=["1", "0"], ids=["implicit waits", "no implicit waits"])
def implicit_waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_STREAMS_IMPLICIT_WAITS", request.param)


@pytest.fixture
def manual(implicit_waits: None) -> Iterator[ManualRuntime]:
    with use_runtime(ManualRuntime(order=1)) as runtime:
        yield runtime


@pytest.fixture
def emulated() -> Iterator[EmulatedRuntime]:
    with use_runtime(EmulatedRuntime()) as runtime:
        yield runtime


def make_model(device: str = "neuron:0", **sizes: Any) -> CompiledHashModel:
    return CompiledHashModel(neuron_streams.compile, device, **sizes)


def expected(script: Any, max_length: int) -> tuple[list[int], str]:
    tokens, reason = reference(script.prompt, script.params, max_length)
    if script.abort_after is not None and script.abort_after < len(tokens):
        return tokens[: script.abort_after], "abort"
    return tokens, reason


@pytest.mark.parametrize("output_thread", [False, True], ids=["by hand", "thread"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_on_the_manual_runtime(
    manual: ManualRuntime, mode: str, output_thread: bool
) -> None:
    model = make_model(prefill_batch=2)
    for seed in range(6):
        model.calls.clear()
        loop = DecodeLoop(model, output_thread=output_thread, **MODES[mode])
        game = Play(make_script(seed), loop, manual, seed)
        results = game.run(model)
        for name, script in game.named.items():
            want = expected(script, model.max_length)
            assert (results.tokens[name], results.reasons[name]) == want
        assert loop.close() == ()


@pytest.mark.parametrize("policy", ["materialize", "gather"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tokens_on_the_emulated_runtime(emulated: EmulatedRuntime, depth: int, policy: str) -> None:
    model = make_model()
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]]
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (5, 12, 9, 3)]
    with DecodeLoop(model, depth=depth, policy=policy) as loop:
        tokens: dict[str, list[int]] = {}
        for output in loop.generate(prompts, params):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    for number, prompt in enumerate(prompts):
        assert tokens[str(number)] == reference(prompt, params[number], model.max_length)[0]


def test_the_async_loop_submits_ahead_of_a_gate(manual: ManualRuntime) -> None:
    model = make_model()
    loop = DecodeLoop(model, output_thread=False)
    loop.add_request("a", [1, 2], LONG)
    for _ in range(3):
        loop.step()
    with Gate(loop.runner.compute_stream):
        loop.step()
        held = model.calls[-1]
        with pytest.raises(DeadlockError):
            loop.step()
        ahead = model.calls[-1]
        assert ahead.input_ids is held.output
        assert not is_ready(held.output)
        assert not is_ready(ahead.output)


def test_the_sync_loop_submits_nothing_ahead_of_a_gate(manual: ManualRuntime) -> None:
    model = make_model()
    loop = DecodeLoop(model, async_scheduling=False)
    loop.add_request("a", [1, 2], LONG)
    for _ in range(2):
        loop.step()
    with Gate(loop.runner.compute_stream), pytest.raises(DeadlockError):
        loop.step()
    assert [call.kind for call in model.calls] == ["prefill", "decode", "decode"]
    assert not is_ready(model.calls[-1].output)


def test_on_the_emulated_runtime_no_step_waits_for_the_one_before(
    emulated: EmulatedRuntime,
) -> None:
    model = make_model()
    loop = DecodeLoop(model)
    loop.add_request("a", [1, 2], LONG)
    for _ in range(4):
        loop.step()
    oldest = len(loop.batch_queue)
    assert oldest == 1
    with Gate(loop.runner.compute_stream):
        # The queue holds one step that the gate does not hold, so this neither blocks nor reads.
        loop.step()
        assert model.calls[-1].input_ids is model.calls[-2].output
        assert not is_ready(model.calls[-1].output)
    tokens = [token for output in loop.drain() for token in output.new_token_ids]
    assert tokens == reference([1, 2], LONG, model.max_length)[0][4:5]
    loop.close()


def test_a_loop_runs_on_the_stream_that_is_current_when_it_is_made(manual: ManualRuntime) -> None:
    mine = neuron_streams.Stream()
    mine.wait_stream(neuron_streams.current_stream())
    with neuron_streams.stream(mine):
        loop = DecodeLoop(make_model(), output_thread=False)
    assert loop.runner.compute_stream == mine
    tokens = [t for out in loop.generate([[1, 2]], LONG) for t in out.new_token_ids]
    assert tokens == reference([1, 2], LONG, 24)[0]
    assert neuron_streams.current_stream() == neuron_streams.default_stream()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runtime", [ManualRuntime, EmulatedRuntime])
def test_a_device_failure_ends_its_request_with_the_cause(runtime: Any, mode: str) -> None:
    with use_runtime(runtime()):
        model = make_model(max_length=10)
        model.max_length = 12  # more than the cache has, so the device fails at position 10
        loop = DecodeLoop(model, **MODES[mode])
        outputs: list[RequestOutput] = list(loop.generate([[1, 2]], LONG))
        got = [token for output in outputs for token in output.new_token_ids]
        assert got == reference([1, 2], LONG, 11)[0]
        assert outputs[-1].finish_reason == "error"
        assert isinstance(outputs[-1].error, IndexError | RuntimeError)
        assert "out of" in str(outputs[-1].error)
        assert loop.close() == ()


@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_the_runtime_ends_the_loop_with_one_cause(mode: str) -> None:
    runtime = EmulatedRuntime()
    with use_runtime(runtime):
        loop = DecodeLoop(make_model(), **MODES[mode])
        for number in range(3):
            loop.add_request(str(number), [number + 1], LONG)
        with Gate(loop.runner.compute_stream):
            if mode != "sync":
                loop.step()
            runtime.close(0.0)
        outputs: list[RequestOutput] = []
        with pytest.raises(RuntimeError, match="when the runtime was closed|runtime .* is closed"):
            outputs.extend(itertools.chain.from_iterable(iter(loop.step, None)))
        with pytest.raises(RuntimeError) as again:
            loop.step()
        assert all(output.error is again.value for output in outputs)
        assert loop.close() == ()


def test_eight_ranks_on_eight_devices_have_equal_histories() -> None:
    with use_runtime(EmulatedRuntime(devices=8)):
        models = [make_model(f"neuron:{rank}") for rank in range(8)]
        loop = DecodeLoop(models[0])
        schedules: list[Any] = []
        execute = loop.runner.execute_model
        loop.runner.execute_model = lambda out: schedules.append(out) or execute(out)  # type: ignore
        prompts = [[1], [2, 2], [3, 3, 3]]
        params = [SamplingParams(max_tokens=4 + n, seed=n) for n in range(3)]
        for _ in loop.generate(prompts, params):
            pass
        failures: list[BaseException] = []

        def follow(rank: int) -> None:
            try:
                neuron_streams.set_device(rank)
                runner = ModelRunner(models[rank], neuron_streams, is_output_rank=False)
                for schedule in schedules:
                    runner.execute_model(schedule)
                    if schedule.num_scheduled_tokens:
                        runner.sample_tokens()
                assert len(runner._pending_outputs) <= 2
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        histories = [model.state[0].to("cpu").tolist() for model in models]
        assert all(history == histories[0] for history in histories)
        loop.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_llama_gives_the_tokens_of_sync_under_both_policies(temperature: float) -> None:
    def compiler(*args: Any, **kwargs: Any) -> Any:
        return neuron_streams.compile(*args, **kwargs, target="exported")

    tokens: dict[str, dict[str, list[int]]] = {}
    with use_runtime(EmulatedRuntime()):
        model = toy(batch_buckets=(4,), compile=compiler)
        for mode, options in MODES.items():
            with DecodeLoop(model, **options) as loop:
                params = [
                    SamplingParams(max_tokens=4 + 3 * n, temperature=temperature * (n % 2), seed=n)
                    for n in range(6)
                ]
                # The longest take two and three pieces, of at most 16 tokens.
                prompts = [[n + 3, 5, 7] * (1 + 3 * n) for n in range(6)]
                for output in loop.generate(prompts, params):
                    got = tokens.setdefault(mode, {}).setdefault(output.request_id, [])
                    got += output.new_token_ids
                if mode == "gather":
                    assert loop.stats.async_share == 1.0
    assert tokens["sync"] == tokens["materialize"] == tokens["gather"]
    assert len(tokens["sync"]) == 6
