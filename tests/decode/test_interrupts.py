"""After an interrupt at any bytecode the loop goes on with nothing lost, or has ended and says so.

Here a sample of the bytecodes, another one in each run; `python -m tests.decode.interrupts` tries
each, and so does this where INTERRUPTS=all.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.decode.interrupts import Interrupt, cases, try_all

SAMPLE = None if os.environ.get("INTERRUPTS") == "all" else 12
CASES = dict(cases())


@pytest.mark.timeout(0 if SAMPLE is None else 120)
@pytest.mark.parametrize("once", CASES.values(), ids=CASES)
def test_an_interrupt_at_any_bytecode_loses_nothing(once: Callable[[int], Interrupt]) -> None:
    assert try_all(once, SAMPLE)
