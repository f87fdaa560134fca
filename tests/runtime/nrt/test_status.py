"""Statuses of libnrt as exceptions: the name, the meaning, the remedy."""

from __future__ import annotations

import pytest

from neuron_streams._runtime.nrt.status import (
    DeviceLostError,
    NrtError,
    Status,
    check,
    error_of,
)


@pytest.mark.parametrize("status", [status for status in Status if status])
def test_every_status_has_a_name_a_meaning_and_a_remedy(status):
    text = str(error_of(status, "nrt_load"))
    assert text.startswith(f"nrt_load: NRT_{status.name} ({status.value}): ")
    assert "not in the public headers" not in text
    assert text.count("; ") >= 1


def test_success_raises_nothing():
    check(0, "nrt_init")


def test_a_failure_raises_what_it_is():
    with pytest.raises(NrtError, match=r"^nrt_tensor_allocate: NRT_RESOURCE \(4\)") as caught:
        check(4, "nrt_tensor_allocate")
    assert (caught.value.status, caught.value.what) == (4, "nrt_tensor_allocate")
    with pytest.raises(DeviceLostError, match=r"^decode: NRT_EXEC_UNIT_UNRECOVERABLE \(101\)"):
        check(101, "decode")


def test_a_status_that_is_new_is_said_to_be():
    assert str(NrtError(4242, "x")).startswith("x: a status unknown to this version (4242)")
