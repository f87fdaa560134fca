"""C, C++ and Python mean the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from neuron_streams._context import core
from neuron_streams._runtime import lanes, worker
from neuron_streams._runtime.port import Kind, Unit
from tests.runtime.commands import call, view_of

HEADER = (Path(worker.__file__).parent / "worker.h").read_text()
LANES = (Path(worker.__file__).parent / "lanes.c").read_text()


def test_units_and_queues():
    assert f"NS_OUTSTANDING = {lanes.OUTSTANDING}," in HEADER
    assert f"NS_MOST_THREADS {sum(unit.queues for unit in Unit)} " in HEADER
    assert f"{{{', '.join(str(unit.queues) for unit in Unit)}}}" in LANES
    units = re.search(r"enum \{ (NS_COMPUTE.*?), NS_UNITS \}", HEADER).group(1).split(", ")
    assert units == [f"NS_{unit.name}" for unit in Unit]


def test_kinds():
    view = view_of(core().buffer_of(torch.empty(2, device="neuron")))
    made = {
        Kind.MARKER: core().Marker(),
        Kind.PLEDGE: core().Pledge(),
        Kind.SLEEP: core().Sleep(0.0),
        Kind.COPY: core().Copy(view, view),
        Kind.EXECUTE: call(),
    }
    assert {kind: command.kind for kind, command in made.items()} == {k: k.value for k in made}
    assert {command.unit for command in made.values()} == {Unit.COMPUTE, Unit.TENSOR_OP}
