"""Executables as files: a zip with a manifest, which has the digest of every other entry.

Loading one loads its compiled code: load only what you would run.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from neuron_streams._compiler import saved
from neuron_streams._compiler.draws import DRAWS
from neuron_streams._compiler.saved import need
from neuron_streams._compiler.signature import Signature
from neuron_streams._runtime import cache, toolchain
from neuron_streams._runtime.port import Payload
from neuron_streams._runtime.program import Library, Program

__all__ = ["read", "write"]

_KIND, _FORMAT = "neuron_streams executable", 2


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
