import multiprocessing
import threading

import pytest

from neuron_streams._runtime import toolchain


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def writes(text):
    return lambda path: path.write_text(text)


def refuses(path):
    raise AssertionError("built again")


def test_what_is_kept_is_found():
    path = toolchain.keep("things", "key", "a.txt", writes("hello"))
    assert path.read_text() == "hello"
    assert toolchain.find("things", "key", "a.txt") == path
    assert toolchain.keep("things", "key", "a.txt", refuses) == path
    assert toolchain.find("things", "other", "a.txt") is None


def test_a_damaged_file_is_built_again(caplog):
    caplog.set_level("INFO")
    path = toolchain.keep("things", "key", "a.txt", writes("hello"))
    path.write_text("hell")
    assert toolchain.find("things", "key", "a.txt") is None
    assert caplog.messages == [f"{path} in the cache is damaged and is built again."]
    assert toolchain.keep("things", "key", "a.txt", writes("hello")).read_text() == "hello"


def test_a_build_that_fails_leaves_nothing(cache):
    with pytest.raises(AssertionError, match="built again"):
        toolchain.keep("things", "key", "a.txt", refuses)
    assert list((cache / "things").iterdir()) == []


def test_threads_may_race(cache):
    start, seen = threading.Barrier(8), []

    def race(number):
        start.wait()
        seen.append(toolchain.keep("things", "key", "a.txt", writes("same")).read_text())

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["same"] * 8
    assert [entry.name for entry in (cache / "things").iterdir()] == ["key"]


def hold(name, entered, leave):
    with toolchain.exclusive(name):
        entered.set()
        leave.wait(30)


def test_one_process_at_a_time_is_inside():
    spawn = multiprocessing.get_context("spawn")
    entered, leave, second = spawn.Event(), spawn.Event(), threading.Event()
    process = spawn.Process(target=hold, args=("compile", entered, leave))
    process.start()
    assert entered.wait(60)

    def enter():
        with toolchain.exclusive("compile"):
            assert leave.is_set()
            second.set()

    thread = threading.Thread(target=enter)
    thread.start()
    leave.set()
    thread.join(30)
    process.join(30)
    assert second.is_set()


def test_no_compilers_where_none_are_wanted(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_COMPILER", "none")
    assert toolchain.c_compiler() is None
    assert toolchain.cxx_compiler() is None


def test_a_compiler_that_fails_says_what_it_said():
    path = toolchain.c_compiler()
    if path is None:
        pytest.skip("there is no C compiler here")
    with pytest.raises(RuntimeError, match=r"(?s)failed \(1\).*nowhere\.c"):
        toolchain.run([path, "-c", "nowhere.c"])


def test_the_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="Name a folder that can be written"):
        toolchain.keep("things", "key", "a.txt", writes("hello"))
