"""The folder where what was built is kept, and the rules under which anything in it is used.

An entry is a folder `<kind>/<key>`, whose key says all that went into it. It is built beside its
place under the lock of its key, sealed with the digests of its files and put in place by one
rename, so that processes build it once, and a killed or damaged build is noticed. An entry is
code that will run in this process, so one that another user owns or may write is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from neuron_streams._runtime import ownership

__all__ = [
    "CacheError",
    "cache_folder",
    "exclusive",
    "find",
    "keep",
    "location",
    "refuse_noexec",
    "scratch",
]

log = logging.getLogger(__name__)

_SUMS = "SHA256SUMS"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_STALE_SECONDS = 24 * 3600  # of a build, where the file system cannot say whether it is alive
_FULL = 1 << 20  # bytes free, or less
_ADVICE = "or name another folder in NEURON_STREAMS_CACHE"


class CacheError(OSError):
    """The cache folder cannot be used; the sentence says why and what to do."""


def cache_folder() -> Path:
    """The folder of compiled code and converted weights, absolute; it may not be there yet.

    `NEURON_STREAMS_CACHE`, else `neuron_streams` in `XDG_CACHE_HOME` or `~/.cache`, else, where
    that cannot be written, one named by the user's id in the folder for temporary files. A relative
    path counts from where the process was at the first call.

    Raises:
        OSError: it cannot be looked at, or a user who is neither this one nor root owns it or may
            write it, and so could decide what runs here.

    Host: returns after a look at the disk.
    """
    folder = location()
    with _explained("read", folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _refuse_foreign(folder)
    return folder


def location() -> Path:
    """Where the cache is, whoever owns it."""
    chosen = os.path.expanduser(os.environ.get("NEURON_STREAMS_CACHE", ""))
    return _absolute(chosen) if chosen and chosen[0] != "~" else _default()


@functools.cache
def _absolute(chosen: str) -> Path:
    return Path(chosen).absolute()


def _default() -> Path:
    home = _home()
    for base in (os.environ.get("XDG_CACHE_HOME", ""), home and f"{home}/.cache"):
        if os.path.isabs(base):  # a relative one is to be ignored, says the XDG specification
            folder = Path(base) / "neuron_streams"
            if _writable(next(path for path in (folder, *folder.parents) if os.path.exists(path))):
                return folder
    return _temporary() / f"neuron_streams-{os.geteuid()}"


def _home() -> str:
    """The home folder, empty where there is none: a uid need not have one, nor a passwd entry."""
    home = os.environ.get("HOME")
    if home is None:
        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(os.geteuid()).pw_dir
    return home if home and os.path.isabs(home) and os.path.isdir(home) else ""


def _writable(folder: Path) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no folder can be written: what needs one says so by this name
        return Path("/tmp")


Check = Callable[[Path], object]


def find(kind: str, key: str, filename: str, check: Check | None = None) -> Path | None:
    """The file of an entry; None where there is none, or it is damaged.

    Args:
        check: raises OSError for a file that is whole and of no use here, which is damage too.

    Raises:
        CacheError: the entry cannot be read, or another user owns it or may write it.
    """
    root = cache_folder()
    folder = root / kind / key
    with _explained("read", root):
        try:
            for path in (root / kind, folder, *_files(folder)):
                _refuse_foreign(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        fault = _fault(folder, filename, check)
    if fault is None:
        return folder / filename
    log.info("%s in the cache is damaged and is built again: %s", folder / filename, fault)
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _fault(folder: Path, filename: str, check: Check | None) -> str | None:
    path = folder / filename
    try:
        if not path.is_file() or (folder / _SUMS).read_bytes() != _sums(folder):
            return "its files are not those that were built"
        if check is not None:
            check(path)
    except (CacheError, PermissionError):
        raise
    except OSError as error:
        return str(error)
    return None


def _sums(folder: Path) -> bytes:
    """The digests of an entry's files, as sha256sum writes them."""
    names = [path.name for path in _files(folder) if path.name != _SUMS]
    lines = [f"{_digest(folder / name)}  {name}\n" for name in names]
    return "".join(lines).encode(errors="surrogateescape")


def _digest(path: Path) -> str:
    made = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            made.update(part)
    return made.hexdigest()


def _refuse_foreign(path: Path) -> None:
    reason = ownership.why_not_ours(path)
    if reason is not None:
        raise CacheError(
            f"{path} {reason}, and what the cache holds runs as you. Nothing in it is used: make "
            f"it yours alone (chown, chmod -R go-w), {_ADVICE}."
        )


def refuse_noexec(path: Path) -> None:
    """Raise CacheError where the file system of a path runs no code."""
    if os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise CacheError(
            f"{path} is on a file system mounted noexec, so no code that is kept there can be "
            "loaded. Name a folder on another one in NEURON_STREAMS_CACHE."
        )


def keep(
    kind: str, key: str, filename: str, build: Callable[[Path], object], check: Check | None = None
) -> Path:
    """The file of an entry; where there is none, or it is damaged, `build(path)` makes it first.

    One process builds an entry, and those that need it meanwhile wait. `build` may leave other
    files beside its own. What it raises goes through, and nothing is kept then.

    Args:
        check: as in `find`; it has the last word on what was just built as well.

    Raises:
        CacheError: the cache cannot be read or written, is full, or belongs to another user.
    """
    found = find(kind, key, filename, check)
    if found is not None:
        return found
    folder = cache_folder() / kind / key
    with _workshop(folder.parent, key) as workshop:
        found = find(kind, key, filename, check)  # another process may have built it meanwhile
        if found is not None:
            return found
        with _explained("written", folder.parent):
            fresh = workshop / "fresh"
            fresh.mkdir(mode=0o755)
            build(fresh / filename)
            _seal(fresh)
            while not _settle(fresh, folder):
                found = find(kind, key, filename, check)
                if found is not None:
                    return found
                _discard(folder, workshop)
    if fault := _fault(folder, filename, check):
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(f"{folder / filename} was built and cannot be used: {fault}")
    return folder / filename


def _seal(fresh: Path) -> None:
    """Digests for the files; and who may read them is for the umask to say, write none but us."""
    (fresh / _SUMS).write_bytes(_sums(fresh))
    for path in _files(fresh):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)


def _settle(fresh: Path, folder: Path) -> bool:
    # A folder is never renamed onto a full one: it is damaged, or without locks another was faster.
    try:
        fresh.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False
    return True


def _discard(folder: Path, workshop: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        folder.rename(workshop / f"damaged-{secrets.token_hex(4)}")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for a while. Killed processes leave theirs behind for the next one to remove."""
    with _workshop(cache_folder() / "scratch", secrets.token_hex(8)) as folder:
        yield folder


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Only one process or thread at a time is inside; the others wait. Ends with the process."""
    root = cache_folder()
    _make(root)
    with _locked(root / f".{name}.lock"):
        yield


def _make(folder: Path) -> None:
    with _explained("made", folder):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        _refuse_foreign(folder)
        refuse_noexec(folder)


@contextlib.contextmanager
def _workshop(parent: Path, key: str) -> Iterator[Path]:
    """A new folder `.key.*`; while its process lives, that holds the lock `.key.lock`."""
    _make(cache_folder())
    _make(parent)
    with _locked(parent / f".{key}.lock") as locked:
        with _explained("written", parent):
            folder = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=parent))
        try:
            for other in parent.glob(".*.*"):
                if other.name != f".{key}.lock" and other != folder:
                    _sweep(other, folder, locked)
            with _room(parent):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    """Whatever fails on a full disk fails for that: compilers say it in many words."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if shutil.disk_usage(folder).free < _FULL and not isinstance(error, CacheError):
            raise _full(folder) from error
        raise


def _sweep(path: Path, own: Path, locked: bool) -> None:
    """Remove what a killed build has left behind."""
    key, mine = path.name.split(".")[1], own.name.split(".")[1]
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        if key != mine:
            lock = _locked(path.with_name(f".{key}.lock"), wait=False)
            locked = stack.enter_context(lock)  # raises where the build is alive
        # The clock of the file system, which need not be that of this machine.
        old = own.stat().st_mtime - path.stat().st_mtime > _STALE_SECONDS
        if path.is_dir() and (locked or old):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock that a file stands for; False where the file system has no locks.

    The file goes with its holder, so whoever gets the lock of one that has gone begins again.
    """
    file, locked = _take(path, wait)
    while locked and not _is_still(path, file):
        os.close(file)
        file, locked = _take(path, wait)
    try:
        yield locked
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        if locked:  # closing is not enough: a process forked meanwhile has the file open too
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _take(path: Path, wait: bool) -> tuple[int, bool]:
    """The file, open, and whether it could be locked. Raises BlockingIOError without `wait`."""
    with _explained("written", path.parent):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            log.info("waiting for another process that builds the same (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return file, False
        os.close(file)
        raise
    except BaseException:
        os.close(file)
        raise
    return file, True


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _explained(done: str, folder: Path) -> Iterator[None]:
    """Errors of the file system as the sentence of a CacheError."""
    try:
        yield
    except CacheError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(folder) from error
        what = error.filename or folder if done == "read" else folder
        raise CacheError(
            f"{what} cannot be {done} ({error.strerror or error}). Give this user access to it, "
            f"{_ADVICE}."
        ) from error


def _full(folder: Path) -> CacheError:
    return CacheError(f"{folder} is on a full disk. Make room, {_ADVICE}.")
