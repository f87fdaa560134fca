"""`neuron-streams doctor`."""

from __future__ import annotations

import json

import pytest

from neuron_streams.__main__ import main
from neuron_streams._context import core
from neuron_streams.doctor import examine


def test_it_says_what_is_in_use(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "runtime         emulated" in said
    assert "neuron:1" in said
    assert "*" in said


def test_json_has_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == examine().as_dict()
    assert said["native_streams"] == "no"
    assert said["versions"]["torch"]
    assert said["extension"] == core().__file__


def test_it_advises_a_compiler_where_there_is_none(monkeypatch):
    monkeypatch.setattr("neuron_streams._runtime.toolchain.cxx_compiler", lambda: None)
    report = examine()
    assert report.cxx_compiler is None
    assert any("g++" in line for line in report.advice)


def test_a_bad_setting_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_RUNTIME", "cuda")
    assert main(["doctor"]) == 1
    assert "NEURON_STREAMS_RUNTIME='cuda' names no runtime" in capsys.readouterr().err


def test_a_command_is_required():
    with pytest.raises(SystemExit):
        main([])
