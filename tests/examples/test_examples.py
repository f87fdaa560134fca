"""The examples as a user runs them, and the README's own code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command, timeout=110, code=0, **env):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == code, done.stderr
    return done


def test_two_streams():
    assert "4 products as on the host" in run("examples/two_streams.py").stdout


def test_double_buffer():
    said = run("examples/double_buffer.py").stdout
    assert "sequential" in said
    assert "the same results" in said


def test_decode_loop_chains_remaps_and_synchronizes():
    said = run("examples/decode_loop.py").stdout
    steps = re.search("steps: (.*)", said)[1].split(", ")
    assert steps == [
        *["synchronized", "chained", "chained", "chained"],
        *["remapped", "chained", "chained"],
        *["synchronized", "chained", "chained", "chained"],
    ]
    assert "tokens as in a plain loop" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generate_answers_the_same_text_in_both_modes():
    one = run("examples/generate.py", "--stats", timeout=500).stdout
    two = run("examples/generate.py", "--stats", "--no-async-scheduling", timeout=500).stdout
    text, stats = one.rstrip().rsplit("\n", 1)
    assert "Paris" in text
    found = re.fullmatch(
        r"(\d+) tokens, [\d.]+ tokens/s, (\d+) async steps, (\d+) fallbacks \((.*)\)", stats
    )
    assert int(found[2]) > int(found[3]) > 0
    assert "mixed" in found[4]  # the other prompts join the steps of the first
    synchronous, stats = two.rstrip().rsplit("\n", 1)
    assert synchronous == text
    assert re.fullmatch(r"(\d+) tokens, [\d.]+ tokens/s, 0 async steps, 0 fallbacks", stats)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "/no/such/model"], "/no/such/model is no folder"),
        (["--max-tokens", "0", "Hi"], "max_tokens is 0; it must be 1 or more"),
        (["--temperature", "-1", "Hi"], "temperature is -1.0"),
    ],
)
def test_generate_refuses_bad_input_in_one_sentence(arguments, sentence):
    said = run("examples/generate.py", *arguments, code=1).stderr
    assert said.startswith("generate: ")
    assert sentence in said
    assert len(said.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generate_refuses_a_prompt_and_goes_on_with_the_others():
    said = run("examples/generate.py", "", "What is the capital of France?", code=1, timeout=500)
    assert "prompt 1: Request '0' has an empty prompt" in said.stderr
    assert "Paris" in said.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generate_ends_an_answer_at_a_stop_string():
    said = run("examples/generate.py", "Name three primary colors.", "--stop", "Red", timeout=500)
    assert said.stdout.startswith("> Name three primary colors.\n")
    assert "primary colors are" in said.stdout
    assert "Red" not in said.stdout


@pytest.mark.gpu
def test_decode_loop_on_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    said = run("examples/decode_loop.py", "--streams", "torch.cuda").stdout
    assert "tokens as in a plain loop" in said


def test_the_generic_loop_fits_on_a_page():
    assert len((ROOT / "examples/decode_loop.py").read_text().splitlines()) <= 100


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_code_in_the_readme_runs():
    for block, end in zip(
        blocks("python"), ("tensor([0., 2., 4., 6.])\n", " length\n"), strict=True
    ):
        assert run("-W", "error", "-c", block).stdout.endswith(end)


def test_every_example_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        if path.name != "__init__.py":
            assert f"examples/{path.name}" in readme


def test_the_command_line_answers():
    assert json.loads(run("-m", "neuron_streams", "doctor", "--json").stdout)["runtime"]
