"""Executables as files: a zip with a manifest, which has the digest of every other entry.

Loading one loads its compiled code: load only what you would run.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from neuron_streams._compiler.signature import Signature, TensorSpec
from neuron_streams._runtime import cache, toolchain
from neuron_streams._runtime.port import Payload
from neuron_streams._runtime.program import Layout, Library, Program, Run, Slice

__all__ = ["read", "write"]

_KIND, _FORMAT = "neuron_streams executable", 1


def write(path: str | os.PathLike[str], signature: Signature, payload: Payload) -> None:
    """Write an executable to a file, whole or not at all."""
    entries = _program_entries(payload.content) if payload.format == "program" else None
    entries = entries or {"exported.pt2": _export(payload.content, signature)}
    manifest = {
        "kind": _KIND,
        "format": _FORMAT,
        "payload": payload.format,
        "torch": torch.__version__,
        "machine": toolchain.machine(),
        "name": signature.name,
        "inputs": [_spec_to_json(spec) for spec in signature.inputs],
        "outputs": [_spec_to_json(spec) for spec in signature.outputs],
        "mutates": list(signature.mutates),
        "structure": pytree.treespec_dumps(signature.structure),
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in entries.items()},
    }
    target = Path(path)
    if not target.parent.is_dir() or target.is_dir():
        what = f"{target} is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        error = IsADirectoryError if target.is_dir() else FileNotFoundError
        raise error(f"save: {what}; give the name of a file in a folder that is there")
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".saving-", delete=False) as file:
        try:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("manifest.json", json.dumps(manifest, indent=1))
                for name, data in entries.items():
                    archive.writestr(name, data)
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: str | os.PathLike[str]) -> tuple[Signature, Payload]:
    """Read an executable from a file. Raises ValueError if it is damaged, foreign or unfit."""
    try:
        with zipfile.ZipFile(path) as archive:
            data = {name: archive.read(name) for name in archive.namelist()}
        manifest = json.loads(data.pop("manifest.json"))
        ours = manifest.get("kind") == _KIND
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} is not an executable, or is cut short: {error}") from error
    if not ours or manifest["format"] != _FORMAT:
        raise ValueError(
            f"{path} is not an executable of this version of neuron_streams. Compile it again."
        )
    digests = {name: hashlib.sha256(entry).hexdigest() for name, entry in data.items()}
    if digests != manifest["sha256"]:
        raise ValueError(f"{path} is damaged: its entries are not those that were saved.")
    try:
        signature, payload = _signature(manifest), _payload(path, manifest, data)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: its manifest has no good {error}.") from error
    if payload.format == "program":
        _check_layouts(path, signature, payload.content)
    return signature, payload


def _check_layouts(path: str | os.PathLike[str], signature: Signature, program: Program) -> None:
    """What a call is checked against must be what the libraries read."""
    promised = [(spec.dtype, spec.shape) for spec in signature.inputs]
    if promised != [(layout.dtype, layout.size) for layout in program.inputs]:
        raise ValueError(
            f"{path} is damaged: its manifest describes other inputs than its libraries take. "
            "Compile it again."
        )


def _signature(manifest: dict[str, Any]) -> Signature:
    return Signature(
        manifest["name"],
        tuple(_spec_from_json(spec) for spec in manifest["inputs"]),
        tuple(_spec_from_json(spec) for spec in manifest["outputs"]),
        tuple(manifest["mutates"]),
        pytree.treespec_loads(manifest["structure"]),
    )


def _payload(
    path: str | os.PathLike[str], manifest: dict[str, Any], data: dict[str, bytes]
) -> Payload:
    name = manifest["name"]
    if manifest["payload"] == "exported":
        program = torch.export.load(io.BytesIO(data["exported.pt2"]))
        return Payload("exported", name, program.module(check_guards=False))
    here = {"torch": torch.__version__, "machine": toolchain.machine()}
    for what, found in here.items():
        if manifest[what] != found:
            raise ValueError(
                f"{path} was compiled for {what} {manifest[what]}, but here it is {found}. "
                "Compile it again, or save one that was compiled with target='exported'."
            )
    return Payload("program", name, _program(name, data))


def _program_entries(program: Program) -> dict[str, bytes]:
    weights = io.BytesIO()
    torch.save([_compact(weight) for weight in program.weights], weights)
    plan = {
        "inputs": [_layout_to_json(layout) for layout in program.inputs],
        "results": program.results,
        "steps": [_step_to_json(step) for step in program.steps],
        "outputs": [[_layout_to_json(o) for o in lib.outputs] for lib in program.libraries],
    }
    libraries = {f"{n}.so": lib.path.read_bytes() for n, lib in enumerate(program.libraries)}
    return {"plan.json": json.dumps(plan).encode(), "weights.pt": weights.getvalue(), **libraries}


def _program(name: str, data: dict[str, bytes]) -> Program:
    plan = json.loads(data["plan.json"])
    libraries = tuple(
        Library(_kept(data[f"{number}.so"]), tuple(_layout_from_json(o) for o in outputs))
        for number, outputs in enumerate(plan["outputs"])
    )
    return Program(
        name,
        tuple(_layout_from_json(layout) for layout in plan["inputs"]),
        tuple(torch.load(io.BytesIO(data["weights.pt"]), weights_only=True)),
        libraries,
        tuple(_step_from_json(step) for step in plan["steps"]),
        tuple(plan["results"]),
    )


def _kept(library: bytes) -> Path:
    key = hashlib.sha256(library).hexdigest()
    return cache.keep(
        "archives", key, "library.so", lambda path: _write(path, library), toolchain.loads
    )


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the rest of its storage, which torch.save would write too."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
    ).copy_(tensor)


def _export(graph: torch.nn.Module, signature: Signature) -> bytes:
    examples = tuple(torch.zeros(s.shape, dtype=s.dtype, device="cpu") for s in signature.inputs)
    file = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.export warns of its own internals
        torch.export.save(torch.export.export(graph, examples, strict=False), file)
    return file.getvalue()


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _spec_to_json(spec: TensorSpec) -> list[Any]:
    return [spec.name, str(spec.dtype).removeprefix("torch."), spec.shape, spec.stride]


def _spec_from_json(saved: list[Any]) -> TensorSpec:
    name, dtype, shape, stride = saved
    return TensorSpec(name, _dtype(dtype), tuple(shape), tuple(stride))


def _layout_to_json(layout: Layout) -> list[Any]:
    return [str(layout.dtype).removeprefix("torch."), layout.size, layout.stride]


def _layout_from_json(saved: list[Any]) -> Layout:
    dtype, size, stride = saved
    return Layout(_dtype(dtype), tuple(size), tuple(stride))


def _step_to_json(step: Run | Slice) -> list[Any]:
    if isinstance(step, Run):
        return ["run", step.library, step.inputs, step.outputs]
    return ["slice", step.source, step.target, step.size, step.stride, step.offset]


def _step_from_json(saved: list[Any]) -> Run | Slice:
    kind, *rest = [tuple(item) if isinstance(item, list) else item for item in saved]
    made: Callable[..., Run | Slice] = Run if kind == "run" else Slice
    return made(*rest)
