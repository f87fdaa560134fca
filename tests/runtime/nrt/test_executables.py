"""Executables on the nrt runtime: NEFFs of any origin, described by their users."""

from __future__ import annotations

import pytest
import torch

import neuron_streams
from neuron_streams.executables import Executable
from tests.runtime.nrt.doubled import neff, on_double


@pytest.fixture
def streams(make):
    make(reachable=False)
    return neuron_streams


def like(*size):
    return torch.empty(*size, device="meta")


@pytest.fixture
def update(tmp_path):
    """A file whose model adds one to x, in place if it is aliased so."""
    path = tmp_path / "update.neff"
    path.write_bytes(neff("increment", {"x": 2}, {"y": 2}))
    return path


def test_any_neff_runs_once_it_is_described(streams, tmp_path):
    path = tmp_path / "add.neff"
    path.write_bytes(neff("sum", {"a": 6, "b": 6}, {"y": 6}))
    add = Executable.load(
        path, inputs={"b": like(2, 3), "a": like(2, 3)}, outputs={"y": like(3, 2)}
    )
    assert (add.name, add.target) == ("add", "neuron")
    made = add(torch.ones(2, 3), torch.full((2, 3), 2.0).to("neuron"))
    assert made.shape == (3, 2)
    assert made.tolist() == [[3.0, 3.0]] * 3


def test_an_alias_is_one_tensor_in_both_sets(streams, update, tmp_path):
    plus = Executable.load(update, inputs={"x": like(2)}, aliases={"x": "y"})
    assert plus.mutates == ("x",)
    x = torch.tensor([1.0, 2.0]).to("neuron")
    for _ in range(3):
        assert plus(x) == ()
    assert x.tolist() == [4.0, 5.0]
    with pytest.raises(ValueError, match="is updated in place, so it must be on the device"):
        plus(torch.ones(2))
    plus.save(tmp_path / "plus.zip")
    Executable.load(tmp_path / "plus.zip")(x)
    assert x.tolist() == [5.0, 6.0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"inputs": {"z": like(2)}, "outputs": {"y": like(2)}}, r"the NEFF has the inputs \['x'\]"),
        (
            {"inputs": {"x": like(2)}, "outputs": {"z": like(2)}},
            r"the NEFF has the outputs \['y'\]",
        ),
        ({"inputs": {"x": like(3)}, "outputs": {"y": like(2)}}, "'x' of the NEFF has 8 bytes, and"),
        (
            {"inputs": {"x": like(2).double()}, "outputs": {"y": like(2)}},
            "has 8 bytes, and one of 16 was described",
        ),
    ],
)
def test_a_description_is_held_against_the_file(streams, update, how, words):
    plus = Executable.load(update, **how)
    given = next(iter(how["inputs"].values()))
    with pytest.raises(ValueError, match=f"^update: .*{words}"):
        plus(torch.empty(given.shape, dtype=given.dtype))


def test_a_description_that_is_none_is_refused(update):
    with pytest.raises(ValueError, match=r"^update: aliases name \['z'\], and the inputs are"):
        Executable.load(update, inputs={"x": like(2)}, aliases={"z": "y"})
    with pytest.raises(ValueError, match=r"^update: 'x' is described by tuple. Give a tensor like"):
        Executable.load(update, inputs={"x": (2,)})
    with pytest.raises(ValueError, match="is not an executable, or is cut short"):
        Executable.load(update)


def test_outputs_that_nobody_reads_fill_no_queue(make):
    """Warm-ups and chunks of prompts leave results that no one asks for."""
    runtime = make(reachable=False, in_flight=2)
    runtime.double.set_depth(2)
    plus = on_double(neuron_streams.compile(lambda x: x + 1, [torch.zeros(2)], target="cpu"))
    x = torch.zeros(2).to("neuron")
    before, allocated = neuron_streams.memory_allocated(), []
    for _ in range(2):
        with runtime.double.held(runtime.double.compute):
            for _ in range(200):
                last = plus(x)
        assert last.tolist() == [1.0, 1.0]
        del last
        neuron_streams.synchronize()
        allocated.append(runtime.double.count("allocated"))
    assert runtime.statistics.scheduled >= 400
    assert neuron_streams.memory_allocated() == before
    assert allocated[0] == allocated[1], "what was retired is used again"
