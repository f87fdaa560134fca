"""A traced function cut into steps: libraries to run, windows to take, in what order.

Calls of repeated blocks are steps of their own; what lies between two of them is a segment.
Windows on a value are made by the program, not by a library, since AOTInductor copies a window that
it returns.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from neuron_streams._compiler.blocks import (
    Block,
    IrregularError,
    find_blocks,
    opaque,
    trace_blocks,
)
from neuron_streams._compiler.segment import (
    Segment,
    Window,
    externals,
    hoist,
    overlap,
    pieces,
    subgraph,
    window_of,
)
from neuron_streams._compiler.trace import (
    Trace,
    base_of,
    identity,
    layout_of,
    own_outputs,
    trace,
    written,
)
from neuron_streams._runtime.program import Layout, Run, Slice

__all__ = ["Plan", "plan"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Plan:
    """The steps of a program; `Run.library` is an index into `segments`.

    `structure` is how the function returns its results, `mutated` the inputs it updates in place.
    """

    inputs: tuple[Layout, ...]
    weights: tuple[torch.Tensor, ...]
    structure: pytree.TreeSpec
    mutated: tuple[int, ...]
    segments: list[Segment] = field(default_factory=list)
    steps: list[Run | Slice] = field(default_factory=list)
    results: tuple[int, ...] = ()
    outputs: tuple[Layout, ...] = ()


def plan(function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> Plan:
    """Trace a function and cut it at its repeated blocks, or take it whole if it has none.

    Raises ValueError if it updates a tensor of its own (a module's buffer) in place.
    """
    blocks = find_blocks(function)
    if blocks:
        try:
            return _plan(function, examples, blocks)
        except Exception as reason:  # whatever it is: the whole has its own, clearer errors
            log.debug("compiled as a whole, not block by block: %s", reason)
    return _plan(function, examples, [])


def _plan(
    function: Callable[..., Any], examples: Sequence[torch.Tensor], blocks: list[Block]
) -> Plan:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    if blocks:
        trace_blocks(function, examples, blocks, fake)
    with opaque(blocks):
        traced = trace(function, examples, fake)
    return _Cutter(traced, [block for block in blocks if block.trace is not None]).cut()


class _Cutter:
    """Walks a trace once and writes the plan."""

    def __init__(self, traced: Trace, blocks: Sequence[Block]) -> None:
        self.traced = traced
        self.blocks = blocks
        own_outputs(traced.graph)
        self.pieces = pieces(traced)
        self.weights = self._collect_weights()
        self.values = {node: number for number, node in enumerate(traced.inputs)}
        self.numbers = itertools.count(traced.input_count + len(self.weights))
        self.windows: dict[tuple[int, Window], int] = {}
        self.block_segments: dict[int, int] = {}
        weights = tuple(tensor for tensor, _ in self.weights.values())
        inputs = tuple(layout_of(node) for node in traced.inputs[: traced.input_count])
        self.plan = Plan(inputs, weights, traced.structure, self._mutated())

    def cut(self) -> Plan:
        needed = self._needed()
        for piece in self.pieces:
            if isinstance(piece, fx.Node):
                self._call_block(piece)
            elif piece:
                self._run_segment(piece, [node for node in piece if node in needed])
        self.plan.results = tuple(self.values[node] for node in self.traced.outputs)
        self.plan.outputs = tuple(layout_of(node) for node in self.traced.outputs)
        return self.plan

    def _collect_weights(self) -> dict[Any, tuple[torch.Tensor, int]]:
        """All weights of the program, and the numbers of their values."""
        weights: dict[Any, tuple[torch.Tensor, int]] = {}
        calls = [piece for piece in self.pieces if isinstance(piece, fx.Node)]
        own = [self.blocks[c.args[2]].weights_of(self._child(c)) for c in calls]  # type: ignore[index]
        for tensor in itertools.chain(self.traced.weights, *own):
            number = self.traced.input_count + len(weights)
            weights.setdefault(identity(tensor), (tensor, number))
        return weights

    def _child(self, call: fx.Node) -> torch.nn.Module:
        block, child = call.args[2:]
        return self.blocks[block].children[child]  # type: ignore[index]

    def _mutated(self) -> tuple[int, ...]:
        changed = {base_of(arg) for node in self.traced.graph.nodes for arg in written(node)}
        mutated = [number for node, number in self.values.items() if node in changed]
        if mutated and mutated[-1] >= self.traced.input_count:
            raise ValueError(
                "the function updates a tensor of its own in place (a buffer, perhaps), but what "
                "a compiled program keeps is shared and constant. Pass it as an input that "
                "`mutates` names."
            )
        return tuple(mutated)

    def _needed(self) -> set[fx.Node]:
        """The nodes whose values leave the piece that computes them."""
        needed = set(self.traced.outputs)
        for piece in self.pieces:
            if isinstance(piece, fx.Node):
                needed.update(base_of(arg) for arg in piece.all_input_nodes)
            else:
                needed.update(externals(piece))
        return needed

    def _run_segment(self, members: list[fx.Node], outputs: list[fx.Node]) -> None:
        outside = list(dict.fromkeys(externals(members)))
        graph = subgraph(members, outside, outputs)
        segment = Segment(graph, hoist(graph), tuple(layout_of(node) for node in outputs))
        self.plan.segments.append(segment)
        taken: list[tuple[int, Window | None]] = [(self.values[node], None) for node in outside]
        self._run(len(self.plan.segments) - 1, taken, outputs)

    def _call_block(self, call: fx.Node) -> None:
        changed, read, number, _ = call.args
        block = self.blocks[number]  # type: ignore[index]
        rest, places = iter(read), dict(zip(block.written, changed, strict=True))  # type: ignore
        count = len(changed) + len(read)  # type: ignore[arg-type]
        args = [places[n] if n in places else next(rest) for n in range(count)]
        taken = [self._placed(arg) for arg in args]
        _check_apart(taken, block.written, self.traced.input_count)
        weights = block.weights_of(self._child(call))
        taken += [(self.weights[identity(weight)][1], None) for weight in weights]
        items = {user.args[1]: user for user in call.users}
        self._run(self._block_segment(number, block), taken, [items.get(n) for n in _range(block)])

    def _block_segment(self, number: Any, block: Block) -> int:
        if number not in self.block_segments:
            assert block.trace is not None
            graph = block.trace.graph
            self.block_segments[number] = len(self.plan.segments)
            self.plan.segments.append(Segment(graph, hoist(graph), tuple(block.outputs)))
        return self.block_segments[number]

    def _placed(self, node: fx.Node) -> tuple[int, Window | None]:
        """The value that a node's memory is in, and which window of it the node is."""
        base = base_of(node)
        if base.meta["val"].dtype != node.meta["val"].dtype:
            raise IrregularError("a block is given a view of another dtype")
        return self.values[base], window_of(node, base) if node is not base else None

    def _run(
        self,
        segment: int,
        taken: Sequence[tuple[int, Window | None]],
        outputs: Sequence[fx.Node | None],
    ) -> None:
        sources = self.plan.segments[segment].sources
        inputs = [self._take(*taken[n], window) for n, window in sources]
        made = []
        for node in outputs:
            made.append(next(self.numbers))
            if node is not None:
                self.values[node] = made[-1]
        self.plan.steps.append(Run(segment, tuple(inputs), tuple(made)))

    def _take(self, value: int, outer: Window | None, inner: Window | None) -> int:
        """The number of a window on a window on a value, made by a step if it is new."""
        if outer is not None and inner is not None:
            outer = Window(inner.size, inner.stride, inner.offset + outer.offset)
        window = outer or inner
        if window is None:
            return value
        if (value, window) not in self.windows:
            number = self.windows[value, window] = next(self.numbers)
            step = Slice(value, number, window.size, window.stride, window.offset)
            self.plan.steps.append(step)
        return self.windows[value, window]


def _range(block: Block) -> range:
    return range(len(block.outputs))


def _check_apart(
    taken: Sequence[tuple[int, Window | None]], changed: Sequence[int], inputs: int
) -> None:
    for n in changed:
        value, window = taken[n]
        if value >= inputs:
            raise IrregularError("a block updates something that is not an input of the whole")
        for m, (other, seen) in enumerate(taken):
            if m != n and other == value and (not window or not seen or overlap(window, seen)):
                raise IrregularError("a block updates a tensor that it is given twice")
