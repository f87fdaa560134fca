"""Random operators inside a compiled function: they draw from the device's generator.

A compiled library draws from the host's one generator, on whatever thread runs it. So a function
that draws is kept as a graph whose operators take a generator as a last input: the numbers of its
call, which depend on the seed of the device and on the order of submission.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

__all__ = ["draws", "give_generator"]


def draws(graphs: Iterable[fx.Graph]) -> bool:
    """Whether an operator of these graphs gives other numbers each time."""
    return any(_is_random(node) for graph in graphs for node in graph.nodes)


def give_generator(graph: fx.Graph) -> None:
    """Add an input for a generator, and give it to each random operator.

    Raises:
        NotImplementedError: one of them takes none.
    """
    inputs = list(graph.find_nodes(op="placeholder"))
    before = graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before()
    with before:
        generator = graph.placeholder("generator")
    for node in filter(_is_random, graph.nodes):
        node.target = _with_generator(node.target)
        node.kwargs = {**node.kwargs, "generator": generator}


def _is_random(node: fx.Node) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return tagged and not _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    """Whether it is attention without dropout, which draws nothing."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return False
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("dropout_p", 0.0) == 0.0)


def _with_generator(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The overload of an operator that takes a generator and what this one takes."""
    names = [argument.name for argument in target._schema.arguments]
    packet = target.overloadpacket
    overloads: list[torch._ops.OpOverload] = [getattr(packet, n) for n in packet.overloads()]
    for overload in (target, *overloads):
        given = [argument.name for argument in overload._schema.arguments]
        if "generator" in given and set(given) == {*names, "generator"}:
            return overload
    raise NotImplementedError(
        f"{target} draws random numbers and takes no generator, so that a compiled function cannot "
        "have it draw from the device's. Call it outside of the function, and pass its result."
    )
