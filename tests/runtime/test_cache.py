"""Entries of the cache: built once, whole or not at all, found again, built again when damaged."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading

import pytest

from neuron_streams._runtime import cache
from neuron_streams._runtime.cache import CacheError
from tests.runtime.other_users import fork, in_child, mounted, needs_root, remount


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def writes(text):
    return lambda path: path.write_text(text)


def refuses(path):
    raise AssertionError("built again")


def entries(folder):
    return sorted(path.name for path in (folder / "things").iterdir())


def test_what_is_kept_is_found():
    path = cache.keep("things", "key", "a.txt", writes("hello"))
    assert path.read_text() == "hello"
    assert cache.find("things", "key", "a.txt") == path
    assert cache.keep("things", "key", "a.txt", refuses) == path
    assert cache.find("things", "other", "a.txt") is None


DAMAGES = {
    "the file is shorter": lambda entry: (entry / "a.txt").write_text("hell"),
    "the file is empty": lambda entry: (entry / "a.txt").write_text(""),
    "the file has gone": lambda entry: (entry / "a.txt").unlink(),
    "the file is a folder": lambda entry: ((entry / "a.txt").unlink(), (entry / "a.txt").mkdir()),
    "what lies beside it is shorter": lambda entry: (entry / "b.txt").write_text("b"),
    "what lies beside it has gone": lambda entry: (entry / "b.txt").unlink(),
    "the digests are shorter": lambda entry: os.truncate(entry / "SHA256SUMS", 70),
    "the digests are empty": lambda entry: os.truncate(entry / "SHA256SUMS", 0),
    "the digests are not text": lambda entry: (entry / "SHA256SUMS").write_bytes(b"\xff\xfe"),
    "the digests have gone": lambda entry: (entry / "SHA256SUMS").unlink(),
    "the entry is empty": lambda entry: [path.unlink() for path in entry.iterdir()],
    "the entry is a file": lambda entry: (entry.rename(f"{entry}.old"), entry.write_text("")),
    "the entry is a broken link": lambda entry: (
        entry.rename(f"{entry}.old"),
        entry.symlink_to("nowhere"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_built_again(damage):
    def build(path):
        path.write_text("hello")
        path.with_name("b.txt").write_text("beside")

    path = cache.keep("things", "key", "a.txt", build)
    damage(path.parent)
    assert cache.find("things", "key", "a.txt") is None
    assert cache.keep("things", "key", "a.txt", build) == path
    assert cache.find("things", "key", "a.txt") == path
    assert path.read_text() == "hello"
    assert path.with_name("b.txt").read_text() == "beside"


def test_damage_is_logged(caplog):
    caplog.set_level("INFO")
    path = cache.keep("things", "key", "a.txt", writes("hello"))
    path.write_text("hell")
    assert cache.find("things", "key", "a.txt") is None
    reason = "its files are not those that were built"
    assert caplog.messages == [f"{path} in the cache is damaged and is built again: {reason}"]


def test_an_entry_of_no_use_is_built_again():
    def check(path):
        if path.read_text() != "good":
            raise OSError("wrong ELF class")

    path = cache.keep("things", "key", "a.txt", writes("junk"))
    assert cache.find("things", "key", "a.txt", check) is None
    assert cache.keep("things", "key", "a.txt", writes("good"), check).read_text() == "good"
    with pytest.raises(RuntimeError, match=r"other/a.txt was built and cannot be used: wrong ELF"):
        cache.keep("things", "other", "a.txt", writes("junk"), check)
    assert entries(path.parents[2]) == ["key"]
    assert path.read_text() == "good"


def test_a_build_that_fails_leaves_nothing(folder):
    with pytest.raises(AssertionError, match="built again"):
        cache.keep("things", "key", "a.txt", refuses)
    assert entries(folder) == []


@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
def test_the_umask_says_who_may_read_and_nobody_else_writes(mask):
    before = os.umask(mask)
    try:
        path = cache.keep("things", "key", "a.txt", writes("hello"))
    finally:
        os.umask(before)
    for place in (path.parent, path.parent.parent, path.parent.parent.parent):
        assert place.stat().st_mode & 0o777 == 0o755 & ~mask
    for place in (path, path.with_name("SHA256SUMS")):
        assert place.stat().st_mode & 0o777 == 0o644 & ~mask
    assert cache.find("things", "key", "a.txt") == path


ODD = ["a space", "it's", 'a "quote"', "two\nlines", "100%s", "$HOME", "naïve", "\udcff", ".hidden"]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_the_folder_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / name))
    path = cache.keep("things", "key", "a.txt", writes("hello"))
    assert cache.find("things", "key", "a.txt") == path
    assert path.is_relative_to(tmp_path / name)


# Locks


def test_threads_may_race(folder):
    start, seen, built = threading.Barrier(8), [], []

    def build(path):
        built.append(path)
        path.write_text("same")

    def race():
        start.wait()
        seen.append(cache.keep("things", "key", "a.txt", build).read_text())

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["same"] * 8
    assert len(built) == 1
    assert entries(folder) == ["key"]


def hold(name, entered, leave):
    with cache.exclusive(name):
        entered.set()
        leave.wait(30)


def test_one_process_at_a_time_is_inside(folder):
    spawn = multiprocessing.get_context("spawn")
    entered, leave, second = spawn.Event(), spawn.Event(), threading.Event()
    process = spawn.Process(target=hold, args=("compile", entered, leave))
    process.start()
    assert entered.wait(60)

    def enter():
        with cache.exclusive("compile"):
            assert leave.is_set()
            second.set()

    thread = threading.Thread(target=enter)
    thread.start()
    leave.set()
    thread.join(30)
    process.join(30)
    assert second.is_set()
    assert list(folder.iterdir()) == []


def build_and_die(key):
    def build(path):
        path.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    cache.keep("things", key, "a.txt", build)


def killed_build(key):
    with pytest.raises(EOFError):
        in_child(build_and_die, key)


@pytest.mark.parametrize("key", ["key", "other"])
def test_what_a_killed_build_left_is_removed_by_the_next(folder, key):
    killed_build(key)
    killed_build(key)
    assert len(entries(folder)) == 2  # its lock and its folder
    cache.keep("things", "key", "a.txt", writes("hello"))
    assert entries(folder) == ["key"]


def test_a_build_that_is_alive_is_left_alone(folder):
    def build(path):
        path.write_text("hello")
        cache.keep("things", "other", "a.txt", writes("faster"))
        assert path.read_text() == "hello"

    cache.keep("things", "key", "a.txt", build)
    assert entries(folder) == ["key", "other"]


@pytest.fixture(params=["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def no_locks(request, monkeypatch):
    def flock(file, operation):
        number = getattr(errno, request.param)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_without_locks_it_is_built_all_the_same(no_locks, folder):
    assert cache.keep("things", "key", "a.txt", writes("hello")).read_text() == "hello"
    with cache.exclusive("compile"):
        pass
    assert entries(folder) == ["key"]


def test_without_locks_a_faster_process_wins(no_locks):
    def build(path):
        path.write_text("slow")
        cache.keep("things", "key", "a.txt", writes("fast"))

    assert cache.keep("things", "key", "a.txt", build).read_text() == "fast"


def test_without_locks_only_what_is_a_day_old_is_removed(no_locks, folder):
    for name, age in (("old", 100_000), ("young", 1000), ("ahead", -100_000)):
        left = folder / "things" / f".{name}.1"
        left.mkdir(parents=True)
        now = left.stat().st_mtime
        os.utime(left, (now - age, now - age))
    cache.keep("things", "key", "a.txt", writes("hello"))
    assert entries(folder) == [".ahead.1", ".young.1", "key"]


def test_another_error_of_a_lock_is_said(monkeypatch):
    def flock(file, operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output error"):
        cache.keep("things", "key", "a.txt", writes("hello"))


def test_a_lock_is_free_although_a_forked_process_has_its_file(folder):
    read, write = os.pipe()
    waiters = []

    def build(path):
        path.write_text("hello")
        waiters.append(os.open(folder / "things" / ".key.lock", os.O_RDWR))
        if fork() == 0:  # it outlives the build, with its files
            os.close(write)
            os.read(read, 1)
            os._exit(0)

    cache.keep("things", "key", "a.txt", build)
    fcntl.flock(waiters[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(write)
    os.wait()


def test_scratch_goes_with_its_block(folder):
    with cache.scratch() as place:
        (place / "file").write_text("x")
        assert place.is_relative_to(folder)
    assert list((folder / "scratch").iterdir()) == []


# Folders that cannot be used


def test_the_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match=r"file/cache cannot be made \(Not a directory\)\. Give"):
        cache.keep("things", "key", "a.txt", writes("hello"))


@needs_root
def test_a_full_disk_is_said(tmp_path, monkeypatch):
    with mounted(tmp_path / "full", "size=64k") as full:
        monkeypatch.setenv("NEURON_STREAMS_CACHE", str(full / "cache"))
        with pytest.raises(CacheError, match=r"cache\S* is on a full disk\. Make room, or name"):
            cache.keep("things", "key", "a.txt", writes("x" * 100_000))

        def compiler(path):
            (path.with_name("big")).write_bytes(bytes(1000))
            raise RuntimeError("g++ failed (1): kein Platz")

        with pytest.raises(CacheError, match=r"cache\S* is on a full disk\. Make room, or name"):
            cache.keep("things", "key", "a.txt", compiler)
        assert cache.keep("things", "key", "a.txt", writes("small")).read_text() == "small"


@needs_root
def test_a_disk_that_runs_no_code_is_refused_before_anything_is_built(tmp_path, monkeypatch):
    with mounted(tmp_path / "noexec", "noexec") as noexec:
        monkeypatch.setenv("NEURON_STREAMS_CACHE", str(noexec / "cache"))
        with pytest.raises(CacheError, match=r"cache is on a file system mounted noexec, so no "):
            cache.keep("things", "key", "a.txt", refuses)


@needs_root
def test_a_disk_that_cannot_be_written_serves_what_it_has(tmp_path, monkeypatch):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        monkeypatch.setenv("NEURON_STREAMS_CACHE", str(disk / "cache"))
        path = cache.keep("things", "key", "a.txt", writes("hello"))
        remount(disk, "ro")
        assert cache.keep("things", "key", "a.txt", refuses) == path
        with pytest.raises(CacheError, match=r"things cannot be written \(Read-only file system\)"):
            cache.keep("things", "other", "a.txt", refuses)
        with pytest.raises(CacheError, match=r"others cannot be made \(Read-only file system\)"):
            cache.keep("others", "key", "a.txt", refuses)
        with pytest.raises(CacheError, match=r"cache cannot be written \(Read-only file system\)"):
            cache.exclusive("compile").__enter__()
