"""The same loop on torch.cuda itself, with no runtime of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from neuron_streams.decode import DecodeLoop, SamplingParams
from neuron_streams.decode.logprobs import TokenLogprobs
from tests.decode.compiled_hash_model import CompiledHashModel
from tests.decode.hash_model import reference, reference_logprobs


def eager(fn: Callable[..., Any], examples: Mapping[str, torch.Tensor], **_: Any) -> Any:
    """The signature of `neuron_streams.compile`; host inputs are copied at the call."""

    def run(*tensors: torch.Tensor) -> Any:
        return fn(*(tensor.to("cuda") for tensor in tensors))

    return run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": False}, {}, {"policy": "gather"}, {"policy": "gather", "depth": 4}],
    ids=["sync", "materialize", "gather", "gather 4"],
)
def test_tokens_on_a_gpu(options: dict[str, Any]) -> None:
    model = CompiledHashModel(eager, "cuda")
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]]
    adjusted = {
        "frequency_penalty": 0.5,
        "min_tokens": 3,
        "stop_token_ids": (1, 2, 3),
        "logprobs": 2,
    }
    params = [
        SamplingParams(max_tokens=n, seed=n, ignore_eos=True, **(adjusted if n % 2 else {}))
        for n in (5, 12, 9, 3)
    ]
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    with DecodeLoop(model, streams=torch.cuda, **options) as loop:
        for output in loop.generate(prompts, params):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            logprobs.setdefault(output.request_id, []).extend(output.logprobs or ())
    for number, prompt in enumerate(prompts):
        want, _ = reference(prompt, params[number], model.max_length)
        assert tokens[str(number)] == want
        assert logprobs[str(number)] == (reference_logprobs(prompt, want, params[number]) or [])
    assert (loop.stats.async_steps > 0) == loop.runner.use_async_scheduling
