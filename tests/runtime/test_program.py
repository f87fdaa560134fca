import ctypes
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from neuron_streams._runtime.port import Payload
from neuron_streams._runtime.program import (
    Layout,
    Library,
    Program,
    Run,
    Slice,
    contiguous,
    load_on_cpu,
    words,
)

VECTOR = Layout(torch.float32, (3,), (1,))
LIBRARY = Library(Path("none.so"), (VECTOR,))


def program(steps, results, weights=()):
    return Program("test", (VECTOR,), tuple(weights), (LIBRARY,), tuple(steps), results)


def flat(made):
    return [list(piece) for piece in words(made)]


def test_a_value_moves_into_its_last_run():
    made = program([Run(0, (0,), (1,)), Run(0, (1,), (2,))], (2,))
    run = [0, 0, 1, ~0, 1], [1, 1, 3, 1]
    assert flat(made) == [*run, [0, 0, 1, ~1, 1], [2, 1, 3, 1]]


def test_a_value_used_twice_by_its_last_run_is_dropped_behind_it():
    assert flat(program([Run(0, (0, 0), (1,))], (1,)))[-1] == [2, 0]


def test_weights_and_results_stay():
    made = program([Run(0, (1, 0), (2,)), Run(0, (1, 2), (3,))], (2, 3), [torch.ones(3)])
    runs = [piece for piece in flat(made) if piece[0] == 0 and len(piece) > 4]
    assert runs == [[0, 0, 2, 1, ~0, 1], [0, 0, 2, 1, 2, 1]]


def test_the_base_of_a_window_is_dropped_and_what_nobody_takes():
    made = program([Slice(0, 1, (2,), (1,), 1), Run(0, (1,), (2,)), Run(0, (), (3,))], (2,))
    assert flat(made) == [
        [1, 0, 1, 1, 2, 1],
        [1],
        [2, 0],
        [0, 0, 1, ~1, 1],
        [2, 1, 3, 1],
        [0, 0, 0, 1],
        [3, 1, 3, 1],
        [2, 3],
    ]


@given(st.lists(st.integers(0, 4), max_size=4))
def test_contiguous_is_what_torch_says(size):
    assert contiguous(size) == torch.empty(size).stride()


def test_a_foreign_payload_is_refused():
    with pytest.raises(ValueError, match=r"^step: the CPU cannot run the payload format 'neff'"):
        load_on_cpu(Payload("neff", "step", b""), 0)


def test_words_fit_what_c_reads():
    made = [word for piece in flat(program([Run(0, (0,), (1,))], (1,))) for word in piece]
    assert list((ctypes.c_int64 * len(made))(*made)) == made
