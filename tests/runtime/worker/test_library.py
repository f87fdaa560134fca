"""The C library: whether it can be had, and that C and Python mean the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from neuron_streams._runtime import lanes, native, toolchain
from neuron_streams._runtime.port import Unit
from neuron_streams._runtime.worker import library as module
from neuron_streams._runtime.worker import messages

needs_it = pytest.mark.skipif(
    module.why_not() is not None, reason=f"no native worker: {module.why_not()}"
)


@needs_it
def test_every_function_is_there_and_every_export_is_known():
    library = module.library()
    assert all(callable(getattr(library, name)) for name in (*module._QUICK, *module._SLOW))
    text = "".join(p.read_text() for p in Path(module.__file__).parent.glob("*.c"))
    exported = set(re.findall(r"NS_EXPORT [\w *]+?\bns_(\w+)\(", text))
    assert exported == {n.removesuffix("_slowly") for n in (*module._QUICK, *module._SLOW)}


def test_why_not_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_COMPILER", "none")
    assert module.why_not() == "there is no C compiler"
    monkeypatch.undo()
    monkeypatch.setitem(module._TORCH, "empty", "aoti_torch_of_the_future")
    if toolchain.c_compiler() is not None:
        assert module.why_not() == "the C ABI of this torch has no aoti_torch_of_the_future"


def test_both_sides_count_alike():
    header = Path(module.__file__).with_name("worker.h").read_text()
    assert f"NS_OUTSTANDING = {lanes.OUTSTANDING}," in header
    assert f"NS_MOST_THREADS {sum(unit.queues for unit in Unit)} " in header
    assert module.INTERVALS == 1 << 16
    assert "NS_INTERVALS = 1 << 16" in header
    kinds = re.search(r"enum \{ (NS_MARKER.*?) \}", header).group(1).split(", ")
    assert [getattr(messages, kind.removeprefix("NS_")) for kind in kinds] == list(range(6))
    assert f"NS_FULL = {native.FULL}, NS_CLOSED = {native.CLOSED}," in header
    queues = Path(module.__file__).with_name("lanes.c").read_text()
    assert f"{{{', '.join(str(unit.queues) for unit in Unit)}}}" in queues
