"""Executables that several tests use, compiled once in a process."""

import functools

import pytest
import torch

from neuron_streams import Executable, compile  # noqa: A004
from neuron_streams._runtime import toolchain
from tests.compiler.plans import Deep, deep_inputs

needs_cxx = pytest.mark.skipif(toolchain.cxx_compiler() is None, reason="there is no C++ compiler")


@functools.cache
def pair() -> Executable:
    """(x + y, x * 2) of float32 [2, 3] and [3]."""

    def sum_and_double(x, y):
        return x + y, x * 2

    return compile(sum_and_double, [torch.ones(2, 3), torch.ones(3)])


@functools.cache
def model() -> Deep:
    torch.manual_seed(0)
    return Deep().requires_grad_(False)


@functools.cache
def deep() -> Executable:
    """Four equal layers and a cache [4, 2, 5, 4] that they write into."""
    return compile(model(), deep_inputs(), mutates=["kv"], name="deep")
