"""The same loop on torch.cuda itself, with no runtime of ours."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from models import cuda_graph, toy
from neuron_streams.decode import DecodeLoop, SamplingParams
from neuron_streams.decode.logprobs import TokenLogprobs
from tests.decode.compiled_hash_model import CompiledHashModel
from tests.decode.hash_model import reference, reference_logprobs

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ADJUSTED: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "min_tokens": 3,
    "stop_token_ids": (1, 2, 3),
    "logprobs": 2,
}
PARAMS = [
    SamplingParams(max_tokens=n, seed=n, ignore_eos=True, **(ADJUSTED if n % 2 else {}))
    for n in (5, 12, 9, 3)
]


def eager(fn: Callable[..., Any], examples: Mapping[str, torch.Tensor], **_: Any) -> Any:
    """The signature of `neuron_streams.compile`; host inputs are copied at the call."""

    def run(*tensors: torch.Tensor) -> Any:
        return fn(*(tensor.to("cuda") for tensor in tensors))

    return run


def graphs(fn: Callable[..., Any], examples: Mapping[str, torch.Tensor], **options: Any) -> Any:
    return cuda_graph.compile(fn, examples, mutates=options["mutates"], name=options["name"])


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("compiler", [eager, graphs])
@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": False}, {}, {"policy": "gather"}, {"policy": "gather", "depth": 4}],
    ids=["sync", "materialize", "gather", "gather 4"],
)
def test_tokens_on_a_gpu(options: dict[str, Any], compiler: Any) -> None:
    model = CompiledHashModel(compiler, "cuda")
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]]
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    with DecodeLoop(model, streams=torch.cuda, **options) as loop:
        for output in loop.generate(prompts, PARAMS):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            logprobs.setdefault(output.request_id, []).extend(output.logprobs or ())
    for number, prompt in enumerate(prompts):
        want, _ = reference(prompt, PARAMS[number], model.max_length)
        assert tokens[str(number)] == want
        assert logprobs[str(number)] == (reference_logprobs(prompt, want, PARAMS[number]) or [])
    assert (loop.stats.async_steps > 0) == loop.runner.use_async_scheduling


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_llama_of_cuda_graphs_gives_the_tokens_of_sync(temperature: float) -> None:
    params = [
        SamplingParams(max_tokens=4 + 3 * n, temperature=temperature * (n % 2), seed=n)
        for n in range(6)
    ]
    prompts = [[n + 3, 5, 7] * (1 + 3 * n) for n in range(6)]
    tokens: list[dict[str, list[int]]] = []
    for options in ({"async_scheduling": False}, {}, {"policy": "gather"}):
        model = toy.toy(batch_buckets=(4,), device="cuda", compile=cuda_graph.compile)
        got: dict[str, list[int]] = {}
        with DecodeLoop(model, streams=torch.cuda, **options) as loop:  # type: ignore[arg-type]
            for output in loop.generate(prompts, params):
                got.setdefault(output.request_id, []).extend(output.new_token_ids)
        tokens.append(got)
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.gpu
@on_a_gpu
def test_a_trace_of_a_gpu() -> None:
    model = toy.toy(batch_buckets=(1,), device="cuda", compile=cuda_graph.compile)
    with DecodeLoop(model, streams=torch.cuda) as loop:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        list(loop.generate([[1, 2, 3]], params))  # captures, which a trace had better not show
        with loop.trace() as trace:
            list(loop.generate([[1, 2, 3]], params))
    assert len(trace.records) == 20
    for record in trace.records:
        assert record.prepare
        assert record.device
        assert record.read
        assert record.prepare.end - 1e-3 < record.device.start < record.device.end
        assert record.device.end < record.read.end + 1e-3
    for before, after in itertools.pairwise(trace.records):
        assert before.device
        assert after.device
        assert before.device.end <= after.device.start + 1e-4  # float32 milliseconds


NOTHING_OF_OURS = """
import sys, threading, torch
import neuron_streams
from neuron_streams.decode import DecodeLoop, SamplingParams
{make}
for options in (dict(async_scheduling=False), dict(), dict(policy="gather")):
    with DecodeLoop(model, streams=streams, **options) as loop:
        with loop.trace():
            outputs = list(loop.generate([[1, 2], [3]], SamplingParams(max_tokens=5)))
        assert outputs
        started = {{t.name for t in threading.enumerate() if t.name.startswith("neuron")}}
        assert started <= {{"neuron-streams-decode-output"}}, started
assert not neuron_streams.is_initialized()
assert "_neuron" not in sys.modules
assert torch.cuda.is_initialized() == (streams is torch.cuda)
"""


ON_FAKE_STREAMS = """
from tests.decode.fake_streams import FakeStreams
from tests.decode.hash_model import FakeHashModel
streams = FakeStreams()
model = FakeHashModel(streams)
"""
ON_A_GPU = """
from models import cuda_graph, toy
streams, model = torch.cuda, toy.toy(device="cuda", compile=cuda_graph.compile)
"""


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(ON_FAKE_STREAMS, id="fake streams"),
        pytest.param(ON_A_GPU, id="a GPU", marks=[pytest.mark.gpu, on_a_gpu]),
    ],
)
def test_nothing_of_ours_is_started(make: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NOTHING_OF_OURS.format(make=make)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
