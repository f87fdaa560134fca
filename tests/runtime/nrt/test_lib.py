"""libnrt found and told apart: layouts, symbols, versions."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from neuron_streams._runtime import toolchain
from neuron_streams._runtime.nrt import structs
from neuron_streams._runtime.nrt.lib import Abi, Library, find
from neuron_streams._runtime.nrt.status import LibraryError, NrtError
from tests.runtime.nrt.doubled import Double

NAMES = {
    "nrt_tensor_info_t": structs.TensorInfo,
    "nrt_tensor_info_array_t": structs.TensorInfos,
    "nrt_instance_info_t": structs.InstanceInfo,
    "nrt_vnc_memory_stats_t": structs.MemoryStats,
    "nrt_version_t": structs.Version,
    "nrta_error_t": structs.ErrorRecord,
}
DOCUMENTED = {
    "nrt_tensor_info_t": 296,
    "nrt_instance_info_t": 32,
    "nrt_vnc_memory_stats_t": 16,
    "nrt_version_t": 224,
}


def test_layouts_are_those_of_the_header(abi):
    found = Double(abi).layout()
    assert found.pop("NRT_STATUS") == found.pop("nrta_xu_t") == ctypes.sizeof(ctypes.c_int)
    assert found.pop("nrta_seq_t") == ctypes.sizeof(ctypes.c_uint64)
    for name, value in found.items():
        struct, _, field = name.partition(".")
        ours = NAMES[struct]
        if field:
            assert getattr(ours, field).offset == value, name
        else:
            assert ctypes.sizeof(ours) == value == DOCUMENTED.get(struct, value), name
            fields = {f"{struct}.{field}" for field, _ in ours._fields_}
            assert fields <= set(found), "every field is compared"


def test_the_abi_is_read_off_the_symbols(abi):
    library = Library(Double(abi).path)
    assert library.abi.value == abi
    assert library.device_count() == 2
    assert ("nrta_error_tracker_create" in library.functions) is (library.abi is Abi.SDK_2_28)
    assert ("nrta_event_register_xu_completion" in library.functions) is (abi == "2.30")


@pytest.mark.parametrize("version", [(2, 29), (2, 33), (3, 0), (1, 99)])
def test_symbols_and_version_must_agree(abi, version):
    double = Double(abi)
    double.set_version(*version)
    if abi == "2.30" and version == (2, 33):
        assert Library(double.path).abi is Abi.SDK_2_30, "later ones keep this ABI"
        return
    with pytest.raises(LibraryError, match=f"symbols show the asynchronous ABI of {abi}"):
        Library(double.path)


def test_the_target_is_that_of_the_family(abi):
    double = Double(abi)
    library = Library(double.path)
    for family, target in ((2, "trn1"), (4, "inf2"), (5, "trn2"), (9, "trn2"), (14, "trn3")):
        double.set_family(family)
        assert library.target() == target
    double.set_family(1)
    assert library.target() is None


def test_the_library_is_that_of_the_variable(monkeypatch, abi):
    path = Double(abi).path
    monkeypatch.setenv("NEURON_STREAMS_LIBNRT", path)
    assert find() == Library().path == path


def test_no_library_says_where_it_was_looked_for(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_LIBNRT", "/nowhere/libnrt.so")
    assert find() is None
    with pytest.raises(LibraryError, match=r"^there is no libnrt here \(looked for NEURON_STREAMS"):
        Library()
    with pytest.raises(LibraryError, match="^libnrt cannot be loaded from /nowhere"):
        Library("/nowhere/libnrt.so")


def stub(folder, text):
    if toolchain.c_compiler() is None:
        pytest.skip("no C compiler here")
    (folder / "stub.c").write_text(text)
    path = folder / "stub.so"
    command = [*toolchain.c_compiler(), "-shared", "-fPIC", str(folder / "stub.c"), "-o", str(path)]
    subprocess.run(command, check=True)
    return str(path)


def test_one_without_asynchronous_calls_is_refused(tmp_path):
    text = "int nrt_get_version(long *v, long n) { v[0] = 2; v[1] = 27; return 0; }"
    with pytest.raises(LibraryError, match=r"^libnrt 2.27.0.0 \(.*\) has no asynchronous calls"):
        Library(stub(tmp_path, text))


def test_one_that_lacks_a_call_is_refused(tmp_path):
    text = """int nrt_get_version(long *v, long n) { v[0] = 2; v[1] = 31; return 0; }
    int nrta_execute_schedule(void) { return 0; }"""
    with pytest.raises(LibraryError, match="has no nrt_init, which SDK 2.29 has"):
        Library(stub(tmp_path, text))


def test_both_symbols_at_once_are_no_known_abi(tmp_path):
    text = """int nrt_get_version(long *v, long n) { v[0] = 2; v[1] = 32; return 0; }
    int nrta_execute_schedule(void) { return 0; }
    int nrta_error_tracker_create(void) { return 0; }
    int nrta_event_register_xu_completion(void) { return 0; }"""
    with pytest.raises(LibraryError, match="ABI of both error trackers and eventfds"):
        Library(stub(tmp_path, text))


def test_something_else_is_no_libnrt(tmp_path):
    with pytest.raises(LibraryError, match="is no libnrt: it has no nrt_get_version"):
        Library(stub(tmp_path, "int nothing;"))


def test_a_call_that_fails_says_which(abi):
    double = Double(abi)
    library = Library(double.path)
    with pytest.raises(NrtError, match=r"^nrt_unload \(a model\): NRT_UNINITIALIZED"):
        library.call("nrt_unload", None, about="a model")
    assert double.violations() == ["nrt_unload before nrt_init"]
