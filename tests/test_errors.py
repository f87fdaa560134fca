"""What calls that cannot be say: the type that torch.cuda raises, and words of our own."""

from __future__ import annotations

import pytest
import torch

import neuron_streams as ns
from neuron_streams.errors import AcceleratorError, ForeignError

NO_DEVICE = "^Expected a neuron device, but got: "
NO_INDEX = "^Expected a neuron device with a specified index or an integer, but got: "
ORDINAL = r"^invalid device ordinal: there is no neuron:9, the devices are neuron:0 to neuron:1$"
NO_STREAM = r"^a Neuron stream is expected, but got \w+; make one with neuron_streams.Stream\(\)$"
NO_EVENT = r"^a Neuron event is expected, but got \w+; make one with neuron_streams.Event\(\)$"
NO_INTEGER = "object cannot be interpreted as an integer"

# The types are those of torch/cuda/*.py and torch/csrc/cuda of 2.13.
CALLS = {
    # devices: torch.cuda._utils._get_device_index
    "device 9": (lambda: ns.device(9), AcceleratorError, ORDINAL),
    "set_device 9": (lambda: ns.set_device(9), AcceleratorError, ORDINAL),
    "set_device neuron:9": (lambda: ns.set_device("neuron:9"), AcceleratorError, ORDINAL),
    "synchronize 9": (lambda: ns.synchronize(9), AcceleratorError, ORDINAL),
    "current_stream 9": (lambda: ns.current_stream(9), AcceleratorError, ORDINAL),
    "default_stream 9": (lambda: ns.default_stream(9), AcceleratorError, ORDINAL),
    "Stream 9": (lambda: ns.Stream(9), AcceleratorError, ORDINAL),
    "memory_allocated 9": (lambda: ns.memory_allocated(9), AcceleratorError, ORDINAL),
    "device cuda:0": (lambda: ns.device("cuda:0"), ValueError, f"{NO_DEVICE}cuda:0$"),
    "device 1.5": (lambda: ns.device(1.5), ValueError, f"{NO_DEVICE}1.5$"),
    "device of nobody": (lambda: ns.device("bogus"), RuntimeError, "^Expected one of cpu, cuda"),
    "set_device cuda:0": (lambda: ns.set_device("cuda:0"), ValueError, f"{NO_DEVICE}cuda:0$"),
    "set_device None": (lambda: ns.set_device(None), ValueError, f"{NO_INDEX}None$"),
    "set_device neuron": (lambda: ns.set_device("neuron"), ValueError, f"{NO_INDEX}neuron$"),
    "synchronize cpu": (lambda: ns.synchronize("cpu"), ValueError, f"{NO_DEVICE}cpu$"),
    "current_stream cpu": (lambda: ns.current_stream("cpu"), ValueError, f"{NO_DEVICE}cpu$"),
    "Stream on cpu": (lambda: ns.Stream(device="cpu"), ValueError, f"{NO_DEVICE}cpu$"),
    "name of cpu": (lambda: ns.get_device_name("cpu"), ValueError, f"{NO_DEVICE}cpu$"),
    "properties 9": (
        lambda: ns.get_device_properties(9),
        AssertionError,
        "^Invalid device id: the",
    ),
    "capability 9": (
        lambda: ns.get_device_capability(9),
        AssertionError,
        "^Invalid device id: the",
    ),
    "peer 9": (lambda: ns.can_device_access_peer(0, 9), AssertionError, "^Invalid device id: the"),
    "peer -1": (lambda: ns.can_device_access_peer(-1, 0), AssertionError, "^Invalid device id: "),
    "device_of 3": (lambda: ns.device_of(3), AttributeError, "'int' object has no attribute"),
    # streams: torch/csrc/cuda/Stream.cpp parses i, L and K
    "Stream bogus": (
        lambda: ns.Stream(bogus=1),
        TypeError,
        r"^Stream\(\) got an unexpected keyword",
    ),
    "Stream -1.5": (lambda: ns.Stream(priority=-1.5), TypeError, NO_INTEGER),
    "Stream x": (lambda: ns.Stream(priority="x"), TypeError, NO_INTEGER),
    "Stream of 3": (lambda: ns.Stream(None, 0, 1), TypeError, "positional arguments but 4"),
    "Stream id x": (lambda: ns.Stream(stream_id="x", device_index=0), TypeError, NO_INTEGER),
    "ExternalStream x": (lambda: ns.ExternalStream("x"), TypeError, NO_INTEGER),
    "ExternalStream 1.5": (lambda: ns.ExternalStream(1.5), TypeError, NO_INTEGER),
    "ExternalStream bogus": (
        lambda: ns.ExternalStream(0, bogus=1),
        TypeError,
        "unexpected keyword",
    ),
    "external x": (lambda: ns.get_stream_from_external("x"), TypeError, NO_INTEGER),
    "stream 3": (lambda: ns.stream(3), ForeignError, NO_STREAM),
    "stream of nothing": (lambda: ns.stream(), TypeError, "missing 1 required"),
    "StreamContext 3": (lambda: ns.StreamContext(3), ForeignError, NO_STREAM),
    "set_stream 3": (lambda: ns.set_stream(3), ForeignError, NO_STREAM),
    "wait_stream 3": (lambda: ns.Stream().wait_stream(3), ForeignError, NO_STREAM),
    "wait_stream cpu": (
        lambda: ns.Stream().wait_stream(torch.Stream("cpu")),
        ForeignError,
        NO_STREAM,
    ),
    "wait_event 3": (lambda: ns.Stream().wait_event(3), ForeignError, NO_EVENT),
    "wait_event cpu": (lambda: ns.Stream().wait_event(torch.Event("cpu")), ForeignError, NO_EVENT),
    "record_event 3": (lambda: ns.Stream().record_event(3), ForeignError, NO_EVENT),
    "_sleep x": (lambda: ns._sleep("x"), TypeError, NO_INTEGER),
    "_sleep 1.5": (lambda: ns._sleep(1.5), TypeError, NO_INTEGER),
    # events
    "Event of 5": (lambda: ns.Event(1, 2, 0, 4, 5), TypeError, "positional arguments but 6"),
    "Event bogus": (lambda: ns.Event(bogus=1), TypeError, "unexpected keyword argument 'bogus'"),
    "record 3": (lambda: ns.Event().record(3), ForeignError, NO_STREAM),
    "record on cpu": (lambda: ns.Event().record(torch.Stream("cpu")), ForeignError, NO_STREAM),
    "wait 3": (lambda: ns.Event().wait(3), ForeignError, NO_STREAM),
    "elapsed_time 3": (lambda: ns.Event().elapsed_time(3), ForeignError, NO_EVENT),
    "elapsed_time of nothing": (lambda: ns.Event().elapsed_time(), TypeError, "missing 1 required"),
    # modes
    "mode loud": (
        lambda: ns.set_sync_debug_mode("loud"),
        RuntimeError,
        "^invalid value of debug_mo",
    ),
    "mode 3": (lambda: ns.set_sync_debug_mode(3), RuntimeError, "^invalid value of debug_mode"),
    "status 1": (lambda: ns.check_error(1), ns.CudaError, "^status 1"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_raises_the_type_of_torch_cuda(name):
    call, error, words = CALLS[name]
    with pytest.raises(error, match=words) as caught:
        call()
    assert type(caught.value) is error
    assert ns.current_device() == 0
    assert ns.current_stream() == ns.default_stream()


def test_what_is_foreign_is_what_torch_cuda_says_and_what_it_is():
    """torch.cuda asks it for its attributes; that its type is wrong is what a user should know."""
    assert issubclass(ForeignError, TypeError)
    assert issubclass(ForeignError, AttributeError)


def test_devices_as_torch_cuda_takes_them():
    ns.synchronize(ns.device(1))
    assert ns.current_stream(ns.device(1)) == ns.default_stream(1)
    assert ns.Stream(True).device_index == 1
    with ns.device("neuron:1"):
        assert ns.current_stream("neuron") == ns.default_stream(1)


def test_a_crowd_of_failures_is_told_in_short(caplog):
    with ns.testing.use_runtime(ns.testing.ManualRuntime(1)) as runtime:
        s = ns.Stream()
        with ns.stream(s):
            for _ in range(20):
                ns._sleep(0)
        runtime.close(0.0)
        with pytest.raises(ns.errors.CancelledError) as caught:
            s.synchronize()
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) in (0, 10), "none in Python 3.10"
    assert not notes or notes[-1] == "also failed: 11 more, see the log"
    assert caplog.text.count("also failed") == 19
