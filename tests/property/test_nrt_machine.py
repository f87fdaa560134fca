"""The machine of streams and events on the double of libnrt: small queues, jitter, refusals."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings

from neuron_streams._runtime.nrt.status import Status
from tests.property.test_streams_machine import NativeMachine
from tests.runtime.nrt.doubled import ABIS, DoubleRuntime


def on_the_double(version):
    """The machine for an ABI. What the double holds against the runtime fails its `close`."""

    class DoubledMachine(NativeMachine):
        def runtime_for(self, seed):
            drawn = random.Random(seed)
            runtime = DoubleRuntime(2, version, in_flight=drawn.randint(1, 5))
            double = runtime.double
            double.set_depth(drawn.randint(1, 4))
            double.set_latency(0, drawn.choice([0, 100_000, 1_000_000]))
            for device in range(2):
                for unit in {double.read, double.write, double.copy, double.compute}:
                    double.refuse(device, unit, 0, drawn.randint(0, 3), Status.QUEUE_FULL)
            return runtime

    case = DoubledMachine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    return case


Test228, Test229, Test230 = map(on_the_double, ABIS)
pytestmark = pytest.mark.timeout(110)
