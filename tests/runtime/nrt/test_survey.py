"""What the doctor says about the Neuron stack."""

from __future__ import annotations

from neuron_streams import doctor
from neuron_streams._runtime.nrt.survey import Survey, survey
from tests.runtime.nrt.doubled import Double


def test_a_machine_without_it(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_LIBNRT", "/nowhere/libnrt.so")
    found = survey()
    assert str(found).startswith("no libnrt, 0 cores, no driver")
    assert "install aws-neuronx-runtime-lib" in found.missing[0]
    assert doctor._advice_on(found, None) == [], "which is no fault of a machine without a device"


def test_a_library_is_named_with_its_abi_and_cores(monkeypatch, abi):
    double = Double(abi)
    monkeypatch.setenv("NEURON_STREAMS_LIBNRT", double.path)
    found = survey()
    assert f"(ABI of SDK {abi}, {double.path}), 2 cores" in str(found)
    double.set_version(9, 9)
    assert any("would corrupt memory" in line for line in survey().missing)


def test_a_device_is_mentioned_with_what_it_lacks():
    lacking = Survey("libnrt", 2, True, None, ["Install neuronx-cc"])
    first, second, last = doctor._advice_on(lacking, None)
    assert first == "Install neuronx-cc"
    assert second.startswith("Install torch-neuronx in this Python, or name one that has it in")
    assert len(doctor._advice_on(lacking, "torch-neuronx 2.9")) == 2
    assert last.startswith("There is a Neuron device: NEURON_STREAMS_RUNTIME=nrt drives it")
