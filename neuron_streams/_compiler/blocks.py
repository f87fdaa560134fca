"""The repeated blocks of a deep model: found, traced once, and opaque in the trace of the whole.

A block is a child of an `nn.ModuleList` of three or more equal children, called with tensors of
equal form. While the whole is traced, each call of a child is one node, `neuron_streams::block`,
so that thirty layers cost as much as one. Whatever is out of the ordinary raises `IrregularError`,
and the whole is then compiled as one piece: the same results, more slowly compiled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from neuron_streams._compiler.trace import (
    Trace,
    alike,
    base_of,
    identity,
    layout_of,
    own_outputs,
    trace,
    written,
)
from neuron_streams._runtime.program import Layout

__all__ = ["Block", "IrregularError", "find_blocks", "opaque", "trace_blocks"]

FEWEST = 3


class IrregularError(Exception):
    """Why a model cannot be compiled block by block; never reaches the user."""


@dataclass(slots=True)
class Block:
    """Equal modules, the form of their one call, and the graph that all of them share."""

    children: tuple[nn.Module, ...]
    structure: pytree.TreeSpec | None = None
    leaves: list[Any] = field(default_factory=list)  # Layout for a tensor, else the constant
    outputs: list[Layout] = field(default_factory=list)
    trace: Trace | None = None
    traced: int = 0  # which child
    written: tuple[int, ...] = ()  # which of the tensors among the leaves it updates in place

    def results(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Its results as a child returns them."""
        assert self.trace is not None
        return pytree.tree_unflatten(tensors, self.trace.structure)

    def weights_of(self, child: nn.Module) -> list[torch.Tensor]:
        """The child's own tensors in the places of those of the traced one."""
        assert self.trace is not None
        places = {identity(t): name for name, t in _tensors(self.children[self.traced])}
        own = dict(_tensors(child))
        named = ((places.get(identity(weight)), weight) for weight in self.trace.weights)
        return [weight if name is None else own[name] for name, weight in named]


def find_blocks(function: Callable[..., Any]) -> list[Block]:
    """The outermost lists of equal children in the modules that a function can reach."""
    blocks: list[Block] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        children = list(module.children())
        if isinstance(module, nn.ModuleList) and len(children) >= FEWEST:
            alike = all(_alike(children[0], child) for child in children[1:])
            if alike:
                blocks.append(Block(tuple(children)))
                return
        for child in children:
            visit(child)

    for module in _modules(function):
        visit(module)
    return blocks


def _modules(function: Callable[..., Any]) -> Iterator[nn.Module]:
    """The modules that a function is, is bound to, or closes over."""
    if isinstance(function, functools.partial):
        yield from _modules(function.func)
        reached = [*function.args, *function.keywords.values()]
    elif isinstance(function, nn.Module):
        reached = [function]
    else:
        inner = inspect.unwrap(getattr(function, "__func__", function))
        reached = [getattr(function, "__self__", None)]
        if inspect.isfunction(inner):
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                reached += inspect.getclosurevars(inner).nonlocals.values()
                reached += inspect.getclosurevars(inner).globals.values()
    for owner in reached:
        if isinstance(owner, nn.Module):
            yield owner
        elif not inspect.ismodule(owner) and not inspect.isclass(owner):
            held = getattr(owner, "__dict__", {}).values()
            yield from (value for value in held if isinstance(value, nn.Module))


def _own(module: nn.Module) -> dict[str, Any]:
    """What a module has besides what every module has."""
    common = nn.Module().__dict__
    return {name: value for name, value in module.__dict__.items() if name not in common}


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module or a part of it has, under its dotted name."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        held: Mapping[str, Any] = {**part._parameters, **part._buffers, **_own(part)}
        for name, tensor in held.items():
            if isinstance(tensor, torch.Tensor):
                yield f"{prefix}.{name}", tensor.detach()


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules give the same graph, but for the values of their tensors."""
    if type(one) is not type(other) or one.training != other.training:
        return False
    if any(m._forward_hooks or m._forward_pre_hooks for m in (one, other)):
        return False
    held = [{**m._parameters, **m._buffers, **_own(m)} for m in (one, other)]
    parts = [m._modules for m in (one, other)]
    return (
        list(held[0]) == list(held[1])
        and list(parts[0]) == list(parts[1])
        and all(_same(held[0][name], held[1][name]) for name in held[0])
        and all(map(_alike_or_none, parts[0].values(), parts[1].values()))
        and _ties(one) == _ties(other)
    )


def _alike_or_none(one: nn.Module | None, other: nn.Module | None) -> bool:
    return one is other or (one is not None and other is not None and _alike(one, other))


def _ties(module: nn.Module) -> list[int]:
    """Which of a module's tensors are the same tensor."""
    keys = [identity(tensor) for _, tensor in _tensors(module)]
    return [keys.index(key) for key in keys]


def _same(one: Any, other: Any) -> bool:
    """Tensors of equal form, equal constants, or the same object."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _form(one) == _form(other)
    return _constant(one, other)


def _constant(one: Any, other: Any) -> bool:
    # 1 == 1.0 == True, but they do not give the same graph.
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_constant(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_constant, one, other))
    return isinstance(one, _PLAIN) and bool(one == other)


_PLAIN = (bool, int, float, complex, str, bytes, frozenset, torch.dtype, torch.device, Layout)


def _form(tensor: torch.Tensor) -> Layout:
    return Layout(tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()))


def trace_blocks(
    function: Callable[..., Any],
    examples: Sequence[torch.Tensor],
    blocks: Sequence[Block],
    fake: FakeTensorMode,
) -> None:
    """Learn how the blocks are called, by a run on fake tensors, and trace one child of each."""
    probe = functools.partial(functools.partial, _probe, fake)
    with torch.no_grad(), fake, _instead(blocks, probe):
        function(*map(alike, examples))


@contextlib.contextmanager
def _instead(
    blocks: Sequence[Block], forward: Callable[[Block, int], Callable[..., Any]]
) -> Iterator[None]:
    """Put something else in the place of the children's forward."""
    with contextlib.ExitStack() as stack:
        for block in blocks:
            for number, child in enumerate(block.children):
                if "forward" in child.__dict__:
                    raise IrregularError(
                        f"{type(child).__name__}.forward is replaced on the instance"
                    )
                original, stand_in = child.forward, forward(block, number)
                child.forward = functools.partial(stand_in, original)
                stack.callback(child.__dict__.pop, "forward")
        yield


def _probe(
    fake: FakeTensorMode,
    block: Block,
    child: int,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Trace the first child that is called; give all calls results of its form."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    forms = [_form(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if block.structure is None:
        block.structure, block.leaves, block.traced = structure, forms, child
        _trace_child(block, original, fake)
    elif structure != block.structure or not _constant(forms, block.leaves):
        raise IrregularError(f"the calls of {type(block.children[0]).__name__} differ in form")
    return block.results(_empty(block.outputs))


def _empty(layouts: Sequence[Layout]) -> list[torch.Tensor]:
    return [torch.empty_strided(o.size, o.stride, dtype=o.dtype, device="cpu") for o in layouts]


def _trace_child(block: Block, original: Callable[..., Any], fake: FakeTensorMode) -> None:
    def call(*tensors: torch.Tensor) -> Any:
        args, kwargs = _arguments(block, tensors)
        return original(*args, **kwargs)

    examples = _empty([leaf for leaf in block.leaves if isinstance(leaf, Layout)])
    traced = trace(call, examples, fake)
    inputs = traced.inputs
    if {base_of(output) for output in traced.outputs}.intersection(inputs):
        raise IrregularError("a block returns one of its inputs, or a window on one")
    own_outputs(traced.graph)
    bases = {base_of(arg) for node in traced.graph.nodes for arg in written(node)}
    if bases.intersection(inputs[traced.input_count :]):
        raise IrregularError("a block writes into a tensor of its own")
    block.trace, block.outputs = traced, [layout_of(output) for output in traced.outputs]
    block.written = tuple(n for n in range(traced.input_count) if inputs[n] in bases)


def _arguments(block: Block, tensors: Sequence[torch.Tensor]) -> Any:
    given = iter(tensors)
    leaves = [next(given) if isinstance(leaf, Layout) else leaf for leaf in block.leaves]
    assert block.structure is not None
    return pytree.tree_unflatten(leaves, block.structure)


_known: dict[int, Block] = {}


@contextlib.contextmanager
def opaque(blocks: Sequence[Block]) -> Iterator[None]:
    """Let each call of a child be one node of whatever is traced inside."""
    _register()
    traced = [block for block in blocks if block.trace is not None]
    _known.update(enumerate(traced))
    try:
        with _instead(traced, lambda b, n: functools.partial(_as_node, traced.index(b), n)):
            yield
    finally:
        _known.clear()


def _as_node(
    number: int, child: int, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    block = _known[number]
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    changed = [tensors[n] for n in block.written]
    read = [t for n, t in enumerate(tensors) if n not in block.written]
    made = torch.ops.neuron_streams.block(changed, read, number, child)
    return block.results(made)


@functools.cache
def _register() -> torch.library.Library:
    library = torch.library.Library("neuron_streams", "FRAGMENT")  # type: ignore[no-untyped-call]
    schema = "block(Tensor(a!)[] written, Tensor[] read, int block, int child) -> Tensor[]"
    library.define(schema)  # type: ignore[no-untyped-call]
    torch.library.register_fake("neuron_streams::block", _fake_block, lib=library)
    return library


def _fake_block(
    written: list[torch.Tensor], read: list[torch.Tensor], block: int, child: int
) -> list[torch.Tensor]:
    return _empty(_known[block].outputs)
