"""CUDA programs, ported by text alone, print what they print on the CPU, digit for digit."""

import importlib.util

import pytest

from tests.programs.porting import CUDA, NEURON, finish, port, start

NEEDS = {"timm_loader": "timm", "accelerate_offload": "accelerate"}
PROGRAMS = sorted(path.stem for path in CUDA.glob("*.py"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_stands(name, tmp_path):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    places = tmp_path / "host", tmp_path / "neuron"
    for place in places:
        place.mkdir()
    host, ours = (start(name, r, p) for r, p in zip(("HOST", "NEURON"), places, strict=True))
    printed = finish(ours, 240), finish(host, 240)
    assert printed[0] == printed[1]
    assert printed[0].strip(), "a program that prints nothing compares nothing"


def test_the_port_is_a_matter_of_text():
    text = 'import torch\n\ns = torch.cuda.Stream()\nx = y.cuda(0)\nd = f"cuda:{rank}"\n"cuda"\n'
    assert port(text, NEURON) == (
        "import torch\nimport neuron_streams\n\ns = neuron_streams.Stream()\n"
        'x = y.neuron(0)\nd = f"neuron:{rank}"\n"neuron"\n'
    )
