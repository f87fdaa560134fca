"""From a function to a NEFF, by the compilers of AWS, in a process of their own.

They take the device slot that this process uses, and may live in another Python environment with
another version of torch. So the function goes there as the text of a graph of aten operators
without side effects, and shapes; weights stay here, since they are inputs like any other to the
NEFF, which is how all executables of a model share them.

Nothing here has met a real compiler. What the tensors of a NEFF of `torch_neuronx.trace` are called
is known from what others have published of it, not from its documentation; names and sizes are held
against the file when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from neuron_streams._compiler.trace import trace
from neuron_streams._runtime import cache, toolchain
from neuron_streams._runtime.nrt.model import Neff
from neuron_streams._runtime.port import Payload

__all__ = ["TARGETS", "build", "described", "python"]

TARGETS = ("inf2", "trn1", "trn1n", "trn2", "trn3")
_CHILD = Path(__file__).with_name("neuron_child.py")


def python() -> str:
    """The Python that has the compilers."""
    return os.environ.get("NEURON_STREAMS_NEURONX_PYTHON", "").strip() or sys.executable


def described() -> str | None:
    """The Python that has the compilers and what is in it; None where it has no torch-neuronx."""
    try:
        said: dict[str, str] = json.loads(toolchain.run([python(), str(_CHILD), "versions"]))
    except (RuntimeError, ValueError):
        return None
    del said["python"]
    if "torch-neuronx" not in said:
        return None
    return f"{python()}: {', '.join(f'{name} {version}' for name, version in said.items())}"


def build(
    name: str,
    function: Callable[..., Any],
    examples: Sequence[torch.Tensor],
    mutated: Sequence[int],
    results: int,
    target: str,
) -> Payload:
    """A NEFF for a function of so many results, for a kind of core.

    The inputs at the positions `mutated`, which it updates in place, are aliased with outputs.

    Raises:
        RuntimeError: there is no compiler, or it fails; with its output.

    Host: waits for the compiler, unless the NEFF is in the cache.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    traced = trace(function, examples, fake)
    graph, states = _pure(name, [node.meta["val"] for node in traced.inputs], traced.graph, fake)
    if states != list(mutated):
        raise RuntimeError(
            f"{name}: it updates the inputs {list(mutated)}, and {states} were found in its graph. "
            "Report it, and return the new value instead."
        )
    whole = [*examples, *traced.weights]
    job = {
        "name": name,
        "target": target,
        "inputs": [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in whole],
        "states": states,
        "results": results,
    }
    made = _compiled(name, graph.python_code("self").src, job)
    said, content = made.read_bytes().split(b"\n", 1)
    order = [n for n in range(len(whole)) if n not in states] + states
    place = {given: f"input{number}" for number, given in enumerate(order)}
    if not json.loads(said)["named"]:
        place = {}
    return Payload("neff", name, _neff(content, place, states, traced.weights, whole, job))


def _neff(
    content: bytes,
    place: dict[int, str],
    states: Sequence[int],
    weights: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    job: dict[str, Any],
) -> Neff:
    """Names are those of `torch_neuronx.trace`: inputs in their order, then what is aliased."""
    target, results = str(job["target"]), int(job["results"])
    if not place:
        return Neff(content, target=target)
    given = len(whole) - len(weights)
    return Neff(
        content,
        [place[n] for n in range(given)],
        [f"output{n}" for n in range(results)],
        {n: f"output{results + k}" for k, n in enumerate(states)},
        {place[given + n]: weight for n, weight in enumerate(weights)},
        {place[n]: whole[n].nbytes for n in range(given)},
        target,
    )


def _pure(
    name: str, values: Sequence[torch.Tensor], graph: fx.Graph, fake: FakeTensorMode
) -> tuple[fx.Graph, list[int]]:
    """A graph that writes nothing, and returns the new values of what it wrote behind its results.

    With it the positions of the inputs that it wrote, ascending.
    """
    module = fx.GraphModule(torch.nn.Module(), graph)
    pure = torch.func.functionalize(module, remove="mutations_and_views")
    with torch.no_grad(), fake:
        made = make_fx(pure)(*values).graph
    inputs = list(made.find_nodes(op="placeholder"))
    written: dict[int, Any] = {}
    for node in list(made.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)):
        if node.args[0] in inputs:  # what functionalization leaves of a write into an input
            written[inputs.index(node.args[0])] = node.args[1]
            made.erase_node(node)
    held = list(made.find_nodes(op="get_attr"))
    if held:
        raise RuntimeError(
            f"{name}: its graph keeps {[str(node.target) for node in held]} to itself. Report it, "
            "and pass those tensors as inputs."
        )
    output, states = made.output_node(), sorted(written)
    results: Any = output.args[0]
    output.args = ((*results, *(written[n] for n in states)),)
    made.eliminate_dead_code()
    return made, states


def _compiled(name: str, text: str, job: dict[str, Any]) -> Path:
    """The file of a NEFF behind a line of JSON, from the cache or made by the child process."""
    said = toolchain.run([python(), str(_CHILD), "versions"])
    key = hashlib.sha256(json.dumps([text, job, said]).encode()).hexdigest()

    def make(path: Path) -> None:
        with cache.scratch() as folder:
            (folder / "graph.py").write_text(text)
            (folder / "job.json").write_text(json.dumps(job))
            command = [python(), str(_CHILD), str(folder), str(path)]
            try:
                toolchain.run(command, path)
            except RuntimeError as error:
                raise RuntimeError(_explained(name, str(error))) from None

    return cache.keep("neff", key, "model.neff", make)


def _explained(name: str, words: str) -> str:
    """What the child says of a failure that it has understood, or all that it has printed."""
    _, understood, sentence = words.rpartition("neuron_streams: ")
    return f"{name}: {sentence if understood else f'the Neuron compiler failed. {words}'}"
