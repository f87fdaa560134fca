"""Compiles one graph to a NEFF: a program for a Python that has the compilers, not a module.

It is run by its path, in an environment that need not have this package: nothing of it is imported
here. `versions` prints what a NEFF depends on; a folder with `graph.py` and `job.json`, and a path,
make that file: a line of JSON, and the NEFF.

Source: the documentation of torch_neuronx.trace. For the native package only its compile-only
switch is public; that it leaves one NEFF in its cache folder is what others report.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

PACKAGES = ("torch", "torch-neuronx", "torch-xla", "neuronx-cc", "libneuronxla")


def versions() -> dict[str, str]:
    found = {"python": sys.version}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def give_up(sentence: str) -> NoReturn:
    """End with a sentence that the parent passes on."""
    print(f"neuron_streams: {sentence}")
    sys.exit(3)


def module_of(text: str, states: list[Any], places: list[int], count: int) -> Any:
    """The graph as a module: what it updates are buffers of its own, the rest are its inputs."""
    import torch

    scope = {
        "torch": torch,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
        "NoneType": type(None),
    }
    exec(compile(text, "graph.py", "exec"), scope)

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, state in enumerate(states):
                self.register_buffer(f"state_{number}", state)

        def forward(self, *given: Any) -> Any:
            rest = iter(given)
            held = {place: getattr(self, f"state_{n}") for n, place in enumerate(places)}
            tensors = [held[n] if n in held else next(rest) for n in range(count)]
            return tuple(scope["forward"](self, *tensors))  # type: ignore[operator]

    return Graph()


def by_trace(package: Any, job: dict[str, Any], module: Any, inputs: list[Any], work: Path) -> None:
    """The XLA package: states are buffers of the module, aliased with the outputs behind the rest.

    A NEFF of a machine without a device needs `cpu_backend` and the target as an argument.
    """
    states = [getattr(module, f"state_{n}") for n in range(len(job["states"]))]
    package.trace(
        module,
        tuple(inputs),
        input_output_aliases={state: job["results"] + n for n, state in enumerate(states)},
        compiler_workdir=str(work),
        compiler_args=["--target", job["target"]],
        cpu_backend=True,
    )


def by_native(job: dict[str, Any], module: Any, inputs: list[Any]) -> None:
    import torch

    if job["states"]:
        give_up(
            "the native torch-neuronx does not say which output of a NEFF an input that is updated "
            "in place is aliased with; compile it where the XLA package (torch_neuronx.trace) is "
            "and name that Python in NEURON_STREAMS_NEURONX_PYTHON, or load a .neff with its "
            "aliases by Executable.load"
        )
    compiled: Any = torch.compile(module, backend="neuron", fullgraph=True, dynamic=False)
    compiled(*(tensor.to("neuron") for tensor in inputs))


def neuronx(job: dict[str, Any], work: Path) -> Any:
    """The package of AWS, with the environment that its native form reads when imported."""
    os.environ["TORCH_NEURONX_COMPILE_ONLY"] = "1"
    os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] = str(work)
    os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = job["target"]
    try:
        return importlib.import_module("torch_neuronx")
    except ImportError as error:
        give_up(
            f"{sys.executable} cannot import torch_neuronx ({error}), which makes NEFFs for "
            f"{job['target']}; install torch-neuronx and neuronx-cc there, name a Python that has "
            "them in NEURON_STREAMS_NEURONX_PYTHON, or load a .neff made elsewhere by "
            "Executable.load"
        )


def main(folder: Path, made: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    work = folder / "work"
    work.mkdir()
    package = neuronx(job, work)
    import torch

    forms = [(getattr(torch, dtype), shape) for dtype, shape in job["inputs"]]
    tensors = [torch.zeros(shape, dtype=dtype) for dtype, shape in forms]
    states = [tensors[place] for place in job["states"]]
    inputs = [tensor for n, tensor in enumerate(tensors) if n not in job["states"]]
    text = (folder / "graph.py").read_text()
    named = hasattr(package, "trace")
    with torch.no_grad():
        module = module_of(text, states, job["states"], len(tensors)).eval()
        if named:
            by_trace(package, job, module, inputs, work)
        elif hasattr(torch, "neuron"):
            by_native(job, module, inputs)
        else:
            give_up(
                f"torch_neuronx of {sys.executable} has neither trace nor the device of the native "
                "package; install a released torch-neuronx"
            )
    neffs = sorted(work.rglob("*.neff"))
    if len(neffs) != 1:
        give_up(
            f"the compiler left {len(neffs)} .neff files ({[path.name for path in neffs]}) where "
            "one was expected; a function that is cut into several cannot be used"
        )
    head = json.dumps({"named": named, **versions()}).encode()
    made.write_bytes(head + b"\n" + neffs[0].read_bytes())


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose modules are not meant
    if sys.argv[1:] == ["versions"]:
        print(json.dumps(versions()))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
