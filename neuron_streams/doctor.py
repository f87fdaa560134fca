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

import torch

from neuron_streams._runtime import cache, extension, process, toolchain
from neuron_streams._runtime.nrt.survey import Survey, survey
from neuron_streams.device import get_device_name, init

__all__ = ["Report", "examine"]

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
    native_streams: bool
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
            f"native streams  {'torch.neuron is there' if self.native_streams else 'no'}",
            f"threads         {self.threads} per kernel",
        ]
        advice = self.advice or ["nothing to change"]
        return "\n".join([*lines, "", *(f"* {line}" for line in advice)])


def examine() -> Report:
    """Look at this machine. Starts the runtime. Host: waits for it and for a look at the disk."""
    native = has_native_streams()
    cxx = toolchain.cxx_compiler()
    folder = cache.location()
    neuron = survey()
    init()
    runtime = process.runtime()
    return Report(
        runtime=runtime.name,
        why=process.why(),
        devices=[f"neuron:{i} {get_device_name(i)}" for i in range(runtime.device_count())],
        implicit_waits=os.environ.get("NEURON_STREAMS_IMPLICIT_WAITS", "1") != "0",
        versions=_versions(),
        cxx_compiler=None if cxx is None else shlex.join(cxx),
        extension=extension.load().__file__,
        cache_folder=str(folder),
        cache_bytes=_size_of(folder),
        neuron=str(neuron),
        native_streams=native,
        threads=torch.get_num_threads(),
        advice=[*_advice(native, cxx is not None), *_advice_on(neuron)],
    )


def has_native_streams() -> bool:
    """Whether native Neuron streams are in this process: two streams of torch.neuron that differ.

    Every stub fails this without raising: its streams all have the id 0.
    """
    if getattr(torch, "neuron", None) in (None, sys.modules["neuron_streams"]):
        return False
    try:
        first, second = torch.Stream("neuron"), torch.Stream("neuron")
    except RuntimeError:
        return False
    return first.stream_id != second.stream_id


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


def _advice_on(neuron: Survey) -> list[str]:
    """Only where there is something of the Neuron stack: most machines have none and need none."""
    if not neuron.driver:
        return []
    return [
        *neuron.missing,
        "There is a Neuron device: NEURON_STREAMS_RUNTIME=nrt drives it, which was never tried on "
        "hardware",
    ]


def _advice(native: bool, compiler: bool) -> list[str]:
    advice = []
    if native:
        advice.append(
            "Native streams are here: replace `neuron_streams` by `torch.neuron` and uninstall this"
        )
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
