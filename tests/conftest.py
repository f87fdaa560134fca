"""What every test shares: one thread per kernel, and no runtime left over from another test."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

import neuron_streams
from neuron_streams._context import replace

torch.set_num_threads(1)
settings.register_profile(
    "ci", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ci")


@pytest.fixture(autouse=True, scope="session")
def _known_device():
    """The first use of anything makes "neuron" a device: tests may come in any order."""
    neuron_streams.init()
    made = replace(None)
    if made is not None:
        made.close(5.0)


@pytest.fixture(autouse=True)
def _fresh_runtime():
    """Each test starts its own runtime at first use; it is closed behind the test."""
    before = replace(None)
    yield
    made = replace(None)
    if made is not None:
        made.close(5.0)
    replace(before)


# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
