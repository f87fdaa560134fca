"""Code run as another user, and file systems of another kind, where this machine lets us."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ALICE, BOB = 12345, 23456  # uids that no passwd file knows

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # with threads: these children may
        return os.fork()


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or raises, in a forked child; EOFError if that is killed."""
    read, write = os.pipe()
    child = fork()
    if child == 0:
        try:
            result = (True, function(*arguments))
        except BaseException as error:
            result = (False, error)
        with contextlib.suppress(BaseException), open(write, "wb") as file:
            file.write(pickle.dumps(result))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        told = file.read()
    os.waitpid(child, 0)
    worked, result = pickle.loads(told)
    if not worked:
        raise result
    return result


def as_user(uid: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or raises, in a forked child that is another user."""

    def change() -> Any:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        return function(*arguments)

    return in_child(change)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; those of pytest are for one alone."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory with these options; skips the test where it cannot be mounted."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Change the options of what is mounted on a folder."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
