"""Compilers, found once and bounded."""

import os
import select
import shlex
import subprocess
import threading

import pytest

from neuron_streams._runtime import toolchain


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that is all of PATH."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    return folder


def script(path, text="exit 0"):
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{text}\n")
    path.chmod(0o755)
    return path


# Which


def test_no_compilers_where_none_are_wanted(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_COMPILER", "none")
    assert toolchain.c_compiler() is None
    assert toolchain.cxx_compiler() is None


@pytest.mark.parametrize("name", ["g++", "c++", "clang++"])
def test_any_cxx_compiler_will_do(tools, name):
    assert toolchain.cxx_compiler() is None
    tools = tools.rename(tools.with_name("more tools"))
    os.environ["PATH"] = str(tools)
    script(tools / name)
    assert toolchain.cxx_compiler() == (str(tools / name),)


@pytest.mark.parametrize("name", ["cc", "gcc", "clang"])
def test_any_c_compiler_will_do(tools, monkeypatch, name):
    script(tools / name)
    monkeypatch.setenv("PATH", os.path.relpath(tools))
    assert toolchain.c_compiler() == (str(tools / name),)


def test_cxx_may_have_arguments(tools, monkeypatch):
    script(tools / "ccache")
    monkeypatch.setenv("CXX", "ccache g++ '-DA=a b'")
    assert toolchain.cxx_compiler() == (str(tools / "ccache"), "g++", "-DA=a b")


def test_cxx_may_be_a_path_with_spaces(tools, monkeypatch):
    path = script(tools / "my g++")
    monkeypatch.setenv("CXX", str(path))
    assert toolchain.cxx_compiler() == (str(path),)


@pytest.mark.parametrize("chosen", ["nothing", "nothing -m64", "'unclosed", "/dev/null", "/tmp"])
def test_cxx_that_names_nothing_is_said_once(tools, monkeypatch, caplog, chosen):
    path = script(tools / "c++")
    monkeypatch.setenv("CXX", chosen)
    assert toolchain.cxx_compiler() == toolchain.cxx_compiler() == (str(path),)
    assert caplog.messages == [f"CXX={chosen!r} names no program, so {path} is used."]


@pytest.mark.parametrize("chosen", ["", "  "])
def test_an_empty_cxx_is_none(tools, monkeypatch, caplog, chosen):
    path = script(tools / "g++")
    monkeypatch.setenv("CXX", chosen)
    assert toolchain.cxx_compiler() == (str(path),)
    assert caplog.messages == []


def test_a_compiler_says_itself_whether_it_is_gcc(tools):
    gcc = script(tools / "c++", "echo 'c++ 12.2 Copyright Free Software Foundation, Inc.'")
    clang = script(tools / "g++", "echo 'Apple clang version 15'")
    assert toolchain.is_gcc((str(gcc),))
    assert not toolchain.is_gcc((str(clang),))


# How it is run


def test_a_compiler_that_fails_says_what_it_said():
    command = toolchain.c_compiler()
    if command is None:
        pytest.skip("there is no C compiler here")
    with pytest.raises(RuntimeError, match=r"(?s)failed \(1\).*nowhere\.c"):
        toolchain.run([*command, "-c", "nowhere.c"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("printf '\\377\\303\\251t\\303\\251' >&2; exit 3", r"g\+\+ failed \(3\): \ufffdété$"),
        ("exit 1", r"g\+\+ failed \(1\): it printed nothing\.$"),
        ("kill -9 $$", r"g\+\+ failed \(-9\): it printed nothing\.$"),
        ("echo done", r"g\+\+ ended well and has not made .*/out\.o: done$"),
    ],
)
def test_a_compiler_that_makes_nothing_is_one_sentence(tools, tmp_path, text, sentence):
    path = script(tools / "g++", text)
    with pytest.raises(RuntimeError, match=sentence):
        toolchain.run([str(path), "-c"], tmp_path / "out.o")


def test_a_compiler_that_cannot_be_run_is_one_sentence(tmp_path):
    broken = tmp_path / "g++"
    broken.write_bytes(b"\x7fELF junk")
    broken.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"g\+\+ cannot be run: Exec format error\.$"):
        toolchain.run([str(broken)])
    with pytest.raises(RuntimeError, match=r"gone cannot be run: No such file or directory\.$"):
        toolchain.run([str(tmp_path / "gone")])


def test_a_compiler_that_hangs_is_stopped_with_all_it_started(tools, tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_COMPILE_SECONDS", "0.5")
    path = script(tools / "g++", "echo working; sleep 1000 & echo $! >child; wait")
    monkeypatch.chdir(tmp_path)
    sentence = r"did not end within 0\.5 s and was stopped; set NEURON_.* needs longer: working$"
    with pytest.raises(RuntimeError, match=sentence):
        toolchain.run([str(path)])
    assert ended(int((tmp_path / "child").read_text()))


def ended(child):
    """Whether a process has ended, or does within half a minute."""
    try:
        file = os.pidfd_open(child)
    except ProcessLookupError:
        return True
    try:
        return select.select([file], [], [], 30)[0] == [file]
    finally:
        os.close(file)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "1e30"])
def test_a_bound_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("NEURON_STREAMS_COMPILE_SECONDS", text)
    with pytest.raises(ValueError, match=f"^NEURON_STREAMS_COMPILE_SECONDS='{text}' is no number"):
        toolchain.run(["true"])


def test_compilers_that_run_can_be_stopped_from_another_thread(tools, monkeypatch):
    path = script(tools / "g++", "sleep 1000")
    running, failures, communicate = threading.Event(), [], subprocess.Popen.communicate

    def watched(process, **options):
        running.set()
        return communicate(process, **options)

    def work():
        with pytest.raises(toolchain.StoppedError) as failure:
            toolchain.run([str(path)])
        failures.append(failure.value)

    monkeypatch.setattr(subprocess.Popen, "communicate", watched)
    thread = threading.Thread(target=work)
    thread.start()
    assert running.wait(30)
    toolchain.stop()
    thread.join(30)
    assert len(failures) == 1
    assert toolchain._running == set()


def test_an_interrupt_ends_the_compiler(tools, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "started")
    started = shlex.quote(str(tmp_path / "started"))
    path = script(tools / "g++", f"sleep 1000 & echo $! >{started}; wait")
    children = []

    def interrupted(process, timeout):
        children.append(int((tmp_path / "started").read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toolchain.run([str(path)])
    assert ended(children[0])
