"""Commands as words: what C runs, and what it leaves to Python."""

from __future__ import annotations

import struct

import pytest
import torch

from neuron_streams._runtime.ledger import Ledger
from neuron_streams._runtime.port import (
    Buffer,
    Copy,
    Execute,
    Marker,
    Operator,
    Pledge,
    Sleep,
    Ticket,
    Unit,
    View,
)
from neuron_streams._runtime.worker.buffers import NativeBuffer
from neuron_streams._runtime.worker.library import library, why_not
from neuron_streams._runtime.worker.messages import Messages, may_need_python

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no native worker: {why_not()}")

MARKER, PLEDGE, SLEEP, COPY, EXECUTE, PYTHON = range(6)


def words(command, key=5, after=()):
    message = Messages().write(command, key, after)
    return list(struct.unpack(f"={len(message) // 8}q", message))


def view(n=4, offset=0, dtype=torch.float32, buffer=None):
    made = buffer or NativeBuffer(0, (n + offset) * dtype.itemsize, Ledger(), library())
    return View(made, dtype, (n,), (1,), offset)


class Program:
    name = "program"
    address = 4096

    def run(self, inputs):
        return []


class Foreign(Program):
    address = None


def test_the_header_has_kind_unit_flags_key_name_and_tickets():
    sleep = Sleep(2e-6, unit=Unit.COLLECTIVES)
    assert words(sleep, 9, [Ticket(3, 4), Ticket(5, 6)]) == [SLEEP, 2, 0, 9, 0, 2, 3, 4, 5, 6, 2000]


def test_names_are_numbered_once():
    messages = Messages()
    for name in ("a", "b", "a"):
        messages.write(Marker(name=name), 1, ())
    assert messages.names == {"a": 0, "b": 1}


def test_markers_say_where_the_moment_goes():
    timed = Marker(timed=True)
    assert words(timed)[6] == timed.cell.buffer_info()[0]
    assert words(Marker())[6] == 0
    assert words(Pledge())[0] == PLEDGE


def test_an_execute_names_its_program_and_its_buffers():
    a, b = view(), view(offset=3)
    out = NativeBuffer(0, 16, Ledger(), library())
    command = Execute(Program(), (a, b), (out,))
    found = words(command)
    assert found[0] == EXECUTE
    assert found[2] == 4, "an offset follows"
    assert found[6:] == [4096, 2, 1, a.buffer.address, b.buffer.address, out.address, 0, 12]
    plain = words(Execute(Program(), (a,), (out,)))
    assert (plain[2], plain[6:]) == (0, [4096, 1, 1, a.buffer.address, out.address])


@pytest.mark.parametrize(
    "command",
    [
        Execute(Foreign(), (), ()),
        Execute(Program(), (view(buffer=Buffer(0, 16)),), ()),
        Execute(Program(), (), (Buffer(0, 16),)),
        Copy(torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        Copy(torch.zeros(4), torch.zeros(1)),
        Copy(torch.zeros(8)[::2], torch.zeros(4)),
        Copy(torch._neg_view(torch.zeros(4)), torch.zeros(4)),
        Copy(torch.nn.Parameter(torch.zeros(4)), torch.zeros(4)),
        Copy(view(buffer=Buffer(0, 16)), torch.zeros(4)),
        Operator(torch.ops.aten.neg.default, (), {}, ()),
    ],
)
def test_what_c_cannot_run_goes_to_python(command):
    assert words(command)[0] == PYTHON
    assert len(words(command)) == 6
    assert may_need_python(command)


def test_a_plain_copy_is_bytes():
    source, target = view(offset=2), torch.zeros(4)
    found = words(Copy(source, target))
    assert found[:3] == [COPY, 1, 1], "a small one is quick"
    assert found[6:] == [source.buffer.address, 8, 0, target.data_ptr(), 16]


def test_a_copy_says_whether_it_is_small_and_overwrites_all():
    small, large = view(), view(1 << 16)
    part = View(small.buffer, torch.float32, (2,), (1,))
    assert words(Copy(torch.zeros(4), small))[2] == 1 | 2
    assert words(Copy(torch.zeros(2), part))[2] == 1
    assert words(Copy(torch.zeros(1 << 16), large))[2] == 2


@pytest.mark.parametrize(
    ("size", "stride", "plain"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((1, 3), (99, 1), True),
        ((2, 0), (5, 7), True),
        ((), (), True),
        ((3,), (0,), False),
    ],
)
def test_plain_is_one_element_behind_the_other(size, stride, plain):
    source = View(NativeBuffer(0, 64, Ledger(), library()), torch.float32, size, stride)
    assert (words(Copy(source, torch.zeros(size)))[0] == COPY) is plain


def test_completed_by_the_runtime_means_no_python():
    assert not any(map(may_need_python, (Marker(), Pledge(), Sleep(0.0))))
