"""The device that these tests are about; "cpu" runs them without one, to test the tests."""

import contextlib

import torch

import neuron_streams
from neuron_streams.testing import Gate

DEVICE = "neuron"


def synchronize():
    if DEVICE != "cpu":
        neuron_streams.synchronize()


def drain():
    """Wait, and drop the failure of a command that a test before has left behind."""
    with contextlib.suppress(Exception):
        synchronize()


def gate():
    """A Gate on the current stream of the device."""
    return contextlib.nullcontext() if DEVICE == "cpu" else Gate()


def is_here(tensor):
    return tensor.device == torch.device(DEVICE, None if DEVICE == "cpu" else 0)
