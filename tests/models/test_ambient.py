"""What a program sets for torch as a whole changes no token: the default dtype, the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from models import toy
from neuron_streams.decode import DecodeLoop, RequestOutput, SamplingParams
from tests.decode import harness
from tests.decode.fake_streams import FakeStreams
from tests.models.reference import compile_eager

SAMPLED = {"max_tokens": 6, "temperature": 0.8, "top_k": 50, "seed": 3}
ASKED = {
    "plain": SamplingParams(max_tokens=6, seed=1),
    "sampled": SamplingParams(**SAMPLED, top_p=0.9),
    "logit_bias": SamplingParams(**SAMPLED, logit_bias={3: 4.0, 5: -(10**400), 50: 1}),
    "min_tokens": SamplingParams(**SAMPLED, min_tokens=4, stop_token_ids=range(0, 97, 3)),
    "min_p": SamplingParams(**SAMPLED, min_p=0.05),
    "repetition_penalty": SamplingParams(**SAMPLED, repetition_penalty=1.3),
    "presence_penalty": SamplingParams(**SAMPLED, presence_penalty=0.7),
    "frequency_penalty": SamplingParams(**SAMPLED, frequency_penalty=0.7),
    "logprobs": SamplingParams(**SAMPLED, logprobs=3),
}
MODES = {name: harness.MODES[name] for name in ("sync", "materialize", "gather 4")}
modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES)
PROMPTS = [[n + 1, n + 2, n + 3] for n in range(len(ASKED))]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def generated(**options: object) -> list[RequestOutput]:
    """All that a toy model, made here, gives for all kinds of requests."""
    options.setdefault("output_thread", False)
    model = toy.toy(device="cpu", compile=compile_eager)
    with DecodeLoop(model, streams=FakeStreams(), **options) as loop:  # type: ignore[arg-type]
        outputs = list(loop.generate(PROMPTS, list(ASKED.values())))
    assert {output.error for output in outputs} == {None}
    return outputs


def values(outputs: list[RequestOutput]) -> list[object]:
    return [(out.request_id, out.new_token_ids, out.logprobs) for out in outputs]


@modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_default_dtype_changes_no_token_and_no_log_probability(
    options: dict[str, object], dtype: torch.dtype
) -> None:
    want = values(generated(**options))
    with default_dtype(dtype):
        assert values(generated(**options)) == want


@modes
def test_a_default_dtype_that_comes_later_changes_nothing_either(
    options: dict[str, object],
) -> None:
    want = values(generated(**options))
    model = toy.toy(device="cpu", compile=compile_eager)
    loop = DecodeLoop(model, streams=FakeStreams(), output_thread=False, **options)  # type: ignore[arg-type]
    with default_dtype(torch.bfloat16), loop:
        assert values(list(loop.generate(PROMPTS, list(ASKED.values())))) == want


@modes
def test_the_default_device_changes_no_token(options: dict[str, object]) -> None:
    want = values(generated(**options))
    with torch.device("meta"):
        assert values(generated(**options)) == want
