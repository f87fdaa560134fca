"""NEFFs: loaded, their tensors by name, aliases, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from neuron_streams._context import core
from neuron_streams._runtime.nrt.model import Neff
from neuron_streams._runtime.nrt.status import NrtError
from neuron_streams._runtime.port import Payload
from tests.runtime.nrt.conftest import Kernels, floats, read, view_of
from tests.runtime.nrt.doubled import payload


def test_tensors_come_in_the_order_of_the_file(runtime):
    model = runtime.load(payload("sum", {"a": 2, "b": 2}, {"y": 2}), 0)
    assert [slot.name for slot in (*model.inputs, *model.outputs)] == [b"a", b"b", b"y"]
    assert {slot.nbytes for slot in model.inputs} == {8}


def test_or_in_that_of_their_names(runtime):
    named = payload(
        "copy", {"a": 2, "b": 2}, {"p": 2, "q": 2}, inputs=["b", "a"], outputs=["q", "p"]
    )
    model = runtime.load(named, 0)
    x, y, p, q = (
        floats(runtime, 1.0, 1.0),
        floats(runtime, 2.0, 2.0),
        *(view_of(runtime, 2) for _ in range(2)),
    )
    lane = runtime.open_lane(0)
    runtime.submit(lane, core().Execute(model, [x, y], [q, p]))
    assert read(runtime, lane, q) == [1.0, 1.0], "q is a copy of b, which was given first"
    assert read(runtime, lane, p) == [2.0, 2.0]


def test_an_alias_is_one_tensor_in_both_sets(runtime):
    lane, kernels = runtime.open_lane(0), Kernels(runtime)
    cache = floats(runtime, 1.0, 2.0)
    for _ in range(3):
        kernels.update_in_place(lane, cache)
    assert read(runtime, lane, cache) == [4.0, 5.0]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"inputs": ["x", "z"]}, "the NEFF has the inputs ['x']"),
        ({"inputs": []}, "the NEFF has the inputs ['x']"),
        ({"outputs": ["x"]}, "the NEFF has the outputs ['y']"),
        ({"outputs": ["y", "y"]}, "name each of them once"),
        ({"aliases": {0: "z"}}, "['z'] were named"),
        ({"aliases": {1: "y"}}, "output 'y' cannot be an alias of input 1"),
    ],
)
def test_names_that_do_not_fit_are_refused_and_the_model_unloaded(runtime, names, words):
    with pytest.raises(ValueError, match="^increment: ") as caught:
        runtime.load(payload("increment", {"x": 2}, {"y": 2}, **names), 0)
    assert words in str(caught.value)


def test_what_is_no_neff_says_so(runtime):
    nonsense = Payload("neff", "toy", Neff(b"\x7fELF"))
    with pytest.raises(NrtError, match=r"^nrt_load \(toy\): NRT_UNSUPPORTED_NEFF_VERSION"):
        runtime.load(nonsense, 0)
    with pytest.raises(ValueError, match="^toy: neuron:1 runs NEFFs, not the payload format 'prog"):
        runtime.load(Payload("program", "toy", None), 1)


def test_it_does_not_run_on_the_host(runtime):
    model = runtime.load(Payload("neff", "toy", payload("copy", {"x": 2}, {"y": 2}).content), 0)
    with pytest.raises(TypeError, match="^toy: a NEFF runs on the device"):
        model.run([torch.zeros(2)])
