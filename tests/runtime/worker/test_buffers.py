"""Memory that C and Python share."""

from __future__ import annotations

import gc

import pytest
import torch

from neuron_streams._runtime.ledger import Ledger
from neuron_streams._runtime.port import Failure, Ticket
from neuron_streams._runtime.worker.buffers import NativeBuffer
from neuron_streams._runtime.worker.library import library, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no native worker: {why_not()}")


def buffer(nbytes=16):
    return NativeBuffer(0, nbytes, Ledger(), library())


def floats(made):
    return torch.empty(0).set_(made.storage, 0, (made.nbytes // 4,))


def test_there_is_no_memory_until_it_is_needed():
    made = buffer()
    assert made.storage is None
    assert list(made.words) == [0, 0, 16, 0]


def test_what_c_made_becomes_one_storage():
    made = buffer()
    made.fill(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    first = made.storage
    assert first is made.storage
    assert first.nbytes() == 16
    floats(made)[0] = 7.0
    assert floats(made).tolist() == [7.0, 2.0, 3.0, 4.0]


def test_what_python_made_is_what_c_sees():
    made, storage = buffer(), torch.arange(4.0).untyped_storage()
    made.storage = storage
    assert made.words[0] == storage.data_ptr()
    assert made.storage is storage


def test_memory_of_python_replaces_that_of_c():
    made = buffer()
    made.fill(torch.zeros(4))
    made.storage = torch.ones(4).untyped_storage()
    assert made.words[1] == 0
    assert floats(made).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(8.0)[::2],
        torch.nn.Parameter(torch.tensor([0.0, 2.0, 4.0, 6.0])),
        torch._neg_view(torch.tensor([0.0, -2.0, -4.0, -6.0])),
    ],
    ids=["strided", "parameter", "negated"],
)
def test_anything_can_be_filled_in(source):
    made = buffer()
    made.fill(source)
    assert floats(made).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_much_is_filled_in_as_little_is():
    source = torch.arange(1 << 18, dtype=torch.float32)
    made = buffer(source.nbytes)
    made.fill(source)
    assert torch.equal(floats(made), source)


def test_an_empty_buffer_can_be_filled():
    made = buffer(0)
    made.fill(torch.empty(0))
    assert made.nbytes == 0


def test_a_failure_counts_as_long_as_c_says_so():
    made, failure = buffer(), Failure(ValueError("x"), Ticket(1, 1), "step")
    made.failure = failure
    assert made.failure is failure
    assert made.words[3] == 1
    made.words[3] = 0  # what a command of C does that overwrites it
    assert made.failure is None
    made.failure = failure
    made.failure = None
    assert made.words[3] == 0


def test_memory_outlives_its_buffer_where_somebody_has_it():
    made = buffer()
    made.fill(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    kept = floats(made)
    del made
    gc.collect()
    assert kept.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_end_of_a_buffer_is_counted():
    ledger = Ledger()
    made = NativeBuffer(0, 16, ledger, library())
    assert ledger.read()[1].current == 16
    del made
    gc.collect()
    assert ledger.read()[1].current == 0
