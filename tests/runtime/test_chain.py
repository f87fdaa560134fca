"""Programs that run: compiled ones."""

import dataclasses
import gc
import threading
import weakref

import pytest
import torch

from neuron_streams import compile  # noqa: A004
from neuron_streams._compiler.build import build
from neuron_streams._runtime.chain import ProgramHandle
from tests.compiler.compiled import deep, model, needs_cxx, pair
from tests.compiler.plans import deep_inputs

pytestmark = needs_cxx


def load(executable):
    return ProgramHandle(executable._payload.content)


def check_deep(handle):
    theirs, ours = deep_inputs(), deep_inputs()
    for _ in range(2):
        expected, (got,) = model()(*theirs), handle.run(ours)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(ours[2], theirs[2])


def test_a_chain_gives_the_results_of_eager_and_updates_in_place():
    check_deep(load(deep()))


def test_windows_start_where_the_input_does():
    handle, (x, rows, kv) = load(deep()), deep_inputs()
    room = torch.zeros(3, *kv.shape)
    room[1] = kv
    (inside,), (alone,) = handle.run([x, rows, room[1]]), handle.run([x, rows, kv])
    assert torch.equal(inside, alone)
    assert torch.equal(room[1], kv)
    assert not room[::2].any()


def test_outputs_are_fresh():
    handle = load(pair())
    x, y = torch.ones(2, 3), torch.arange(3.0)
    first = handle.run([x, y])
    kept = [output.clone() for output in first]
    second = handle.run([x * 5, y])
    assert all(map(torch.equal, first, kept))
    assert len({output.data_ptr() for output in (*first, *second)}) == 4


def test_a_failing_step_says_why_and_leaves_the_handle_usable():
    def pick(x, index):
        return x[index.long()] * 1

    handle = load(compile(pick, [torch.ones(4), torch.zeros(2, dtype=torch.int32)]))
    with pytest.raises(RuntimeError, match=r"^pick: index out of bounds"):
        handle.run([torch.ones(4), torch.tensor([0, 9], dtype=torch.int32)])
    (got,) = handle.run([torch.arange(4.0), torch.tensor([3, 1], dtype=torch.int32)])
    assert got.tolist() == [3, 1]


def test_a_library_that_is_gone_is_missed_with_a_sentence(monkeypatch, tmp_path):
    program = pair()._payload.content
    lost = dataclasses.replace(program.libraries[0], path=tmp_path / "gone.so")
    with pytest.raises(RuntimeError, match="has gone from the cache"):
        ProgramHandle(dataclasses.replace(program, libraries=(lost,)))


class Memory(bytearray):
    """Bytes that can be watched."""


def add_in_memory(memory):
    weight = torch.frombuffer(memory, dtype=torch.float32)
    _, payload = build(lambda x: x + weight, [torch.ones(3)], (), "held", "cpu")
    return ProgramHandle(payload.content)


def test_weights_are_held_and_let_go():
    memory = Memory(torch.arange(3.0).numpy().tobytes())
    watched = weakref.ref(memory)
    handle = add_in_memory(memory)
    del memory
    gc.collect()
    assert handle.run([torch.ones(3)])[0].tolist() == [1, 2, 3]
    del handle
    gc.collect()
    assert watched() is None


def test_python_goes_on_while_a_program_runs():
    handle = load(compile(lambda x: x @ x, [torch.zeros(1024, 1024)], name="square"))
    count, marks = 0, []

    def work():
        with torch.inference_mode():
            marks.append(count)
            handle.run([torch.zeros(1024, 1024)])
            marks.append(count)

    thread = threading.Thread(target=work)
    thread.start()
    while len(marks) < 2:
        count += 1
    thread.join()
    assert marks[1] - marks[0] > 100
