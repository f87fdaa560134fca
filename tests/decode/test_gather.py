"""`policy="gather"`: join, finish and reorder without reading anything back."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_streams.decode import RequestOutput, SamplingParams
from neuron_streams.decode.gather import GatherRunner
from neuron_streams.errors import UnsupportedError
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import check_invariants, make_loop
from tests.decode.hash_model import EOS, FakeHashModel, reference


def limited(max_tokens: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def tokens_of(outputs: list[RequestOutput], request_id: str) -> list[int]:
    return [t for out in outputs if out.request_id == request_id for t in out.new_token_ids]


def test_a_model_without_a_gather_is_refused() -> None:
    class Plain(FakeHashModel):
        decode_gather = None  # type: ignore[assignment]

    streams = FakeStreams()
    with pytest.raises(UnsupportedError, match='^policy="gather": Plain has no decode_gather'):
        GatherRunner(Plain(streams), streams)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_step_is_async_whatever_joins_leaves_or_moves(depth: int) -> None:
    loop, model, streams = make_loop(policy="gather", depth=depth)
    params = [limited(n, n) for n in (3, 9, 5, 12, 1, 7)]
    for number, each in enumerate(params):
        loop.add_request(str(number), [number + 1], each)
    outputs = []
    while loop.has_unfinished_requests():
        batch = loop.runner.input_batch
        if batch.num_reqs > 1:
            batch.swap_states(0, batch.num_reqs - 1)
        outputs += loop.step()
        check_invariants(loop, model)
    for number, each in enumerate(params):
        want = reference([number + 1], each, model.max_length)[0]
        assert tokens_of(outputs, str(number)) == want
    assert loop.stats.async_steps == loop.stats.steps
    assert not loop.stats.fallback_reasons
    assert streams.blocking_reads == 0
    assert not model.of("remap")


def test_a_request_joins_and_leaves_while_the_device_is_held() -> None:
    """Nothing on the critical path: six steps are launched, three joins and a finish among them,
    before the device has run one."""
    loop, model, streams = make_loop(policy="gather", depth=8)
    with streams.hold(loop.runner.compute_stream):
        for number, request_id in enumerate("abc"):
            loop.add_request(request_id, [number + 1], limited(2 if number else 9, number))
            loop.step()
        for _ in range(3):
            loop.step()
        assert [call.kind for call in model.calls] == ["prefill"] * 3 + ["decode"] * 3
        assert model.executed == 0
        assert [sorted(call.slots) for call in model.calls[3:]] == [[0, 1, 2, 3], [1], [1]]
    outputs = []
    while loop.has_unfinished_requests():
        outputs += loop.step()
    for number, request_id in enumerate("abc"):
        each = limited(2 if number else 9, number)
        assert tokens_of(outputs, request_id) == reference([number + 1], each, 24)[0]


def test_the_first_decode_takes_the_prefills_token_from_the_device() -> None:
    loop, model, streams = make_loop(policy="gather", sizes={"batch_buckets": (4,)})
    with streams.hold(loop.runner.compute_stream):
        loop.add_request("a", [1, 2], limited(3))
        loop.step()
        with pytest.raises(RuntimeError, match="deadlock"):
            loop.step()
        assert model.calls[1].host_ids == [-1, 0, 0, 0]
        assert model.calls[1].positions.tolist() == [2, 0, 0, 0]


def test_a_row_that_the_host_knows_comes_from_the_host() -> None:
    loop, model, _ = make_loop(policy="gather")
    loop.add_request("a", [1, 2], limited(6))
    loop.step()
    (output,) = loop.drain()
    loop.step()
    assert model.calls[-1].host_ids == list(output.new_token_ids)


def test_a_dtype_that_differs_changes_nothing() -> None:
    import torch

    loop, _, _ = make_loop(policy="gather", sizes={"prefill_dtype": torch.int64})
    outputs = list(loop.generate([[1, 2]], limited(6)))
    assert tokens_of(outputs, "0") == reference([1, 2], limited(6), 24)[0]
    assert loop.stats.async_share == 1.0


def test_a_slot_given_to_another_request_keeps_nothing_of_the_old_one() -> None:
    """The request that stopped has one more step in flight, which scatters into its slot."""
    seed = next(
        seed
        for seed in range(1000)
        if EOS in reference([1], SamplingParams(max_tokens=9, seed=seed), 24)[0][1:4]
    )
    loop, _, _ = make_loop(policy="gather", depth=4, sizes={"num_slots": 2})
    params = [SamplingParams(max_tokens=9, seed=seed), limited(9, 5)]
    outputs = list(loop.generate([[1], [2]], params))
    assert tokens_of(outputs, "1") == reference([2], params[1], 24)[0]
    assert loop.stats.extra_tokens_dropped == 3


def test_a_schedule_that_skips_a_step_is_found_out() -> None:
    loop, _, _ = make_loop(policy="gather")
    loop.add_request("a", [1, 2], limited(6))
    loop.step()
    loop.scheduler.running[0].num_computed_tokens += 1
    with pytest.raises(RuntimeError, match="decodes at position 3, but the last token sampled"):
        loop.step()


def test_without_async_scheduling_the_policy_changes_nothing() -> None:
    options: dict[str, Any] = {"policy": "gather", "async_scheduling": False}
    loop, _, _ = make_loop(**options)
    assert not isinstance(loop.runner, GatherRunner)
    assert (
        tokens_of(list(loop.generate([[1]], limited(3))), "0") == reference([1], limited(3), 24)[0]
    )
