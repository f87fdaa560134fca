"""torch's own view of devices and streams: the guard, torch.accelerator, and the current device."""

from __future__ import annotations

import threading

import pytest
import torch

import neuron_streams as ns
from neuron_streams.testing import Gate

HOST = torch.arange(3.0)
CALLS = {
    "to": lambda: HOST.to("neuron"),
    "to a device": lambda: HOST.to(torch.device("neuron")),
    "to(device=)": lambda: HOST.to(device="neuron"),
    "to and cast": lambda: HOST.to("neuron", torch.float64),
    "neuron": lambda: HOST.neuron(),
    "empty": lambda: torch.empty(3, device="neuron"),
    "empty_like": lambda: torch.empty_like(HOST, device="neuron"),
    "new_empty": lambda: HOST.new_empty((3,), device="neuron"),
    "tensor": lambda: torch.tensor([1.0], device="neuron"),
    "as_tensor": lambda: torch.as_tensor(HOST, device="neuron"),
    "asarray": lambda: torch.asarray(HOST, device="neuron"),
    "module": lambda: torch.nn.Linear(2, 2).to("neuron").weight,
    "zeros": lambda: torch.zeros(3, device="neuron"),
    "randn": lambda: torch.randn(3, device="neuron"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_names_no_index_goes_to_the_current_device(name):
    call = CALLS[name]
    assert call().get_device() == 0
    with ns.device(1):
        assert call().get_device() == 1
        with torch.inference_mode():
            assert call().get_device() == 1
        with ns.device(0):
            assert call().get_device() == 0
    with ns.stream(ns.Stream(device=1)):
        assert call().get_device() == 1
    with ns.Stream(device=1):
        assert call().get_device() == 1
    ns.set_device(1)
    assert call().get_device() == 1
    ns.set_stream(ns.default_stream(0))
    assert call().get_device() == 0


def test_an_index_is_heeded():
    with ns.device(1):
        assert HOST.to("neuron:0").device == torch.device("neuron:0")
        assert torch.tensor([1.0], device="neuron:0").device == torch.device("neuron:0")
        assert HOST.to("cpu") is HOST
        assert HOST.to(HOST) is HOST
        assert HOST.to(torch.float64).dtype == torch.float64


def test_a_device_tensor_without_an_index_stays_where_it_is():
    with ns.device(1):
        assert HOST.to("neuron:0").to("neuron").get_device() in (0, 1)


def test_other_threads_are_left_alone():
    seen = []
    with ns.device(1):
        thread = threading.Thread(target=lambda: seen.append(HOST.to("neuron").device))
        thread.start()
        thread.join()
    assert seen == [torch.device("neuron:0")]


def test_torchs_default_device_follows():
    torch.set_default_device("neuron")
    try:
        for index in (1, 0):
            ns.set_device(index)
            assert torch.get_default_device() == torch.device("neuron", index)
            for made in (torch.empty(2), torch.tensor([1.0]), torch.as_tensor([1.0])):
                assert made.get_device() == index
            assert torch.tensor([1.0], device="cpu").is_cpu
    finally:
        torch.set_default_device(None)


def test_dynamo_sees_through_it():
    with ns.device(1):
        step = torch.compile(lambda x: torch.sin(x) + x.to("cpu"), backend="eager", fullgraph=True)
        assert torch.equal(step(HOST), HOST.sin() + HOST)
        moves = torch.compile(lambda x: (x + 1).to("neuron"), backend="eager")
        assert moves(HOST).get_device() == 1


def test_compiling_on_another_device():
    with ns.device(1):
        double = ns.compile(lambda x: x * 2, (HOST,), target="exported")
        assert double(HOST.to("neuron")).device == torch.device("neuron:1")


def same(stream, other):
    """Whether a torch.Stream is a stream of ours."""
    ids = [(x.stream_id, x.device_index, x.device_type) for x in (stream, other)]
    return ids[0] == ids[1]


def test_streams_of_the_accelerator_are_ours():
    s, before = ns.Stream(device=1), ns.current_stream()
    assert same(torch.accelerator.current_stream(), before)
    torch.accelerator.set_stream(s)
    assert ns.current_stream() is s
    assert same(torch.accelerator.current_stream(), s)
    assert torch.accelerator.current_device_index() == ns.current_device() == 1
    assert same(torch.accelerator.current_stream("neuron:0"), before)
    torch.accelerator.set_stream(before)
    assert torch.accelerator.current_device_index() == 0
    with s:
        assert same(torch.accelerator.current_stream(), s)


def test_streams_and_events_of_torch_itself():
    s, event = torch.Stream("neuron:1"), torch.Event("neuron:1", enable_timing=True)
    with Gate(s), s:
        assert ns.current_stream().stream_id == s.stream_id
        x = torch.ones(2, device="neuron:1") + 1
        event.record(s)
        assert not s.query()
        assert not event.query()
    event.synchronize()
    assert x.tolist() == [2.0, 2.0]
    assert ns.current_stream() == ns.default_stream(0)


def test_devices_of_the_accelerator_are_ours():
    assert torch.accelerator.current_accelerator() == torch.device("neuron")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    with torch.accelerator.device_index(1):
        assert ns.current_device() == 1
        with torch.accelerator.device_index(None):
            assert ns.current_device() == 1
    torch.accelerator.set_device_index("neuron:1")
    assert ns.current_device() == 1
    torch.accelerator.set_device_index(0)


def test_the_accelerator_waits_for_a_device():
    s = ns.Stream()
    with ns.stream(s):
        ns._sleep(1_000_000)
        done = ns.current_stream().record_event()
    torch.accelerator.synchronize()
    assert done.query()
    with Gate(ns.default_stream(0)):
        torch.accelerator.synchronize(1)


def test_memory_of_the_accelerator_is_ours():
    torch.accelerator.reset_peak_memory_stats(1)
    before = torch.accelerator.memory_allocated(1)
    x = torch.empty(1000, dtype=torch.uint8, device="neuron:1")
    assert torch.accelerator.memory_allocated("neuron:1") == before + x.nbytes
    with ns.device(1):
        assert torch.accelerator.max_memory_allocated() == before + x.nbytes
        theirs, ours = torch.accelerator.memory_stats(), ns.memory_stats(1)
        assert {key: theirs[key] for key in ours if key in theirs} == {
            key: ours[key] for key in ours if key in theirs
        }
    assert torch.accelerator.memory_reserved(1) == torch.accelerator.max_memory_reserved(1)
    torch.accelerator.reset_accumulated_memory_stats(1)
    assert ns.memory_stats(1)["allocation.all.allocated"] == 0
    assert torch.accelerator.get_memory_info(1) == ns.mem_get_info(1)
    assert torch.accelerator.empty_cache() is None


def test_what_is_of_another_device_is_refused():
    for call in (torch.accelerator.current_stream, torch.accelerator.synchronize):
        with pytest.raises(ValueError, match="doesn't match the current accelerator"):
            call("cpu")
    for index in (2, 99):
        with pytest.raises(RuntimeError, match=f"invalid device ordinal: neuron:{index}"):
            torch.accelerator.set_device_index(index)
