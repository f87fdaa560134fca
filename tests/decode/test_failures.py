"""A failing step takes its own requests with it and no other; what ends the loop says why."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from neuron_streams.decode import RequestOutput, SamplingParams
from tests.decode import harness
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import drive, make_loop
from tests.decode.hash_model import reference

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


def test_a_launch_that_is_refused_after_a_failed_step_ends_the_loop_with_the_first_cause() -> None:
    loop, model, _ = make_loop()
    model.fail_at = {1}
    loop.add_request("a", [1, 2], limited(9))
    outputs = loop.step() + loop.step() + loop.step()
    while not outputs or not outputs[-1].finished:
        outputs += loop.step()

    def refuse(*inputs: object) -> Any:
        raise RuntimeError("the device is gone")

    model.prefill = refuse  # type: ignore[method-assign]
    loop.drain()
    loop.add_request("b", [3], limited(9))
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="^the device failed in call 1$"):
            loop.step()
    with pytest.raises(ArithmeticError):
        loop.add_request("c", [3])
    assert not loop.has_unfinished_requests()
    assert loop.close() == ()


def test_a_step_that_succeeds_is_no_cause_of_a_later_refusal() -> None:
    loop, model, _ = make_loop()
    model.fail_at = {0}
    list(loop.generate([[1]], limited(3)))
    list(loop.generate([[1]], limited(3)))

    def refuse(*inputs: object) -> Any:
        raise RuntimeError("no memory")

    model.prefill = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        list(loop.generate([[1]], limited(3)))


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
