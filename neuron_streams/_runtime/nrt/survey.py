"""What of the Neuron stack is on this machine: for the doctor. Starts nothing."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from neuron_streams._runtime.nrt.lib import Library, find
from neuron_streams._runtime.nrt.status import LibraryError, NrtError

__all__ = ["Survey", "survey"]


@dataclass(frozen=True)
class Survey:
    """What was found; `missing` are sentences that say what to install."""

    library: str
    cores: int
    driver: bool
    compiler: str | None
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        driver = "driver loaded" if self.driver else "no driver"
        return f"{self.library}, {self.cores} cores, {driver}, {self.compiler or 'no neuronx-cc'}"


def survey() -> Survey:
    """Look for libnrt, a driver, cores and a compiler. Host: waits for the loader."""
    library, cores, missing = "no libnrt", 0, []
    if find() is None:
        missing.append(
            "To run on a Neuron device install aws-neuronx-runtime-lib, or name libnrt in "
            "NEURON_STREAMS_LIBNRT"
        )
    else:
        try:
            found = Library()
            library = f"libnrt {found.version} (ABI of SDK {found.abi.value}, {found.path})"
            cores = found.device_count()
        except (LibraryError, NrtError) as error:
            missing.append(str(error))
    driver = Path("/dev/neuron0").exists()
    if cores and not driver and "NEURON_STREAMS_LIBNRT" not in os.environ:
        missing.append("Install aws-neuronx-dkms: libnrt is here and /dev/neuron0 is not")
    compiler = shutil.which("neuronx-cc")
    if driver and compiler is None:
        missing.append(
            "Install neuronx-cc to compile for this device; a .neff made elsewhere runs without it"
        )
    return Survey(library, cores, driver, compiler, missing)
