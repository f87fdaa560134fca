"""torch.profiler sees the device's operators, and nvtx ranges are accepted."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import neuron_streams
from tests.torch_backend.device import DEVICE


def test_the_operators_of_the_host_side_are_seen():
    x = torch.ones(8, 8, device=DEVICE)
    with profile(activities=[ProfilerActivity.CPU]) as prof, record_function("mine"):
        y = (x @ x).sum()
    assert y.item() == 512
    names = {event.key for event in prof.key_averages()}
    assert {"aten::mm", "aten::sum", "mine"} <= names
    assert "aten::mm" in prof.key_averages().table(row_limit=5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the device's own activity")
def test_all_that_is_supported_can_be_asked_for(tmp_path):
    x = torch.ones(4, device=DEVICE)
    with profile(activities=torch.profiler.supported_activities(), record_shapes=True) as prof:
        (x + 1).tolist()
        prof.step()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    assert (tmp_path / "trace.json").stat().st_size > 100


@pytest.mark.skipif(DEVICE == "cpu", reason="ranges of the device's module")
def test_ranges():
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with neuron_streams.nvtx.range("step"):
            torch.ones(2, device=DEVICE)
        neuron_streams.nvtx.range_push("inner")
        neuron_streams.nvtx.mark("here")
        neuron_streams.nvtx.range_pop()
    assert {"step", "inner"} <= {event.key for event in prof.key_averages()}
