"""The extension: built once, built again when of no use, and outside of a cache that is of none."""

import contextlib
import os
import subprocess
import sys

import pytest

from neuron_streams._runtime import cache, extension, toolchain
from tests.runtime.other_users import ALICE, mounted, needs_root, open_folder, remount

pytestmark = pytest.mark.skipif(toolchain.cxx_compiler() is None, reason="no C++ compiler here")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """An empty cache, and an extension of one line: the true one cannot be loaded twice."""
    made = []

    def compile_(library, compiler, folder, target):
        made.append(target)
        (folder / "small.cpp").write_text("int small;")
        toolchain.run([*compiler, "-shared", str(folder / "small.cpp"), "-o", str(target)], target)

    monkeypatch.setattr(extension, "_compile", compile_)
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "cache"))
    return made


def test_it_is_built_once(compiled):
    assert extension.build() == extension.build()
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "junk", [b"", b"junk", b"\x7fELF\x02\x01\x01" + bytes(57)], ids=["empty", "junk", "another"]
)
def test_one_that_does_not_load_is_built_again(compiled, junk):
    key = extension._key(extension.EXTENSION)
    cache.keep("extension", key, "_neuron.so", lambda target: target.write_bytes(junk))
    path = extension.build()
    assert len(compiled) == 1
    assert path.stat().st_size > 1000
    assert extension.build() == path
    assert len(compiled) == 1


def spoil_noexec(folder, stack):
    stack.enter_context(mounted(folder, "mode=755,noexec"))


def spoil_read_only(folder, stack):
    stack.enter_context(mounted(folder, "mode=755,size=1m"))
    remount(folder, "ro")


def spoil_full(folder, stack):
    stack.enter_context(mounted(folder, "mode=755,size=32k"))
    (folder / "big").write_bytes(bytes(20_000))


def spoil_foreign(folder, stack):
    folder.mkdir()
    os.chown(folder, ALICE, ALICE)


SPOILT = [
    (spoil_noexec, "is on a file system mounted noexec"),
    (spoil_read_only, r"cannot be (made|written) \(Read-only file system\)"),
    (spoil_full, "is on a full disk"),
    (spoil_foreign, "belongs to another user"),
]


@needs_root
@pytest.mark.parametrize(("spoil", "sentence"), SPOILT)
def test_without_a_cache_it_is_built_for_this_process(
    compiled, monkeypatch, caplog, spoil, sentence
):
    with open_folder() as parent, contextlib.ExitStack() as stack:
        monkeypatch.setenv("NEURON_STREAMS_CACHE", str(parent / "cache"))
        spoil(parent / "cache", stack)
        with pytest.raises(cache.CacheError, match=sentence) as failure:
            extension.build()
        path = extension._build_for_this_process(extension.EXTENSION, failure.value)
        assert toolchain.loads(path)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert not path.is_relative_to(parent)
        assert str(failure.value) in caplog.text


WORK = """
import neuron_streams as ns, torch
with ns.stream(ns.Stream()):
    there = torch.tensor([1.0, 2.0]).to("neuron", non_blocking=True)
print(there.cpu().tolist())
try:
    ns.compile(lambda x: x * 1.5 + 7, [torch.ones(3)])
except OSError as error:
    print(error)
from neuron_streams.doctor import examine
print(*examine().advice)
"""


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_cache_streams_work_and_compile_says_why(tmp_path):
    with mounted(tmp_path / "cache", "mode=755,noexec") as folder:
        environment = {**os.environ, "NEURON_STREAMS_CACHE": str(folder)}
        command = [sys.executable, "-c", WORK]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    values, refused, advice = done.stdout.splitlines()
    assert values == "[1.0, 2.0]"
    assert refused.startswith(f"{folder} is on a file system mounted noexec")
    assert refused in advice
