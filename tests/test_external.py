"""Ids and handles of streams."""

from __future__ import annotations

import gc

import pytest

import neuron_streams as ns


def test_a_stream_is_rebuilt_from_its_ids():
    s = ns.Stream(device=1, priority=-2)
    again = ns.Stream(stream_id=s.stream_id, device_index=1, device_type=s.device_type)
    assert again == s
    assert again is not s
    assert again.priority == -2
    ns._set_stream_by_id(s.stream_id, s.device_index, s.device_type)
    assert ns.current_stream() == s
    assert ns.current_device() == 1


def test_ids_of_the_dead_and_of_others_are_refused():
    s = ns.Stream()
    number, kind = s.stream_id, s.device_type
    del s
    gc.collect()
    ns.Stream()  # lets go of streams without an object and without work
    with pytest.raises(RuntimeError, match="there is no such stream"):
        ns.Stream(stream_id=number, device_index=0, device_type=kind)
    with pytest.raises(ValueError, match="not a Neuron stream"):
        ns.Stream(stream_id=1, device_index=0, device_type=1)


def test_handles():
    s = ns.Stream(device=1)
    external = ns.get_stream_from_external(s.native_handle, 1)
    assert external.native_handle == s.native_handle
    assert external.stream_id == s.native_handle, "an external stream's id is its handle"
    assert hash(external) == hash(s)
    assert external != s
    assert ns.ExternalStream(s.native_handle, device=1) == external
    for device in range(2):
        assert ns.ExternalStream(0, device) == ns.default_stream(device)


@pytest.mark.parametrize("handle", [1, 3, 1 << 40])
def test_handles_of_nothing_are_refused(handle):
    with pytest.raises(RuntimeError, match=r"^ExternalStream\(0x\w+\): there is no such lane"):
        ns.ExternalStream(handle)
    with pytest.raises(RuntimeError, match="there is no such lane"):
        ns.ExternalStream(ns.Stream(device=1).native_handle, device=0)


def test_an_external_stream_keeps_the_lane_that_is_ours():
    s = ns.Stream()
    external = ns.ExternalStream(s.native_handle)
    del s
    gc.collect()
    with ns.stream(external):
        ns._sleep(0)
    external.synchronize()
    assert "ExternalStream" in repr(external)
