"""PyTorch's whole operator database gives on the device what it gives on the CPU, bit for bit."""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.torch_backend.checks import KINDS
from tests.torch_backend.comparing import aliases, difference
from tests.torch_backend.device import DEVICE
from tests.torch_backend.exceptions import DIFFERENT, UNDEFINED, WAITING
from tests.torch_backend.operators import Run, table
from tests.torch_backend.watchdog import Watchdog

WAITS = "waits for the stream"


@pytest.fixture(scope="module")
def run():
    return Run()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operator_gives_what_the_cpu_gives(run, kind):
    wrong = {
        f"{f['op']} {f['dtype']} {f['sample']}": f["message"]
        for f in run.failures
        if f["kind"] == kind and f["message"] != WAITS and f["op"] not in DIFFERENT
    }
    assert wrong == {}, table(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_operator_waits_for_a_held_stream(run):
    assert {f["op"] for f in run.failures if f["message"] == WAITS} - set(DIFFERENT) == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_excused_is_little_and_still_so(run):
    assert len(DIFFERENT) <= len(op_db) // 100
    assert set(DIFFERENT) <= set(run.by_operator())
    names = {op.full_name for op in op_db}
    assert set(DIFFERENT) | set(UNDEFINED) | set(WAITING) <= names
    assert run.calls > 15_000


X = torch.arange(6.0).reshape(2, 3)
NAN = torch.tensor([float("nan"), 0.0])
WRONG = {
    "a value": (X, X.clone().fill_diagonal_(7)),
    "the sign of zero": (torch.zeros(1), -torch.zeros(1)),
    "a NaN where there is none": (torch.zeros(2), NAN),
    "the strides": (X, X.t().contiguous().t()),
    "the offset": (X[1], X.clone()[0].copy_(X[1])),
    "the dtype": (X, X.double()),
    "requires_grad": (X, X.clone().requires_grad_()),
    "a lazy conjugate": (X + 0j, (X + 0j).conj()),
    "the structure": ((X, X), [X, X]),
    "a number": (1, 2),
    "a number's type": (1, 1.0),
    "no tensor": (X, 1.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_difference_is_found(name):
    assert difference(*WRONG[name], "cpu") is not None
    assert difference(WRONG[name][0], WRONG[name][0], "cpu") is None


def test_equal_is_no_difference():
    assert difference(NAN, NAN.clone(), "cpu") is None
    assert difference([X, {"a": 2}], [X.clone(), {"a": 2}], "cpu") is None
    assert difference(X, X + 1, "cpu", contents=False) is None


def test_a_shared_storage_is_seen():
    assert aliases([X[0], X.clone()], [torch.ones(1), X]) == [1, None]


def test_a_call_that_waits_is_let_go_and_counted():
    watchdog = Watchdog()
    with watchdog.held():
        x = torch.ones(3, device=DEVICE) + 1
    assert not watchdog.waited
    if DEVICE != "cpu":
        with watchdog.held():
            assert (x + 1).tolist() == [3.0] * 3
        assert watchdog.waited
