"""What `compile` does: check, trace, cut, and compile or keep as a graph."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from neuron_streams._compiler import draws, library, neuron
from neuron_streams._compiler.plan import Plan, plan
from neuron_streams._compiler.signature import Signature, input_names, output_names, spec_of
from neuron_streams._compiler.trace import Trace, trace
from neuron_streams._runtime import process
from neuron_streams._runtime.exported import DRAWS
from neuron_streams._runtime.port import Payload

__all__ = ["build"]

log = logging.getLogger(__name__)

# Tracing puts other forwards into the layers of a model, and Inductor has global state.
_one_at_a_time = threading.RLock()


def build(
    function: Callable[..., Any],
    example_inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    mutates: tuple[str, ...],
    name: str,
    target: str | None,
) -> tuple[Signature, Payload]:
    """What `compile` does; its docstring says the rest."""
    names = input_names(function, example_inputs)
    if isinstance(example_inputs, Mapping):
        function = _by_name(function, names)
    examples = [example_inputs[key] for key in _keys(example_inputs)]
    _check_examples(name, names, examples)
    examples = [example.detach().contiguous() for example in examples]
    chosen = _choose(name, target)
    with _one_at_a_time:
        planned = plan(function, examples)
        mutated = tuple(names[number] for number in planned.mutated)
        _check_mutates(name, mutates, mutated)
        results = output_names(planned.structure)
        random = draws.draws(segment.graph for segment in planned.segments)
        payload = _compiled(name, planned) if chosen == "cpu" and not random else None
        if chosen in neuron.TARGETS:
            made = function, examples, sorted(planned.mutated), len(results), chosen
            payload = neuron.build(name, *made)
        payload = payload or Payload("exported", name, _graph(function, examples))
    inputs = tuple(map(spec_of, names, examples))
    outputs = tuple(map(spec_of, results, planned.outputs))
    return Signature(name, inputs, outputs, mutated, planned.structure), payload


def _keys(examples: Any) -> Iterable[Any]:
    return examples if isinstance(examples, Mapping) else range(len(examples))


def _compiled(name: str, planned: Plan) -> Payload | None:
    try:
        return Payload("program", name, library.program(name, planned))
    except library.UnsupportedOperatorError as operator:
        log.info("%s runs as an exported graph: AOTInductor has no C for %s", name, operator)
        return None


def _check_examples(name: str, names: Sequence[str], examples: Sequence[object]) -> None:
    for given, example in zip(names, examples, strict=True):
        if not isinstance(example, torch.Tensor):
            raise TypeError(
                f"{name}: example {given!r} is {type(example).__name__}, not a tensor. Close over "
                "constants, with functools.partial for instance."
            )
    if len(set(names)) != len(names):
        raise ValueError(f"{name}: input names repeat: {list(names)}.")


def _choose(name: str, target: str | None) -> str:
    device: str | None = getattr(process.runtime(), "target", None)
    if target == "neuron" and device is None:
        raise ValueError(
            f"{name}: target='neuron' is the kind of core of the device in use, and that is the "
            f"{process.runtime().name} one. Name a kind: {', '.join(neuron.TARGETS)}."
        )
    if target in (None, "neuron") and device is not None:
        return device
    if target in neuron.TARGETS:
        return str(target)
    if target not in (None, "cpu", "exported"):
        raise ValueError(
            f"{name}: target={target!r} is none of 'cpu', 'exported', 'neuron', "
            f"{', '.join(map(repr, neuron.TARGETS))}."
        )
    return target or "cpu"


def _by_name(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    def called(*tensors: torch.Tensor) -> Any:
        return function(**dict(zip(names, tensors, strict=True)))

    return called


def _check_mutates(name: str, declared: tuple[str, ...], found: tuple[str, ...]) -> None:
    if unknown := sorted(set(declared) - set(found)):
        raise ValueError(
            f"{name}: mutates names {unknown}, which the function does not update in place (it "
            f"updates {list(found)}). Leave them out, or write into them with copy_ or index_put_."
        )
    if missing := sorted(set(found) - set(declared)):
        raise ValueError(
            f"{name}: the function updates {missing} in place, which mutates does not name. "
            f"Pass mutates={list(found)}, or copy before writing."
        )


def _graph(function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The function as a graph module of aten operators; its weights are shared buffers."""
    traced: Trace = trace(function, examples, FakeTensorMode(allow_non_fake_inputs=True))
    graph, inputs, root = traced.graph, traced.inputs, torch.nn.Module()
    for number, weight in enumerate(traced.weights):
        root.register_buffer(f"weight_{number}", weight)
        node = inputs[traced.input_count + number]
        with graph.inserting_before(node):
            held = graph.create_node("get_attr", f"weight_{number}")
        held.meta = dict(node.meta)
        node.replace_all_uses_with(held)
        graph.erase_node(node)
    random = draws.draws([graph])
    if random:
        draws.give_generator(graph)
    module = fx.GraphModule(root, graph)
    module.meta[DRAWS] = random
    return module
