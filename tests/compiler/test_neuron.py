"""NEFFs by a compiler in another process: what it is given, and that what it makes runs."""

from __future__ import annotations

import json

import pytest
import torch

import neuron_streams
from neuron_streams._compiler import neuron
from neuron_streams._runtime import cache
from neuron_streams.executables import Executable
from neuron_streams.testing import use_runtime
from tests.runtime.nrt.doubled import ABIS, DoubleRuntime
from tests.runtime.nrt.neuronx import NATIVE, NEITHER, XLA, environment


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Makes the Python of the compilers one that has such a package; gives what that was told."""
    shared, own = cache.cache_folder(), tmp_path / "cache"
    own.mkdir()
    for kind in (path.name for path in shared.iterdir() if path.name != "neff"):
        (own / kind).symlink_to(shared / kind, target_is_directory=True)
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(own))

    def have(package):
        for name, value in environment(tmp_path, package).items():
            monkeypatch.setenv(name, value)
        return tmp_path / "said.json"

    return have


class Step(torch.nn.Module):
    """Updates a cache in place, has a weight, and returns two results."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))

    def forward(self, x, cache, row):
        made = x @ self.weight
        cache[row.long()] = made
        return {"made": made, "sum": cache.sum(0)}


EXAMPLES = torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, dtype=torch.int32)


def check(step):
    cache = torch.zeros(3, 2).to("neuron")
    for row in range(3):
        made = step(torch.tensor([[1.0 + row, 1.0]]), cache, torch.tensor([row]).int())
        assert made["made"].tolist() == [[2.0 + 2 * row, 3.0]]
    assert made["sum"].tolist() == [12.0, 9.0]
    assert cache.tolist() == [[2.0, 3.0], [4.0, 3.0], [6.0, 3.0]]


def test_a_function_that_updates_in_place_runs_as_a_neff(python, tmp_path):
    said = python(XLA)
    for abi in ABIS:  # it is compiled once
        with use_runtime(DoubleRuntime(1, abi, reachable=False)) as runtime:
            runtime.double.set_family(2)
            step = neuron_streams.compile(Step(), EXAMPLES, mutates=["cache"], name="step")
            assert (step.target, step.mutates) == ("trn1", ("cache",))
            check(step)
            step.save(tmp_path / "step.zip")
            check(Executable.load(tmp_path / "step.zip"))
    told = {"args": ["--target", "trn1"], "cpu": True, "aliases": [2]}
    assert json.loads(said.read_text()) == told


def test_a_target_can_be_named_where_the_cpu_plays_the_device(python, tmp_path):
    said = python(XLA)
    made = neuron_streams.compile(lambda x: x + 1, [torch.zeros(2)], target="inf2", name="plus")
    assert made.target == "inf2"
    assert json.loads(said.read_text())["args"] == ["--target", "inf2"]
    python("raise RuntimeError('compiled again')")
    made = neuron_streams.compile(lambda y: y + 1, [torch.zeros(2)], target="inf2", name="plus")
    with pytest.raises(ValueError, match=r"^plus: the CPU cannot run the payload format 'neff'"):
        made(torch.zeros(2))


def test_weights_are_on_a_core_once_whatever_uses_them(python):
    python(XLA)
    model = Step()
    with use_runtime(DoubleRuntime(1, reachable=False)) as runtime:
        steps = [
            neuron_streams.compile(lambda x, f=f: f(x @ model.weight), [torch.zeros(1, 2)])
            for f in (torch.neg, torch.exp)
        ]
        before = runtime.double.count("allocated")
        for step in steps:
            step(torch.zeros(1, 2))
            neuron_streams.synchronize()  # so that the next call has its memory back
        assert runtime.double.count("allocated") == before + 3, "a weight, an input, an output"


def test_the_native_package_compiles_what_updates_nothing(python):
    python(NATIVE)
    with use_runtime(DoubleRuntime(1, reachable=False)):
        plus = neuron_streams.compile(lambda x, y: x - y, [torch.zeros(2), torch.zeros(2)])
        assert plus(torch.ones(2), torch.tensor([3.0, 4.0])).tolist() == [-2.0, -3.0]
        with pytest.raises(
            RuntimeError, match=r"^step: the native torch-neuronx does not say which"
        ):
            neuron_streams.compile(Step(), EXAMPLES, mutates=["cache"], name="step")


@pytest.mark.parametrize(
    ("package", "words"),
    [
        (None, r"^f: .* cannot import torch_neuronx .*NEURON_STREAMS_NEURONX_PYTHON"),
        (NEITHER, r"^f: torch_neuronx of .* has neither trace nor the device"),
        ("def trace(*_, **__): pass", r"^f: the compiler left 0 \.neff files"),
        (
            "def trace(*_, **__): raise MemoryError('no room')",
            r"(?s)^f: the Neuron compiler failed\. .*MemoryError: no room",
        ),
    ],
)
def test_what_is_missing_is_said(python, package, words):
    python(package)
    with pytest.raises(RuntimeError, match=words):
        neuron_streams.compile(lambda x: x + 1, [torch.zeros(2)], target="trn2", name="f")


def test_another_python_is_named_by_a_variable(python, monkeypatch, tmp_path):
    python(None)
    monkeypatch.setenv("NEURON_STREAMS_NEURONX_PYTHON", str(tmp_path / "python"))
    assert neuron.python() == str(tmp_path / "python")
    with pytest.raises(RuntimeError, match="python"):
        neuron_streams.compile(lambda x: x + 1, [torch.zeros(2)], target="trn2")


def test_what_is_there_is_described(python, tmp_path):
    python(None)
    assert neuron.described() is None
    info = tmp_path / "torch_neuronx-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 2.9.0\n")
    assert "torch-neuronx 2.9.0" in neuron.described()


def test_an_instance_of_no_known_family_says_so(python):
    python(XLA)
    with use_runtime(DoubleRuntime(1, reachable=False)) as runtime:
        runtime.double.set_family(1)
        with pytest.raises(RuntimeError, match="give compile a target="):
            neuron_streams.compile(lambda x: x + 1, [torch.zeros(2)])
