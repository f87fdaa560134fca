"""The machine of streams and events on the double of libnrt: small queues, jitter, refusals."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.property.test_streams_machine import NativeMachine
from tests.runtime.nrt.doubled import ABIS, unsteady


def on_the_double(version):
    """The machine for an ABI. What the double holds against the runtime fails its `close`."""

    class DoubledMachine(NativeMachine):
        def runtime_for(self, seed):
            return unsteady(version, seed)

    case = DoubledMachine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    return case


Test228, Test229, Test230 = map(on_the_double, ABIS)
pytestmark = pytest.mark.timeout(110)
