"""What a saved executable says of itself, as JSON, and nothing of it believed.

Compiled code checks nothing that it is given, so whatever a file says is checked against what the
libraries themselves say (`layouts_of`) before anything runs: the memory that a call reads and
writes is what was declared. Everything here raises ValueError.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from neuron_streams._compiler.signature import Signature, TensorSpec
from neuron_streams._runtime.program import Layout, Library, Program, Run, Slice, contiguous

__all__ = [
    "Layouts",
    "check_program",
    "layouts_of",
    "layouts_text",
    "plan_from_json",
    "plan_to_json",
    "signature_from_json",
    "signature_to_json",
]

SYMBOL = "ns_layouts"  # in each library: what it takes and makes
_MOST = 1 << 48  # bytes of one tensor, far beyond any memory


class Layouts(NamedTuple):
    """What a library takes and makes."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


def need(good: object, fault: str) -> None:
    """Raise ValueError with the fault unless all is good."""
    if not good:
        raise ValueError(fault)


# Signatures


def signature_to_json(signature: Signature) -> dict[str, Any]:
    return {
        "name": signature.name,
        "inputs": [_spec_to_json(spec) for spec in signature.inputs],
        "outputs": [_spec_to_json(spec) for spec in signature.outputs],
        "mutates": list(signature.mutates),
        "structure": pytree.treespec_dumps(signature.structure),
    }


def signature_from_json(saved: dict[str, Any]) -> Signature:
    inputs, outputs = (
        tuple(map(_spec_from_json, _list(saved, key))) for key in ("inputs", "outputs")
    )
    names, mutates = [spec.name for spec in inputs], _list(saved, "mutates")
    need(len(set(names)) == len(names), f"its input names repeat: {names}")
    strangers = [name for name in mutates if name not in names]
    need(not strangers, f"it mutates {strangers}, which are no inputs")
    structure = pytree.treespec_loads(saved["structure"])
    count = structure.num_leaves
    need(count == len(outputs), f"it returns {count} tensors and describes {len(outputs)}")
    need(isinstance(saved["name"], str), "its name is no text")
    return Signature(saved["name"], inputs, outputs, tuple(mutates), structure)


def _list(saved: dict[str, Any], key: str) -> list[Any]:
    found = saved.get(key)
    need(isinstance(found, list), f"its {key} are no list")
    assert isinstance(found, list)
    return found


def _spec_to_json(spec: TensorSpec) -> list[Any]:
    return [spec.name, str(spec.dtype).removeprefix("torch."), spec.shape, spec.stride]


def _spec_from_json(saved: list[Any]) -> TensorSpec:
    name, *rest = saved
    layout = _layout_from_json(rest)
    need(isinstance(name, str), f"the name {name!r} of a tensor is no text")
    need(layout.stride == contiguous(layout.size), f"{name!r} is not contiguous")
    return TensorSpec(name, layout.dtype, layout.size, layout.stride)


def _layout_to_json(layout: Layout) -> list[Any]:
    return [str(layout.dtype).removeprefix("torch."), list(layout.size), list(layout.stride)]


def _layout_from_json(saved: list[Any]) -> Layout:
    name, size, stride = saved
    dtype = getattr(torch, name, None)
    need(isinstance(dtype, torch.dtype), f"{name!r} is no dtype")
    assert isinstance(dtype, torch.dtype)
    layout = Layout(dtype, _numbers(size), _numbers(stride))
    need(len(layout.size) == len(layout.stride), f"{size} has other dimensions than {stride}")
    need(extent(layout.size, layout.stride) * dtype.itemsize < _MOST, f"{size} is too large")
    return layout


def _numbers(saved: Any) -> tuple[int, ...]:
    good = isinstance(saved, list) and all(type(n) is int and 0 <= n < _MOST for n in saved)
    need(good, f"{saved!r} are no numbers of elements")
    return tuple(saved)


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of a storage a tensor spans from its first one."""
    if 0 in size:
        return 0
    return sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1


# Plans


def plan_to_json(program: Program) -> dict[str, Any]:
    return {
        "inputs": [_layout_to_json(layout) for layout in program.inputs],
        "results": list(program.results),
        "steps": [_step_to_json(step) for step in program.steps],
        "libraries": len(program.libraries),
    }


def plan_from_json(
    name: str, plan: dict[str, Any], weights: Sequence[torch.Tensor], libraries: Sequence[Library]
) -> Program:
    return Program(
        name,
        tuple(map(_layout_from_json, _list(plan, "inputs"))),
        tuple(weights),
        tuple(libraries),
        tuple(map(_step_from_json, _list(plan, "steps"))),
        _numbers(plan.get("results")),
    )


def _step_to_json(step: Run | Slice) -> list[Any]:
    if isinstance(step, Run):
        return ["run", step.library, list(step.inputs), list(step.outputs)]
    window = [list(step.size), list(step.stride), step.offset]
    return ["slice", step.source, step.target, *window]


def _step_from_json(saved: list[Any]) -> Run | Slice:
    if saved[0] == "run":
        _, library, inputs, outputs = saved
        (number,) = _numbers([library])
        return Run(number, _numbers(inputs), _numbers(outputs))
    kind, source, target, size, stride, offset = saved
    need(kind == "slice", f"{kind!r} is no kind of step")
    source, target, offset = _numbers([source, target, offset])
    return Slice(source, target, _numbers(size), _numbers(stride), offset)


def layouts_text(layouts: Layouts) -> str:
    """C++ that has a library say what it takes and makes."""
    text = json.dumps([[_layout_to_json(layout) for layout in part] for part in layouts])
    declared = f'__attribute__((visibility("default"), used)) extern const char {SYMBOL}[];'
    return f'\nextern "C" {{\n{declared}\nconst char {SYMBOL}[] = {json.dumps(text)};\n}}\n'


def layouts_of(library: ctypes.CDLL) -> Layouts:
    """What a library says that it takes and makes."""
    first = ctypes.c_char.in_dll(library, SYMBOL)  # ValueError where it is missing
    inputs, outputs = json.loads(ctypes.string_at(ctypes.addressof(first)))
    return Layouts(tuple(map(_layout_from_json, inputs)), tuple(map(_layout_from_json, outputs)))


class _Value(NamedTuple):
    layout: Layout
    room: int  # elements in its storage
    kind: str


def check_program(signature: Signature, program: Program, libraries: Sequence[Layouts]) -> None:
    """Every step reads values that are there, in the form that its library takes them."""
    promised = [Layout(spec.dtype, spec.shape, spec.stride) for spec in signature.inputs]
    need(list(program.inputs) == promised, "it describes other inputs than its libraries take")
    values = [_Value(layout, math.prod(layout.size), "input") for layout in promised]
    for weight in program.weights:
        layout = Layout(weight.dtype, tuple(weight.size()), weight.stride())
        room = weight.untyped_storage().nbytes() // weight.dtype.itemsize
        values.append(_Value(layout, room, "weight"))
    for number, step in enumerate(program.steps):
        fault = f"its step {number} "
        if isinstance(step, Slice):
            values.append(_window(step, values, fault))
        else:
            need(step.library < len(libraries), f"{fault}runs a library that is not there")
            values += _made(step, values, libraries[step.library], fault)
    _check_results(signature, program.results, values)


def _window(step: Slice, values: Sequence[_Value], fault: str) -> _Value:
    need(step.source < len(values), f"{fault}reads a value that is not there")
    need(step.target == len(values), f"{fault}makes a value of another number than its own")
    need(len(step.size) == len(step.stride), f"{fault}has sizes and strides that do not agree")
    source = values[step.source]
    need(source.kind != "window", f"{fault}is a window on a window")
    reach = step.offset + extent(step.size, step.stride)
    need(reach <= source.room, f"{fault}reaches outside of what it is a window on")
    layout = Layout(source.layout.dtype, step.size, step.stride)
    return _Value(layout, source.room - step.offset, "window")


def _made(step: Run, values: Sequence[_Value], library: Layouts, fault: str) -> list[_Value]:
    need(all(value < len(values) for value in step.inputs), f"{fault}reads what is not there")
    given = [values[value].layout for value in step.inputs]
    good = len(given) == len(library.inputs) and all(map(_fits, given, library.inputs))
    need(good, f"{fault}gives its library other tensors than that takes")
    fresh = range(len(values), len(values) + len(library.outputs))
    need(step.outputs == tuple(fresh), f"{fault}makes other values than its library")
    return [_Value(o, extent(o.size, o.stride), "output") for o in library.outputs]


def _fits(given: Layout, taken: Layout) -> bool:
    strides = zip(taken.size, given.stride, taken.stride, strict=False)
    same = (given.dtype, given.size) == (taken.dtype, taken.size)
    return same and (0 in taken.size or all(n == 1 or a == b for n, a, b in strides))


def _check_results(signature: Signature, results: Sequence[int], values: Sequence[_Value]) -> None:
    need(all(result < len(values) for result in results), "it returns a value that is not there")
    need(len(set(results)) == len(results), "it returns a value twice")
    found = [values[result] for result in results]
    need(all(value.kind == "output" for value in found), "it returns what no library has made")
    pairs = list(itertools.zip_longest(signature.outputs, found))
    good = all(
        spec and value and _fits(value.layout, Layout(spec.dtype, spec.shape, spec.stride))
        for spec, value in pairs
    )
    need(good, "it describes other outputs than its libraries make")
