"""A failing step takes its own requests with it and no other; what ends the loop says why."""

from __future__ import annotations

import re
import threading
from functools import partial
from typing import Any

import pytest
import torch

from neuron_streams.decode import (
    DecodeLoop,
    ModelRunnerOutput,
    RequestOutput,
    SamplerOutput,
    SamplingParams,
)
from neuron_streams.decode.logprobs import split
from neuron_streams.decode.request import RequestKey
from tests.decode import harness
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import drive, make_loop
from tests.decode.hash_model import VOCAB, FakeHashModel, reference

MODES: dict[str, dict[str, Any]] = {
    **harness.MODES,
    "thread": {"output_thread": True},
    "gather thread": {"policy": "gather", "output_thread": True},
}
modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


def limited(max_tokens: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def tokens_of(outputs: list[RequestOutput], request_id: str) -> list[int]:
    return [t for out in outputs if out.request_id == request_id for t in out.new_token_ids]


def ends_of(outputs: list[RequestOutput]) -> dict[str, tuple[str, Exception | None]]:
    ends = [out for out in outputs if out.finish_reason is not None]
    assert len({out.request_id for out in ends}) == len(ends), "told twice"
    return {out.request_id: (out.finish_reason or "", out.error) for out in ends}


@modes
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_failed_step_ends_its_request_with_the_cause_and_the_loop_goes_on(
    options: dict[str, Any], step: int
) -> None:
    loop, model, _ = make_loop(**options)
    model.fail_at = {step}
    outputs = list(loop.generate([[1, 2]], limited(9)))
    (reason, error) = ends_of(outputs)["0"]
    assert reason == "error"
    assert isinstance(error, ArithmeticError)
    assert str(error) == f"the device failed in call {step}"
    assert error.__traceback__ is not None
    assert tokens_of(outputs, "0") == reference([1, 2], limited(9), 24)[0][:step]
    again = list(loop.generate([[1, 2]], limited(9)))
    assert tokens_of(again, "0") == reference([1, 2], limited(9), 24)[0]
    assert loop.close() == ()


@modes
@pytest.mark.parametrize("step", range(10))
def test_the_requests_that_were_not_in_the_failed_step_lose_nothing(
    options: dict[str, Any], step: int
) -> None:
    """Whatever step fails, those it did not name get all their tokens; the others the cause."""
    loop, model, _ = make_loop(**options)
    model.fail_at = {step}
    params = {"a": limited(3, 1), "b": limited(12, 2), "c": limited(7, 3)}
    outputs = []
    for number, (request_id, each) in enumerate(params.items()):
        loop.add_request(request_id, [number + 1], each)
        outputs += loop.step()
        outputs += loop.step()
    outputs += drive(loop, model)
    failed = set(model.calls[step].slots)
    ends = ends_of(outputs)
    assert {reason for reason, _ in ends.values()} == {"length", "error"} or len(failed) == 3
    for number, (request_id, each) in enumerate(params.items()):
        want = reference([number + 1], each, model.max_length)[0]
        got, (reason, error) = tokens_of(outputs, request_id), ends[request_id]
        if reason == "error":
            assert str(error) == f"the device failed in call {step}"
            assert got == want[: len(got)]
        else:
            assert (reason, error) == ("length", None)
            assert got == want
    assert sum(reason == "error" for reason, _ in ends.values()) == len(failed - {0})


def test_what_was_chained_to_a_failed_step_fails_with_the_same_cause_and_is_told_once() -> None:
    loop, model, streams = make_loop(depth=4)
    model.fail_at = {2}
    for number, request_id in enumerate("ab"):
        loop.add_request(request_id, [number + 1], limited(9))
    outputs = drive(loop, model)
    assert {error for _, error in ends_of(outputs).values()} == {model.calls[2].output.error}
    failed = [call for call in model.calls if call.output.error is not None]
    assert len(failed) > 1
    assert len({id(call.output.error) for call in failed}) == 1
    assert streams.run() == 0


def test_with_gather_a_failed_step_spoils_no_later_step_of_others() -> None:
    loop, model, _ = make_loop(policy="gather", depth=4)
    loop.add_request("a", [1], limited(12, 1))
    loop.add_request("b", [2], limited(12, 2))
    model.fail_at = {0}
    outputs = drive(loop, model)
    assert [call.output.error is None for call in model.calls[:4]] == [False, True, True, True]
    assert sorted(model.calls[2].slots) == [1, 2], "both ran on, the failure was not known yet"
    assert tokens_of(outputs, "b") == reference([2], limited(12, 2), 24)[0]
    assert tokens_of(outputs, "a") == []


def test_a_break_that_finds_the_failure_sends_no_unknown_token_to_the_device() -> None:
    loop, model, _ = make_loop()
    loop.add_request("a", [1, 2], limited(9))
    loop.step()
    loop.add_request("b", [3], limited(9))
    outputs = loop.step()
    model.fail_at = {1}  # b's prefill
    outputs += loop.step()
    decode = model.of("decode")[0]
    assert decode.host_ids is not None
    assert min(decode.host_ids) >= 0
    assert sorted(decode.slots) == [0, 1]
    outputs += drive(loop, model)
    assert tokens_of(outputs, "a") == reference([1, 2], limited(9), 24)[0]
    assert ends_of(outputs)["b"][0] == "error"


# What a launch refuses, or a model returns, fails the step that it is in


THREE = {"a": limited(3, 1), "b": limited(12, 2), "c": limited(7, 3)}


def run_three(loop: DecodeLoop, model: FakeHashModel) -> list[RequestOutput]:
    """Three requests that arrive two steps after one another, to the end."""
    outputs = []
    for number, (request_id, each) in enumerate(THREE.items()):
        loop.add_request(request_id, [number + 1], each)
        outputs += loop.step()
        outputs += loop.step()
    return outputs + drive(loop, model)


def check_three(outputs: list[RequestOutput], cause: type[Exception]) -> list[str]:
    """Those that have failed; the others have all their tokens, and these a beginning of them."""
    ends, failed = ends_of(outputs), list[str]()
    for number, (request_id, each) in enumerate(THREE.items()):
        want = reference([number + 1], each, 24)[0]
        got, (reason, error) = tokens_of(outputs, request_id), ends[request_id]
        if reason == "error":
            assert type(error) is cause
            assert got == want[: len(got)]
            failed.append(request_id)
        else:
            assert (reason, error, got) == ("length", None, want)
    return failed


@modes
@pytest.mark.parametrize("step", range(10))
def test_a_launch_that_is_refused_ends_the_requests_of_its_step_and_no_other(
    options: dict[str, Any], step: int
) -> None:
    loop, model, _ = make_loop(**options)
    model.refuse_at = {step}
    outputs = run_three(loop, model)
    (slots,) = model.refused
    assert len(check_three(outputs, OSError)) == len(set(slots) - {0})
    again = list(loop.generate([[1, 2]], limited(9)))
    assert tokens_of(again, "0") == reference([1, 2], limited(9), 24)[0]
    assert loop.close() == ()


@modes
@pytest.mark.parametrize("kind", ["prefill_input", "decode_input", "num_logprobs"])
def test_inputs_that_cannot_be_built_end_the_requests_of_their_step(
    options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, model, _ = make_loop(**options)
    build = getattr(loop.runner.input_batch, kind)
    broken: list[int] = []

    def broken_once(*args: Any) -> Any:
        rows = loop.runner.input_batch.req_ids
        if not broken and rows[-1].request_id == "b":
            broken.append(len(rows))
            raise IndexError("dtypes do not match")
        return build(*args)

    monkeypatch.setattr(loop.runner.input_batch, kind, broken_once)
    assert len(check_three(run_three(loop, model), IndexError)) == broken[0]


def test_a_remap_that_is_refused_ends_the_requests_of_its_step() -> None:
    loop, model, _ = make_loop()
    remap = model.remap
    model.remap = lambda *_: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    for number, request_id in enumerate("ab"):
        loop.add_request(request_id, [number + 1], limited(9, number))
    outputs = [output for _ in range(4) for output in loop.step()]
    loop.runner.input_batch.swap_states(0, 1)
    outputs += drive(loop, model)
    assert {type(error) for _, error in ends_of(outputs).values()} == {ZeroDivisionError}
    model.remap = remap  # type: ignore[method-assign]
    again = list(loop.generate([[1, 2]], limited(9)))
    assert tokens_of(again, "0") == reference([1, 2], limited(9), 24)[0]


NO_TOKENS: dict[str, Any] = {
    "None": None,
    "a list": [3],
    "a number": 3,
    "floats": torch.tensor([3.5]),
    "NaN": torch.tensor([float("nan")]),
    "bools": torch.tensor([True]),
    "a column": torch.tensor([[3]]),
    "no row": torch.tensor([], dtype=torch.int32),
    "a single number": torch.tensor(3),
    "a plain pair": (torch.tensor([3]), None),
    "nothing in a SamplerOutput": SamplerOutput(None, None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("options", [MODES["sync"], MODES["materialize"], MODES["gather 4"]])
@pytest.mark.parametrize("returned", NO_TOKENS.values(), ids=NO_TOKENS)
@pytest.mark.parametrize("kind", ["prefill", "decode", "decode_gather"])
def test_a_model_that_returns_no_token_ids_is_told_the_contract(
    options: dict[str, Any], kind: str, returned: Any
) -> None:
    loop, model, _ = make_loop(**options)
    call = getattr(model, kind)
    fail = False

    def wrong(*inputs: Any) -> Any:
        return returned if fail else call(*inputs)

    setattr(model, kind, wrong)
    loop.add_request("a", [1, 2], limited(5))
    fail = True
    outputs = []
    while loop.has_unfinished_requests():
        outputs += loop.step()
    (reason, error) = ends_of(outputs)["a"]
    if reason == "error":
        assert re.match(r"The model returned .* for 1 rows; prefill, .* int32 \[1\]", str(error))
        assert tokens_of(outputs, "a") == reference([1, 2], limited(5), 24)[0][: kind != "prefill"]
    else:
        assert kind == ("decode" if options.get("policy") == "gather" else "decode_gather")
    fail = False
    again = list(loop.generate([[1, 2]], limited(9)))
    assert tokens_of(again, "0") == reference([1, 2], limited(9), 24)[0]


@modes
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_ends_its_own_request(
    options: dict[str, Any], token: int
) -> None:
    """Prefills are of one row, so the token is that of one request."""
    loop, model, _ = make_loop(**options)
    scatter = model._scatter

    def wrong(slots: list[int], tokens: list[int]) -> list[int]:
        sampled = scatter(slots, tokens)
        return [token] if model.executed == 3 else sampled

    model._scatter = wrong  # type: ignore[method-assign]
    outputs = run_three(loop, model)
    ((failed, (_, error)),) = [end for end in ends_of(outputs).items() if end[1][0] == "error"]
    message = f"^The model sampled token {token} for request {failed!r}; .* from 0 to {VOCAB - 1} "
    assert re.match(message, str(error))
    assert check_three(outputs, RuntimeError) == [failed]


def test_a_row_without_a_token_of_the_vocabulary_leaves_the_other_rows_alone() -> None:
    keys = [RequestKey(name, 0) for name in "abc"]
    tokens = torch.tensor([3, -1, 31, 99], dtype=torch.int32)
    output = ModelRunnerOutput.from_host(keys, tokens, vocab_size=31)
    assert output.sampled_token_ids == [[3], [], []]
    assert [type(output.error_of(key)) for key in keys] == [type(None), RuntimeError, RuntimeError]
    partial = frozenset(keys[1:])
    assert not ModelRunnerOutput.from_host(keys, tokens, partial, vocab_size=31).row_errors
    assert list(ModelRunnerOutput.from_host(keys, tokens).row_errors) == keys[1:2]


@modes
def test_what_was_copied_and_cannot_be_read_ends_the_requests_of_its_step(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, _, _ = make_loop(**options)

    def broken(*args: object) -> Any:
        raise IndexError("no such row")

    monkeypatch.setattr("neuron_streams.decode.sampled.logprobs_of_rows", broken)
    params = SamplingParams(max_tokens=1, seed=1, logprobs=1)
    outputs = list(loop.generate([[1], [2]], [params, limited(9)]))
    ends = ends_of(outputs)
    assert (ends["0"][0], str(ends["0"][1])) == ("error", "no such row")
    assert ends["1"] == ("length", None)
    assert tokens_of(outputs, "1") == reference([2], limited(9), 24)[0]


def test_logprobs_that_a_model_does_not_give_end_the_requests_that_want_them() -> None:
    for options in MODES.values():
        loop, model, _ = make_loop(**options)
        model._prefill = partial(_without_logprobs, model, model._prefill)  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=3, seed=1, logprobs=1)
        outputs = list(loop.generate([[1], [2]], [params, limited(9)]))
        ends = ends_of(outputs)
        assert "A request wants log-probabilities and the model gave none" in str(ends["0"][1])
        assert ends["1"] == ("length", None)
        assert tokens_of(outputs, "1") == reference([2], limited(9), 24)[0]
        loop.close()


def _without_logprobs(model: FakeHashModel, prefill: Any, *inputs: Any) -> Any:
    sampled = prefill(*inputs)
    model.wants_logprobs = [False] * model.num_slots
    return split(sampled)[0]


def test_a_refused_launch_leaves_no_step_in_a_trace() -> None:
    for options in MODES.values():
        loop, model, _ = make_loop(**options)
        model.refuse_at = {1}
        with loop.trace() as trace:
            outputs = list(loop.generate([[1, 2], [3]], limited(5)))
        assert "error" in {reason for reason, _ in ends_of(outputs).values()}
        assert len(trace.records) == len(model.calls)
        assert [record.number for record in trace.records] == [*range(1, len(model.calls) + 1)]
        loop.close()


@modes
def test_a_loop_whose_stream_is_gone_ends_with_the_first_cause(options: dict[str, Any]) -> None:
    loop, model, streams = make_loop(**options)
    model.fail_at = {1}
    for failed in (True, False):
        outputs = list(loop.generate([[1, 2]], limited(9 if failed else 3)))
        assert (ends_of(outputs)["0"][0] == "error") is failed
    loop.drain()

    def refuse(stream: object) -> Any:
        raise RuntimeError("the device is gone")

    streams.stream = refuse  # type: ignore[method-assign]
    loop.add_request("b", [3], limited(9))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^the device is gone$"):
            loop.step()
    with pytest.raises(RuntimeError, match="^the device is gone$"):
        loop.add_request("c", [3])
    assert not loop.has_unfinished_requests()
    assert loop.close() == ()


def test_what_the_device_refuses_after_a_failed_step_it_refuses_because_of_that() -> None:
    loop, model, streams = make_loop()
    model.fail_at = {1}
    loop.add_request("a", [1, 2], limited(9))
    while loop.has_unfinished_requests():
        loop.step()
    streams.stream = lambda stream: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    loop.add_request("b", [3], limited(9))
    with pytest.raises(ArithmeticError, match="^the device failed in call 1$"):
        loop.step()


# The watchdog


class HeldEvents(FakeStreams):
    """Waits block until `release`, as on a device that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.release.set()

    def reach(self, stream: Any, value: int) -> None:
        self.release.wait()
        super().reach(stream, value)


def test_the_watchdog_names_the_step_that_hangs_and_its_requests() -> None:
    streams = HeldEvents()
    loop, _, _ = make_loop(streams, output_thread=True, watchdog=0.02)
    loop.add_request("quick", [1], limited(2))
    while loop.has_unfinished_requests():
        loop.step()
    streams.release.clear()
    loop.add_request("slow", [1, 2], limited(6))
    message = "^The watchdog waited 0.02 s for step 3, of requests 'slow', and it has not ended"
    assert loop.step() == []
    with pytest.raises(TimeoutError, match=message):
        loop.step()
    with pytest.raises(TimeoutError, match=message):
        loop.step()
    streams.release.set()
    loop.close()


def test_the_watchdog_watches_a_break_of_the_async_flow_too() -> None:
    streams = HeldEvents()
    loop, model, _ = make_loop(streams, output_thread=True, watchdog=0.02)
    streams.release.clear()
    loop.add_request("a", [1], limited(9))
    loop.step()
    loop.add_request("b", [2], limited(9))
    with pytest.raises(TimeoutError, match=r"step 1, of requests 'a', and it has not ended"):
        loop.step()
    assert len(model.calls) == 1
    streams.release.set()
    loop.close()


def test_a_decode_step_after_a_refused_one_takes_its_tokens_from_the_host() -> None:
    """A refused step leaves no future behind, not even that of the step before it."""
    loop, model, _ = make_loop(depth=1)
    for name in "ab":
        loop.add_request(name, [1, 2], limited(20))
    for _ in range(6):
        loop.step()
    before = loop.stats.fallback_reasons["composition"]
    model.refuse_at = {len(model.calls)}
    loop.add_request("c", [3], limited(3))
    loop.step()
    assert model.refused
    loop.step()
    assert loop.stats.fallback_reasons["composition"] == before + 1
    outputs = drive(loop, model)
    assert ends_of(outputs)["a"] == ("length", None)
