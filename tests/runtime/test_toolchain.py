import pytest

from neuron_streams._runtime import toolchain


def test_no_compilers_where_none_are_wanted(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_COMPILER", "none")
    assert toolchain.c_compiler() is None
    assert toolchain.cxx_compiler() is None


def test_a_compiler_that_fails_says_what_it_said():
    command = toolchain.c_compiler()
    if command is None:
        pytest.skip("there is no C compiler here")
    with pytest.raises(RuntimeError, match=r"(?s)failed \(1\).*nowhere\.c"):
        toolchain.run([*command, "-c", "nowhere.c"])
