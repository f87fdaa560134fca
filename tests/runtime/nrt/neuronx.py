"""Python environments that have a stand-in for AWS's packages, as folders for PYTHONPATH.

The XLA package is a module `torch_neuronx` with `trace`, whose NEFFs are those of the double.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

XLA = """
    import json
    import os
    from pathlib import Path

    import torch


    def trace(func, example_inputs, *, input_output_aliases, compiler_workdir, compiler_args,
              cpu_backend):
        from tests.runtime.nrt.doubled import neff_of
        import neuron_streams

        said = {"args": compiler_args, "cpu": cpu_backend, "aliases": list(
            input_output_aliases.values())}
        Path(os.environ["SAID"]).write_text(json.dumps(said))
        states = list(input_output_aliases)
        assert all(any(state is own for own in func.buffers()) for state in states)

        def whole(*tensors):
            given, held = tensors[: len(example_inputs)], tensors[len(example_inputs):]
            for number, state in enumerate(held):
                func._buffers[f"state_{number}"] = state
            made = func(*given)
            news = [made[place] for place in input_output_aliases.values()]
            for state, new in zip(held, news):
                state.copy_(new)
            return [x for n, x in enumerate(made) if n not in input_output_aliases.values()]

        names = [f"input{n}" for n in range(len(example_inputs) + len(states))]
        examples = dict(zip(names, [*example_inputs, *states]))
        function = lambda **named: whole(*named.values())
        executable = neuron_streams.compile(
            function, examples, mutates=names[len(example_inputs):], target="exported"
        )
        neff = neff_of(executable, [f"output{n}" for n in range(64)])
        Path(compiler_workdir, "graph.neff").write_bytes(neff)
"""
NATIVE = """
    import os
    import sys
    import types
    from pathlib import Path

    import torch

    torch.neuron = types.ModuleType("torch.neuron")


    def compile(module, *, backend, fullgraph, dynamic):
        assert (backend, fullgraph, dynamic) == ("neuron", True, False)
        assert os.environ["TORCH_NEURONX_COMPILE_ONLY"] == "1"

        def compiled(*tensors):
            del torch.neuron  # ours takes its place
            from tests.runtime.nrt.doubled import neff_of
            import neuron_streams

            names = [f"arg{n}" for n in range(len(tensors))]
            executable = neuron_streams.compile(
                lambda **named: module(*named.values()), dict(zip(names, tensors)),
                target="exported",
            )
            folder = Path(os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"], "one")
            folder.mkdir()
            (folder / "graph.neff").write_bytes(neff_of(executable))

        return compiled


    torch.compile = compile
    torch.Tensor.to = lambda tensor, device: tensor
"""
NEITHER = ""


def environment(folder: Path, package: str | None) -> dict[str, str]:
    """The variables of a Python with a `torch_neuronx` of such a text, None: without one."""
    if package is not None:
        (folder / "torch_neuronx.py").write_text(textwrap.dedent(package))
    path = [str(folder), *filter(None, sys.path)]
    return {"PYTHONPATH": os.pathsep.join(path), "SAID": str(folder / "said.json")}
