"""Pieces of a graph: cut out, and given the windows that they update as inputs.

AOTInductor copies a whole tensor that it updates through a window on it, so a segment is given each
disjoint window that it updates as an input of its own.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from neuron_streams._compiler.trace import Trace, base_of, is_view, written
from neuron_streams._runtime.program import Layout

__all__ = ["Segment", "Window", "externals", "hoist", "overlap", "pieces", "subgraph", "window_of"]


@dataclass(frozen=True, slots=True)
class Window:
    """Sizes, strides and offset, in elements, of a view from the first element of its base."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What one library computes; input n is `sources[n]`: an outer input, or a window on one."""

    graph: fx.Graph
    sources: tuple[tuple[int, Window | None], ...]
    outputs: tuple[Layout, ...]


def _is_block(node: fx.Node) -> bool:
    return str(node.target) == "neuron_streams.block.default"


def pieces(traced: Trace) -> list[list[fx.Node] | fx.Node]:
    """The nodes that compute, in order, cut at the calls of blocks."""
    pieces: list[list[fx.Node] | fx.Node] = [[]]
    returned = set(traced.outputs)
    for node in traced.graph.nodes:
        if _is_block(node):
            pieces += [node, []]
        elif node.op == "call_function" and (node in returned or not is_view(node)):
            if node.target is operator.getitem and _is_block(node.args[0]):
                continue
            assert isinstance(pieces[-1], list)
            pieces[-1].append(node)
    return pieces


def externals(members: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The values that a segment needs from outside, seen through windows and earlier writes."""
    inside = set(members)
    work = [arg for node in reversed(members) for arg in reversed(node.all_input_nodes)]
    while work:
        node = work.pop()
        if node in inside:
            continue
        if is_view(node):
            work.extend(reversed(node.all_input_nodes))
        elif written(node):
            work.append(base_of(node))
        else:
            yield node


def subgraph(
    members: Sequence[fx.Node], outside: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.Graph:
    """A graph of the members that takes what is outside as inputs."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for number, node in enumerate(outside):
        copies[node] = graph.placeholder(f"input_{number}")
        copies[node].meta["val"] = node.meta["val"]

    def load(node: fx.Node) -> fx.Node:
        if node not in copies and not is_view(node):  # written by an earlier segment
            copies[node] = load(base_of(node))
        if node not in copies:
            copies[node] = graph.node_copy(node, load)
        return copies[node]

    for node in members:
        copies[node] = graph.node_copy(node, load)
    graph.output(tuple(copies[node] for node in outputs))
    return graph


def window_of(node: fx.Node, base: fx.Node) -> Window:
    """Which window on its base a node is."""
    value, whole = node.meta["val"], base.meta["val"]
    offset = int(value.storage_offset()) - int(whole.storage_offset())
    return Window(tuple(value.size()), tuple(value.stride()), offset)


def overlap(one: Window, other: Window) -> bool:
    """Whether two windows may share an element; a yes may be wrong, a no never is."""
    return one.offset <= _last(other) and other.offset <= _last(one)


def _last(window: Window) -> int:
    steps = zip(window.size, window.stride, strict=True)
    return window.offset + sum((length - 1) * stride for length, stride in steps)


def hoist(graph: fx.Graph) -> tuple[tuple[int, Window | None], ...]:
    """Give a graph the windows through which it updates an input, instead of that input."""
    changed = {base_of(arg) for node in graph.nodes for arg in written(node)}
    sources: list[tuple[int, Window | None]] = []
    for number, node in enumerate(list(graph.find_nodes(op="placeholder"))):
        leaves = _split(node) if node in changed else [node]
        for leaf in leaves:
            sources.append((number, None if leaf is node else window_of(leaf, node)))
            if leaf is not node:
                _make_input(graph, node, leaf, f"window_{len(sources)}")
        if leaves != [node]:
            graph.erase_node(node)
    return tuple(sources)


def _split(node: fx.Node) -> list[fx.Node]:
    """The windows on a node that everything goes through and that share no element."""
    groups: dict[Window, fx.Node] = {}
    for user in list(node.users):
        value = user.meta.get("val")
        if not is_view(user) or not isinstance(value, torch.Tensor):
            return [node]
        if value.dtype != node.meta["val"].dtype:
            return [node]
        first = groups.setdefault(window_of(user, node), user)
        if first is not user:
            user.replace_all_uses_with(first)
            user.graph.erase_node(user)
    pairs = itertools.combinations(groups, 2)
    if not groups or any(overlap(one, other) for one, other in pairs):
        return [node]
    return [leaf for group in groups.values() for leaf in _split(group)]


def _make_input(graph: fx.Graph, before: fx.Node, leaf: fx.Node, name: str) -> None:
    with graph.inserting_before(before):
        made = graph.placeholder(name)
    made.meta["val"] = leaf.meta["val"]
    leaf.replace_all_uses_with(made)
    while leaf is not before and not leaf.users:
        parent = leaf.args[0]
        graph.erase_node(leaf)
        leaf = parent  # type: ignore[assignment]
