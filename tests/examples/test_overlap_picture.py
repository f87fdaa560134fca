"""The picture of what overlaps, drawn small."""

from __future__ import annotations

import json
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import neuron_streams
from examples import overlap_picture
from models.busy import BusyModel
from neuron_streams.decode import StepTrace
from neuron_streams.decode.trace import ROWS


def test_it_draws_ten_steps_of_sync_above_async(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = partial(BusyModel, compile=partial(neuron_streams.compile, target="exported"))
    drawn: dict[str, StepTrace] = {}
    draw = overlap_picture.draw
    monkeypatch.setattr(overlap_picture, "BusyModel", model)
    monkeypatch.setattr(
        overlap_picture, "draw", lambda traces, path: (drawn.update(traces), draw(traces, path))
    )
    out = tmp_path / "new"
    options = ["--device-ms", "1", "--host-ms", "0.5", "--out", str(out)]
    assert overlap_picture.main(options) == 0

    png = (out / "overlap.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) > (1000, 500)
    assert len(png) < 100_000
    assert "asynchronous" in capsys.readouterr().out

    assert list(drawn) == ["synchronous", "asynchronous"]
    for path, trace in zip(("sync", "async"), drawn.values(), strict=True):
        assert [(r.kind, r.path) for r in trace.records] == [("decode", path)] * 10
        assert all(len(record.spans) == 6 for record in trace.records)
    check_chrome_trace(json.loads((out / "overlap.json").read_text())["traceEvents"])


def check_chrome_trace(events: list[dict[str, Any]]) -> None:
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"].startswith("process_s")}
    names = {e["args"]["name"]: order[e["pid"]] for e in events if e["name"] == "process_name"}
    assert names["synchronous"] < names["asynchronous"]
    device = ROWS.index("device")
    steps = [e["pid"] for e in events if e["ph"] == "X" and e["tid"] == device]
    assert sorted(steps) == sorted([*order] * 10)


def test_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert overlap_picture.main([]) == 1
    said = capsys.readouterr().err
    assert said.startswith("overlap_picture: matplotlib is not installed; run: pip install -e")
