"""Executables that are CUDA graphs; what is refused is refused on any machine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from models import cuda_graph, toy
from models.cuda_graph import Inputs
from tests.models.driver import Request, decode, ints, prefill

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
A_WHILE = 50_000_000  # clocks, some 30 ms


def step(ids: Tensor, memory: Tensor) -> Tensor:
    memory.add_(ids)
    return memory * 2


def inputs(mutates: tuple[str, ...] = ("memory",), device: str = "cpu") -> Inputs:
    examples = (ints([0, 0]), torch.zeros(2))
    return Inputs("step", ("ids", "memory"), examples, mutates, torch.device(device))


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ((ints([1, 2]),), TypeError, r"step takes 2 tensors \(ids, memory\), and 1 were given"),
        ((ints([1, 2]), 3), TypeError, "step: memory is int, not a tensor"),
        ((ints([1]), torch.zeros(2)), ValueError, r"step: ids is int32\[1\], and was compiled for"),
        ((torch.ones(2), torch.zeros(2)), ValueError, r"step: ids is float32\[2\], and was"),
        (
            (ints([1, 2]), torch.zeros(2, device="meta")),
            ValueError,
            "step: memory is updated in place and is on meta; move it to cpu once",
        ),
        (
            (ints([1, 2]).to("meta"), torch.zeros(2)),
            ValueError,
            "step: ids is on meta; it has to be on cpu or on the host",
        ),
    ],
)
def test_what_a_graph_would_misread_is_refused(
    given: Any, error: type[Exception], said: str
) -> None:
    inputs().check((ints([1, 2]), torch.zeros(2)))
    with pytest.raises(error, match=said):
        inputs().check(given)


def test_tensors_that_are_updated_are_known_by_where_they_lie() -> None:
    ids, memory = ints([1, 2]), torch.zeros(2)
    key = inputs().key_of((ids, memory))
    assert key == inputs().key_of((ids.clone(), memory[:]))
    assert key != inputs().key_of((ids, memory.clone()))
    assert inputs(mutates=()).key_of((ids, memory)) == ()
    square = torch.zeros(2, 2)
    turned = Inputs("step", ["m"], [square], ["m"], torch.device("cpu"))
    assert turned.key_of([square]) != turned.key_of([square.T])


def test_mutates_has_to_name_inputs() -> None:
    with pytest.raises(ValueError, match="step: mutates names cache, and the inputs are ids, mem"):
        cuda_graph.compile(step, (ints([0]), torch.zeros(1)), mutates=["cache"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so_and_moves_nothing() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="Linear: a CUDA graph needs a CUDA GPU, and torch sees"):
        cuda_graph.compile(module, {"input": torch.zeros(1, 2)})
    assert module.weight.device.type == "cpu"


class Pair(NamedTuple):
    total: Tensor
    parts: dict[str, Tensor]


def nested(a: Tensor, b: Tensor) -> Pair:
    return Pair(a + b, {"a": a * 2, "b": b * 3})


@pytest.mark.gpu
@on_a_gpu
def test_results_are_those_of_the_function_and_nested_like_them() -> None:
    made = cuda_graph.compile(nested, (torch.zeros(3), torch.zeros(3)))
    for n in range(4):
        a, b = torch.full((3,), float(n)), torch.arange(3.0)
        total, parts = made(a, b.cuda() if n % 2 else b)
        torch.testing.assert_close(total.cpu(), a + b)
        torch.testing.assert_close(parts["b"].cpu(), b * 3)


@pytest.mark.gpu
@on_a_gpu
def test_no_later_call_writes_to_an_earlier_result() -> None:
    made = cuda_graph.compile(lambda x: x + 1, (torch.zeros(4),), name="next")
    results = [made(torch.full((4,), float(n))) for n in range(10)]
    assert [result[0].item() for result in results] == [n + 1.0 for n in range(10)]


@pytest.mark.gpu
@on_a_gpu
def test_a_host_input_may_be_written_over_while_its_copy_waits() -> None:
    made = cuda_graph.compile(lambda x: x + 1, (torch.zeros(4),), name="next")
    made(torch.zeros(4))
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)
    source, results = torch.zeros(4), []
    for n in range(20):
        source.fill_(n)
        results.append(made(source))
        source.fill_(-1)
    assert not torch.cuda.current_stream().query(), "the calls waited for the device"
    assert [result[0].item() for result in results] == [n + 1.0 for n in range(20)]


@pytest.mark.gpu
@on_a_gpu
def test_a_pinned_input_is_no_exception() -> None:
    made = cuda_graph.compile(lambda x: x + 1, (torch.zeros(4),), name="next")
    made(torch.zeros(4))
    torch.cuda._sleep(A_WHILE)
    source = torch.zeros(4).pin_memory()
    result = made(source)
    source.fill_(-1)
    assert result[0].item() == 1


@pytest.mark.gpu
@on_a_gpu
def test_warming_up_and_capturing_leave_what_is_updated_alone() -> None:
    made = cuda_graph.compile(step, (ints([1]), torch.zeros(1)), mutates=["memory"])
    memory = torch.zeros(1, device="cuda")
    assert [made(ints([n]), memory).item() for n in (1, 2, 3)] == [2, 6, 12]
    assert memory.item() == 6


@pytest.mark.gpu
@on_a_gpu
def test_each_set_of_updated_tensors_has_its_graph() -> None:
    made = cuda_graph.compile(step, (ints([1]), torch.zeros(1)), mutates=["memory"])
    memories = [torch.zeros(1, device="cuda") for _ in range(cuda_graph.MOST_GRAPHS + 2)]
    for _ in range(2):
        for n, memory in enumerate(memories):
            made(ints([n]), memory)
    assert [memory.item() for memory in memories] == [2 * n for n in range(len(memories))]
    assert len(made._graphs) == cuda_graph.MOST_GRAPHS


@pytest.mark.gpu
@on_a_gpu
def test_calls_on_several_streams_do_not_meet_in_the_shared_memory() -> None:
    def slow(x: Tensor) -> Tensor:
        for _ in range(50):
            x = x @ torch.eye(512, device=x.device)
        return x

    examples = (torch.zeros(512, 512),)
    executables = [cuda_graph.compile(slow, examples) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for n in range(8):
        with torch.cuda.stream(streams[n % 2]):
            results.append(executables[n // 2 % 2](torch.full((512, 512), float(n))))
    torch.cuda.synchronize()
    assert [result.unique().tolist() for result in results] == [[float(n)] for n in range(8)]


@pytest.mark.gpu
@on_a_gpu
def test_modules_that_share_weights_go_on_sharing_them() -> None:
    shared = nn.Linear(256, 256, bias=False)
    modules = [nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Tanh())]
    made = [cuda_graph.compile(module, (torch.zeros(1, 256),)) for module in modules]
    assert {module[0].weight.data_ptr() for module in modules} == {shared.weight.data_ptr()}
    assert shared.weight.device.type == "cuda"
    x = torch.ones(1, 256)
    torch.testing.assert_close(made[0](x), modules[0](x.cuda()))
    torch.testing.assert_close(made[1](x), modules[1](x.cuda()))


@pytest.mark.gpu
@on_a_gpu
def test_another_compilation_after_the_last_executable_has_gone() -> None:
    for n in range(3):
        made = cuda_graph.compile(lambda x: x + 1, (torch.zeros(1),), name="next")
        assert made(torch.full((1,), float(n))).item() == n + 1
        del made
        gc.collect()


def eager(fn: Callable[..., Any], examples: Any, /, **_: Any) -> Callable[..., Any]:
    if isinstance(fn, nn.Module):
        fn.cuda()
    return lambda *given: fn(*(tensor.cuda() for tensor in given))


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_llama_of_graphs_gives_the_tokens_of_one_without(temperature: float) -> None:
    tokens = []
    for compiler in (cuda_graph.compile, eager):
        model = toy.toy(batch_buckets=(4,), device="cuda", compile=compiler)
        requests = [
            Request(range(3, 4 + 2 * slot), slot, temperature=temperature, seed=slot)
            for slot in range(1, 4)
        ]
        for request in requests:
            prefill(model, request)
        for _ in range(12):
            decode(model, [*requests, None])
        tokens.append([request.tokens for request in requests])
    assert tokens[0] == tokens[1]
