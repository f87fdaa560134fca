"""`neuron-streams doctor`: what is in use here, why, and what to change.

A file of its own since it asks every other part and none asks it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from neuron_streams import _native
from neuron_streams._compiler import neuron as neuron_compiler
from neuron_streams._device import get_device_name, init
from neuron_streams._runtime import cache, extension, process, toolchain
from neuron_streams._runtime.nrt.survey import Survey, survey

__all__ = ["Report", "examine"]

_NOT_OURS: tuple[str, str, list[str]] = ("none", "another package has the device", [])
_NAMES = ("Stream", "Event", "stream", "current_stream", "synchronize")
KEPT = "torch.neuron is there, and its streams keep the contract of torch.cuda"
PACKAGES = ("torch", "torch-neuronx", "neuronx-cc", "transformers", "safetensors")


@dataclass(frozen=True)
class Report:
    """Everything `doctor` says; `advice` is what to change, empty when all is well."""

    runtime: str
    why: str
    devices: list[str]
    implicit_waits: bool
    versions: dict[str, str | None]
    cxx_compiler: str | None
    extension: str
    cache_folder: str
    cache_bytes: int
    neuron: str
    neff_compiler: str
    native_streams: str
    threads: int
    advice: list[str]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        found = {name: version or "not installed" for name, version in self.versions.items()}
        lines = [
            f"runtime         {self.runtime}: {self.why}",
            f"devices         {len(self.devices)}: {', '.join(self.devices)}",
            f"implicit waits  {'on' if self.implicit_waits else 'off'}",
            *(f"{name:15} {version}" for name, version in found.items()),
            f"C++ compiler    {self.cxx_compiler or 'none'}",
            f"extension       {self.extension}",
            f"cache           {self.cache_folder} ({self.cache_bytes / 1e6:.1f} MB)",
            f"Neuron          {self.neuron}",
            f"NEFFs           {self.neff_compiler}",
            f"native streams  {self.native_streams}",
            f"threads         {self.threads} per kernel",
        ]
        advice = self.advice or ["nothing to change"]
        return "\n".join([*lines, "", *(f"* {line}" for line in advice)])


def examine() -> Report:
    """Look at this machine. Starts the runtime. Host: waits for it and for a look at the disk.

    Where a native package has the device ours cannot start: its streams are tried instead.
    """
    native = _native_streams()
    said = _said_of(native)
    cxx = toolchain.cxx_compiler()
    folder = cache.location()
    neuron = survey()
    name, why, devices = _in_use() if native is None else _NOT_OURS
    compiler = neuron_compiler.described()
    return Report(
        runtime=name,
        why=why,
        devices=devices,
        implicit_waits=os.environ.get("NEURON_STREAMS_IMPLICIT_WAITS", "1") != "0",
        versions=_versions(),
        cxx_compiler=None if cxx is None else shlex.join(cxx),
        extension="not needed" if native is not None else extension.load().__file__,
        cache_folder=str(folder),
        cache_bytes=_size_of(folder),
        neuron=str(neuron),
        neff_compiler=compiler or f"{neuron_compiler.python()} has no torch-neuronx",
        native_streams=said,
        threads=torch.get_num_threads(),
        advice=[*_advice_on_native(said), *_advice(cxx is not None), *_advice_on(neuron, compiler)],
    )


def _in_use() -> tuple[str, str, list[str]]:
    init()
    runtime = process.runtime()
    devices = [f"neuron:{i} {get_device_name(i)}" for i in range(runtime.device_count())]
    return runtime.name, process.why(), devices


def _native_streams() -> Any:
    """The native module of this process, None where there is none."""
    found = getattr(torch, "neuron", None)
    return None if found is sys.modules["neuron_streams"] else found


def _said_of(native: Any) -> str:
    if native is None:
        return "no"
    missing = [name for name in _NAMES if not hasattr(native, name)]
    if missing:
        return f"torch.neuron is there, without {', '.join(missing)}"
    broken = _native.faults(native)
    return f"torch.neuron is there, but {'; '.join(broken)}" if broken else KEPT


def _advice_on_native(said: str) -> list[str]:
    if said == "no":
        return []
    if said == KEPT:
        return [
            "Native streams keep the contract that this package stands for: replace "
            "`neuron_streams` by `torch.neuron` and uninstall this"
        ]
    return [
        "Native streams have the device here and do not keep the contract of torch.cuda (see "
        "above). Keep this package, in a Python environment without torch-neuronx, for what relies "
        "on it; multi-core users of the native package need TORCH_NEURONX_ENABLE_HOST_CC=1 for "
        "streams of their own"
    ]


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("neuron-streams", *PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process removes what it has built on
            total += path.stat().st_size if path.is_file() else 0
    return total


def _advice_on(neuron: Survey, compiler: str | None) -> list[str]:
    """Only where there is something of the Neuron stack: most machines have none and need none."""
    if not neuron.driver:
        return []
    lacking = (
        "Install torch-neuronx in this Python, or name one that has it in "
        "NEURON_STREAMS_NEURONX_PYTHON, for neuron_streams.compile to make NEFFs"
    )
    return [
        *neuron.missing,
        *(() if compiler else (lacking,)),
        "There is a Neuron device: NEURON_STREAMS_RUNTIME=nrt drives it, which was never tried on "
        "hardware",
    ]


def _advice(compiler: bool) -> list[str]:
    advice = []
    if not compiler:
        advice.append(
            "Install g++ (or set CXX), or set NEURON_STREAMS_CACHE to a folder that "
            "`neuron-streams build` has filled elsewhere: the device and executables are compiled"
        )
    try:
        with cache.scratch() as folder:
            (folder / "probe").write_bytes(bytes(1 << 20))
    except cache.CacheError as error:
        advice.append(str(error))
    if torch.get_num_threads() > 1 and "OMP_NUM_THREADS" not in os.environ:
        advice.append(
            "OMP_NUM_THREADS=1 makes steps of small models steadier: device workers and the host"
            " then do not compete for cores"
        )
    return advice
