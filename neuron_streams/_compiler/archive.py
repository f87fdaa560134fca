"""Executables as files: a zip with a manifest, which has the digest of every other entry.

Loading one loads its compiled code: load only what you would run.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import os
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils import _pytree as pytree

from neuron_streams._compiler import saved
from neuron_streams._compiler.saved import need
from neuron_streams._compiler.signature import Signature, spec_of
from neuron_streams._runtime import cache, toolchain
from neuron_streams._runtime.exported import DRAWS
from neuron_streams._runtime.nrt.model import Neff
from neuron_streams._runtime.port import Payload
from neuron_streams._runtime.program import Library, Program

__all__ = ["read", "read_neff", "write"]

_KIND, _FORMAT = "neuron_streams executable", 2


def write(path: str | os.PathLike[str], signature: Signature, payload: Payload) -> None:
    """Write an executable to a file, whole or not at all."""
    if payload.format == "program":
        entries = _program_entries(payload.content)
    elif payload.format == "neff":
        entries = _neff_entries(payload.content)
    else:
        entries = {"exported.pt2": _export(payload.content, signature)}
    manifest = {
        "kind": _KIND,
        "format": _FORMAT,
        "payload": payload.format,
        "torch": torch.__version__,
        "machine": toolchain.machine(),
        **saved.signature_to_json(signature),
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
    with open(path, "rb") as file:
        manifest, data = _entries(path, file)
        try:
            signature = saved.signature_from_json(manifest)
            if manifest["payload"] == "exported":
                content: object = _exported(signature, data)
                return signature, Payload("exported", signature.name, content)
            if manifest["payload"] == "neff":
                return signature, Payload("neff", signature.name, _neff(signature, data))
            need(manifest["payload"] == "program", f"{manifest['payload']!r} is no kind of payload")
            _check_here(path, manifest)
            return signature, Payload("program", signature.name, _program(signature, data))
        except (_UnfitError, cache.CacheError):
            raise
        except Exception as error:  # a file may say anything, to torch as well
            what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is damaged: {what}. Compile it again.") from error


class _UnfitError(ValueError):
    """Whole, but made for another place."""


def _entries(
    path: str | os.PathLike[str], file: BinaryIO
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest and all that it lists, whole."""
    try:
        with zipfile.ZipFile(file) as archive:
            _check_stored(archive, os.fstat(file.fileno()).st_size)
            names = set(archive.namelist()) - {"manifest.json"}
            manifest = json.loads(archive.read("manifest.json"))
            ours = manifest["kind"] == _KIND
            data = {name: archive.read(name) for name in names} if ours else {}
    except Exception as error:  # zipfile raises what it comes across
        raise ValueError(f"{path} is not an executable, or is cut short: {error}") from error
    if not ours or manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is not an executable of this version of neuron_streams. Compile it again."
        )
    digests = {name: hashlib.sha256(entry).hexdigest() for name, entry in data.items()}
    if digests != manifest.get("sha256"):
        raise ValueError(f"{path} is damaged: its entries are not those that were saved.")
    return manifest, data


def _check_stored(archive: zipfile.ZipFile, size: int) -> None:
    """Reading it takes no more memory than its size: nothing is packed, nothing there twice."""
    entries = archive.infolist()
    need(all(e.compress_type == zipfile.ZIP_STORED for e in entries), "an entry is compressed")
    need(len({e.filename for e in entries}) == len(entries), "an entry is there twice")
    need(sum(e.file_size for e in entries) <= size, "its entries are larger than the whole")


def _check_here(path: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
    here = {"torch": torch.__version__, "machine": toolchain.machine()}
    for what, found in here.items():
        if manifest[what] != found:
            raise _UnfitError(
                f"{path} was compiled for {what} {manifest[what]}, but here it is {found}. "
                "Compile it again, or save one that was compiled with target='exported'."
            )


def read_neff(
    path: str | os.PathLike[str],
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
) -> tuple[Signature, Payload]:
    """A NEFF as its user describes it. Raises ValueError if that is no description."""
    name, names = Path(path).stem, list(inputs)
    if strangers := [one for one in aliases if one not in inputs]:
        raise ValueError(
            f"{name}: aliases name {strangers}, and the inputs are {names}. Give pairs of an input "
            "and the output that it is updated through."
        )
    for one, example in (*inputs.items(), *outputs.items()):
        if not isinstance(example, torch.Tensor):
            raise ValueError(
                f"{name}: {one!r} is described by {type(example).__name__}. Give a tensor like "
                "it, such as torch.empty(shape, dtype=dtype, device='meta')."
            )
    fresh = {one: example for one, example in outputs.items() if one not in aliases.values()}
    structure = pytree.tree_structure(next(iter(fresh)) if len(fresh) == 1 else tuple(fresh))
    specs = [tuple(spec_of(*item) for item in part.items()) for part in (inputs, fresh)]
    signature = Signature(name, specs[0], specs[1], tuple(aliases), structure)
    neff = Neff(
        Path(path).read_bytes(),
        names,
        list(fresh),
        {names.index(one): other for one, other in aliases.items()},
        sizes={**sizes_of(signature), **{aliases[n]: inputs[n].nbytes for n in aliases}},
    )
    return signature, Payload("neff", name, neff)


def sizes_of(signature: Signature) -> dict[str, int]:
    """The bytes of each tensor of a NEFF whose names are those of a signature."""
    specs = (*signature.inputs, *signature.outputs)
    return {spec.name: math.prod(spec.shape) * spec.dtype.itemsize for spec in specs}


def _neff_entries(neff: Neff) -> dict[str, bytes]:
    weights = io.BytesIO()
    torch.save([_compact(weight) for weight in neff.constants.values()], weights)
    names = {
        "inputs": neff.inputs,
        "outputs": neff.outputs,
        "aliases": [[position, name] for position, name in neff.aliases.items()],
        "constants": list(neff.constants),
        "sizes": dict(neff.sizes),
        "target": neff.target,
    }
    entries = {"neff.json": json.dumps(names).encode(), "model.neff": neff.content}
    return {**entries, "weights.pt": weights.getvalue()}


def _neff(signature: Signature, data: dict[str, bytes]) -> Neff:
    """A NEFF is checked by libnrt; what is checked here is that a call fits it."""
    need(data.keys() == {"neff.json", "model.neff", "weights.pt"}, f"it has entries {sorted(data)}")
    said = json.loads(data["neff.json"])
    aliases = {int(position): str(name) for position, name in said["aliases"]}
    places = [n for n, spec in enumerate(signature.inputs) if spec.name in signature.mutates]
    need(sorted(aliases) == places, "its aliases are not those of what it updates in place")
    weights = _weights(data["weights.pt"])
    return Neff(
        data["model.neff"],
        _names(said["inputs"]),
        _names(said["outputs"]),
        aliases,
        dict(zip(map(str, said["constants"]), weights, strict=True)),
        {str(name): int(size) for name, size in said["sizes"].items()},
        str(said["target"]),
    )


def _names(saved: Any) -> list[str] | None:
    return None if saved is None else [str(name) for name in saved]


def _exported(signature: Signature, data: dict[str, bytes]) -> torch.nn.Module:
    with zipfile.ZipFile(io.BytesIO(data["exported.pt2"])) as archive:
        _check_stored(archive, len(data["exported.pt2"]))
    program = torch.export.load(io.BytesIO(data["exported.pt2"]))
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for what, names, specs in (
        ("inputs", program.graph_signature.user_inputs, signature.inputs),
        ("outputs", program.graph_signature.user_outputs, signature.outputs),
    ):
        found = [(values[str(name)].dtype, tuple(values[str(name)].shape)) for name in names]
        declared = [(spec.dtype, spec.shape) for spec in specs]
        need(found == declared, f"it describes other {what} than its graph has")
    return program.module(check_guards=False)


def _program_entries(program: Program) -> dict[str, bytes]:
    weights = io.BytesIO()
    torch.save([_compact(weight) for weight in program.weights], weights)
    plan = json.dumps(saved.plan_to_json(program)).encode()
    libraries = {f"{n}.so": lib.path.read_bytes() for n, lib in enumerate(program.libraries)}
    return {"plan.json": plan, "weights.pt": weights.getvalue(), **libraries}


def _program(signature: Signature, data: dict[str, bytes]) -> Program:
    plan = json.loads(data["plan.json"])
    names = [f"{number}.so" for number in range(len(data) - 2)]
    need(data.keys() == {"plan.json", "weights.pt", *names}, f"it has entries {sorted(data)}")
    paths = [_kept(data[name]) for name in names]
    layouts = [saved.layouts_of(toolchain.loads(path)) for path in paths]
    libraries = [Library(path, said.outputs) for path, said in zip(paths, layouts, strict=True)]
    weights = _weights(data["weights.pt"])
    program = saved.plan_from_json(signature.name, plan, weights, libraries)
    saved.check_program(signature, program, layouts)
    return program


def _kept(library: bytes) -> Path:
    key = hashlib.sha256(library).hexdigest()
    write = functools.partial(_write, data=library)
    return cache.keep("archives", key, "library.so", write, toolchain.loads)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _weights(data: bytes) -> list[torch.Tensor]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        _check_stored(archive, len(data))
    weights = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    good = isinstance(weights, list) and all(
        type(weight) is torch.Tensor and weight.is_cpu and weight.layout is torch.strided
        for weight in weights
    )
    need(good, "its weights are no list of tensors")
    storages = {w.untyped_storage()._cdata: w.untyped_storage().nbytes() for w in weights}
    need(sum(storages.values()) <= len(data), "its weights are larger than their file")
    return list(weights)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the rest of its storage, which torch.save would write too."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
    ).copy_(tensor)


def _export(graph: torch.nn.Module, signature: Signature) -> bytes:
    if getattr(graph, "meta", {}).get(DRAWS):
        raise NotImplementedError(
            f"{signature.name} draws random numbers, so it cannot be saved: torch.export has no "
            "generators. Compile it where it runs."
        )
    examples = tuple(torch.zeros(s.shape, dtype=s.dtype, device="cpu") for s in signature.inputs)
    file = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.export warns of its own internals
        torch.export.save(torch.export.export(graph, examples, strict=False), file)
    return file.getvalue()
