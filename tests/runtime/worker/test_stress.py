"""worker_stress.c, built with the sanitizers and run: they and the program itself find nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from neuron_streams._runtime import toolchain

SOURCES = Path(toolchain.__file__).with_name("worker")
STRESS = Path(__file__).parents[1] / "worker_stress.c"
COMMANDS = os.environ.get("NEURON_STREAMS_STRESS", "40000")  # a million before a release
SANITIZERS = ["thread", "address,undefined"]


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request, tmp_path_factory):
    compiler = toolchain.c_compiler()
    if compiler is None:
        pytest.skip("no C compiler here")
    path = tmp_path_factory.mktemp("stress") / "stress"
    flags = ["-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}"]
    sources = [str(STRESS), *map(str, sorted(SOURCES.glob("*.c")))]
    command = [*compiler, *flags, f"-fsanitize={request.param}", *sources, "-o", str(path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr:
        pytest.skip(f"no sanitizer library for {request.param}")
    assert built.returncode == 0, built.stderr
    return path


@pytest.mark.parametrize("arguments", [[], ["cancel"]], ids=["to the end", "cancelled"])
def test_many_threads_at_once(program, arguments):
    done = subprocess.run(
        [program, COMMANDS, *arguments],
        capture_output=True,
        text=True,
        timeout=110 if COMMANDS == "40000" else 3600,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == ""
    assert "lanes closed" in done.stdout
