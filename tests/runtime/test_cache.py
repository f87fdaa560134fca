import multiprocessing
import threading

import pytest

from neuron_streams._runtime import cache


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def writes(text):
    return lambda path: path.write_text(text)


def refuses(path):
    raise AssertionError("built again")


def test_what_is_kept_is_found():
    path = cache.keep("things", "key", "a.txt", writes("hello"))
    assert path.read_text() == "hello"
    assert cache.find("things", "key", "a.txt") == path
    assert cache.keep("things", "key", "a.txt", refuses) == path
    assert cache.find("things", "other", "a.txt") is None


def test_a_damaged_file_is_built_again(caplog):
    caplog.set_level("INFO")
    path = cache.keep("things", "key", "a.txt", writes("hello"))
    path.write_text("hell")
    assert cache.find("things", "key", "a.txt") is None
    reason = "its files are not those that were built"
    assert caplog.messages == [f"{path} in the cache is damaged and is built again: {reason}"]
    assert cache.keep("things", "key", "a.txt", writes("hello")).read_text() == "hello"


def test_a_build_that_fails_leaves_nothing(folder):
    with pytest.raises(AssertionError, match="built again"):
        cache.keep("things", "key", "a.txt", refuses)
    assert list((folder / "things").iterdir()) == []


def test_threads_may_race(folder):
    start, seen = threading.Barrier(8), []

    def race(number):
        start.wait()
        seen.append(cache.keep("things", "key", "a.txt", writes("same")).read_text())

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["same"] * 8
    assert [entry.name for entry in (folder / "things").iterdir()] == ["key"]


def hold(name, entered, leave):
    with cache.exclusive(name):
        entered.set()
        leave.wait(30)


def test_one_process_at_a_time_is_inside():
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


def test_the_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="cannot be (read|made)"):
        cache.keep("things", "key", "a.txt", writes("hello"))
