"""Devices: which is current, and what they are like."""

from __future__ import annotations

import threading

import pytest
import torch

import neuron_streams as ns


def test_the_current_device_belongs_to_the_thread():
    ns.set_device(1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(ns.current_device()))
    thread.start()
    thread.join()
    assert (ns.current_device(), seen) == (1, [0])
    assert ns.current_stream() == ns.default_stream(1)


def test_contexts_may_be_entered_again():
    one = ns.device(1)
    with one:
        with one:
            assert ns.current_device() == 1
        assert ns.current_device() == 1
    assert ns.current_device() == 0
    with pytest.raises(KeyError), ns.device("neuron:1"):
        raise KeyError
    assert ns.current_device() == 0
    with pytest.raises(TypeError, match="not callable"):
        one(lambda: None)


def test_the_device_of_a_tensor():
    x = torch.zeros(2).to("neuron:1")
    with ns.device_of(x):
        assert ns.current_device() == 1
        with ns.device_of(torch.zeros(2)):
            assert ns.current_device() == 1
    assert ns.current_device() == 0


def test_what_dynamo_uses():
    assert ns._exchange_device(1) == 0
    assert ns._maybe_exchange_device(0) == 1
    assert ns._exchange_device(-1) == -1
    with ns._DeviceGuard(1):
        assert ns.current_device() == 1
    assert ns.current_device() == 0


@pytest.mark.parametrize("wrong", [2, 99, "neuron:7"])
def test_devices_that_are_not_there(wrong):
    with pytest.raises(RuntimeError, match="^invalid device ordinal: there is no neuron:"):
        ns.set_device(wrong)


def test_peers_and_properties():
    assert ns.can_device_access_peer(0, 1)
    assert not ns.can_device_access_peer(1, 1)
    assert ns.get_device_name(1) == ns.get_device_properties("neuron:1").name
    assert ns.get_device_properties().total_memory > 0
    assert ns.is_bf16_supported()


def test_set_device_leaves_streams_of_devices_alone():
    s = ns.Stream(device=1)
    ns.set_stream(s)
    ns.set_device(0)
    assert ns.current_stream() == ns.default_stream(0)
    assert ns.current_stream(1) == s
    ns.set_device(1)
    assert ns.current_stream() == s
