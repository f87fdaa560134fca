import os
import shlex
import subprocess
import sys

import pytest
import torch

from neuron_streams import compile  # noqa: A004
from neuron_streams._compiler import library
from neuron_streams._compiler.plan import plan
from neuron_streams._runtime import cache, toolchain
from neuron_streams._runtime.chain import ProgramHandle
from tests.compiler.compiled import deep, needs_cxx, pair
from tests.compiler.plans import Deep, deep_inputs

pytestmark = needs_cxx


def add_one(x):
    return x + 1


def keys(function, *examples):
    return [library._key(segment) for segment in plan(function, examples).segments]


@pytest.fixture
def commands(monkeypatch):
    """The compilers' commands, as they are run."""
    seen, run = [], toolchain.run
    monkeypatch.setattr(toolchain, "run", lambda *given: (seen.append(given[0]), run(*given))[1])
    return seen


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """An empty cache, but for the headers and the extension, which take long."""
    add = compile(add_one, [torch.ones(3)])  # so that there are headers
    shared, own = cache.cache_folder(), tmp_path / "cache"
    own.mkdir()
    for kind in ("precompiled", "extension"):
        (own / kind).symlink_to(shared / kind, target_is_directory=True)
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(own))
    return own, add


def test_a_key_says_what_is_computed_and_no_names():
    one = keys(add_one, torch.ones(3))
    assert one == keys(lambda other: other + 1, torch.ones(3))
    assert one != keys(add_one, torch.ones(4))
    assert one != keys(add_one, torch.ones(3, dtype=torch.float64))
    assert one != keys(lambda x: x + 2, torch.ones(3))
    assert one != keys(lambda x: x + 1.0, torch.ones(3))


def test_a_key_knows_the_threads():
    one = keys(add_one, torch.ones(3))
    torch.set_num_threads(2)
    try:
        assert one != keys(add_one, torch.ones(3))
    finally:
        torch.set_num_threads(1)


def test_a_key_knows_nothing_of_weights():
    assert keys(Deep(), *deep_inputs()) == keys(Deep(), *deep_inputs())


def test_a_repeated_layer_is_one_library():
    program = deep()._payload.content
    assert len(program.libraries) == 3
    assert len(program.steps) == 4 + 2 + 8


def test_nothing_is_compiled_twice(commands):
    pair()
    commands.clear()
    compile(lambda a, b: (a + b, a * 2), [torch.ones(2, 3), torch.ones(3)])
    assert commands == []


def test_a_damaged_library_is_compiled_again(own_cache, commands):
    add = compile(add_one, [torch.ones(3)])
    commands.clear()
    path = add._payload.content.libraries[0].path
    path.unlink()  # not truncated: this process has it mapped
    path.write_bytes(b"damaged")
    again = compile(add_one, [torch.ones(3)])
    assert commands
    assert ProgramHandle(again._payload.content).run([torch.ones(3)])[0].tolist() == [2, 2, 2]


@pytest.mark.slow
def test_what_the_short_way_cannot_do_is_compiled_as_torch_does(own_cache, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(library, "_INTERFACE", "this is in no text")
    add = compile(add_one, [torch.ones(3)])
    assert any("the short way failed" in message for message in caplog.messages)
    assert ProgramHandle(add._payload.content).run([torch.ones(3)])[0].tolist() == [2, 2, 2]


AFTER_THE_MAIN_THREAD = """
import threading
import torch
import neuron_streams
def work():
    threading.main_thread().join()
    add_one = neuron_streams.compile(lambda x: x + 1, [torch.zeros(2)])
    print(add_one.target, add_one(torch.zeros(2).to("neuron")).tolist())
threading.Thread(target=work).start()
"""


def test_a_thread_compiles_after_the_main_thread_has_ended(own_cache):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", AFTER_THE_MAIN_THREAD],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu [1.0, 1.0]\n", "")


def test_what_no_thread_can_be_had_for_is_compiled_on_the_caller(own_cache, commands, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(library.ThreadPoolExecutor, "submit", refuse)
    executable = compile(lambda x: x * 5, [torch.zeros(2)])
    assert executable(torch.ones(2).to("neuron")).tolist() == [5.0, 5.0]
    assert commands


def test_settings_do_not_leak(own_cache):
    before = dict(os.environ)
    compile(add_one, [torch.ones(3)])
    assert dict(os.environ) == before


def test_an_operator_without_c_is_run_by_python(caplog):
    caplog.set_level("INFO")

    def triangles(x):
        return torch.linalg.qr(x)[1].abs()

    made = compile(triangles, [torch.ones(3, 3)])
    assert made.target == "exported"
    assert any("triangles runs as an exported graph" in message for message in caplog.messages)


@pytest.mark.slow
def test_processes_may_compile_the_same_at_once(own_cache):
    code = (
        "import torch; from neuron_streams import compile; torch.set_num_threads(1);"
        "e = compile(lambda x: x * 3, [torch.ones(5)]);"
        "print(e(torch.ones(5)).cpu().tolist())"
    )
    run = [sys.executable, "-W", "error", "-c", code]
    processes = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in processes] == [str([3.0] * 5)] * 2
    assert len(list((own_cache[0] / "executables").iterdir())) == 1


FAILURES = {
    "hangs": ("sleep 1000", "did not end within 1 s and was stopped"),
    "fails": ("echo 'no licence' >&2; exit 1", r"failed \(1\): no licence$"),
    "makes nothing": ("exit 0", "ended well and has not made .*: it printed nothing"),
    "speaks Latin 1": (r"printf 'd\351faut' >&2; exit 1", r"failed \(1\): d\ufffdfaut$"),
}


@pytest.mark.parametrize("asked", ["--version", "to compile"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_compiler_of_no_use_is_one_sentence(tmp_path, monkeypatch, asked, failure):
    text, sentence = FAILURES[failure]
    if asked == "--version" and failure == "makes nothing":
        pytest.skip("it has nothing to make")
    answer = "" if asked == "--version" else "case $1 in -*version) echo clang 1; exit ;; esac\n"
    compiler = tmp_path / "my compiler"
    compiler.write_text(f"#!/bin/sh\n{answer}{text}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("NEURON_STREAMS_COMPILE_SECONDS", "1")
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match=rf"(?s)^{compiler} {sentence}"):
        compile(add_one, [torch.ones(3)])
    left = [path.name for path in (tmp_path / "cache").glob("*/*")]
    assert all(len(name) == 64 for name in left)  # keys: whole entries, and nothing of a build
    assert list((tmp_path / "cache").glob("executables/*")) == []


@pytest.mark.slow
def test_a_cache_and_a_compiler_of_any_name(tmp_path, monkeypatch):
    name = 'it\'s "odd"\n100% $HOME clang é'
    command = toolchain.cxx_compiler()
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{launcher} {shlex.join(command)}")
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / name))
    add = compile(add_one, [torch.ones(3)])
    assert add.target == "cpu"
    assert add._payload.content.libraries[0].path.is_relative_to(tmp_path / name)
    assert ProgramHandle(add._payload.content).run([torch.ones(3)])[0].tolist() == [2, 2, 2]
