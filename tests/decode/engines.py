"""Engines to test with: driven by hand on fake streams, so that a test decides what happens."""

from __future__ import annotations

from typing import Any

from neuron_streams.decode import DecodeEngine, RequestOutput, RequestStream, SamplingParams
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import check_idle, make_loop
from tests.decode.hash_model import FakeHashModel, reference


def make_engine(
    *, thread: bool = False, max_queued: int = 64, **options: Any
) -> tuple[DecodeEngine, FakeHashModel, FakeStreams]:
    options.setdefault("output_thread", thread)
    loop, model, streams = make_loop(**options)
    return DecodeEngine(loop, max_queued=max_queued, thread=thread), model, streams


def limited(max_tokens: int, seed: int = 1, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **options)


def oracle(prompt: list[int], params: SamplingParams) -> list[int]:
    return reference(prompt, params, 24)[0]


def run(engine: DecodeEngine, limit: int = 1000) -> None:
    """Turn until there is nothing to do."""
    for _ in range(limit):
        if not engine.turn():
            return
    raise AssertionError("the engine spins")


def turns(engine: DecodeEngine, count: int) -> None:
    for _ in range(count):
        engine.turn()


def queued(stream: RequestStream) -> list[RequestOutput]:
    """What has arrived, taken."""
    return [next(stream) for _ in range(len(stream._queue))]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def check_rest(engine: DecodeEngine) -> None:
    """Nothing is left of any request."""
    core = engine._core
    assert engine.unfinished_request_ids == ()
    for left in (core._by_id, core._open, core._live, core._nearly_full, core._drains):
        assert not left
    check_idle(core.loop)
