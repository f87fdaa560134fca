from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from neuron_streams._runtime import python
from neuron_streams._runtime.cpu import prepare
from neuron_streams._runtime.port import Command, Execute, View
from neuron_streams._runtime.python import PythonWorkers


class Handle:
    """Runs a function of Python as an executable without outputs."""

    name = "handle"

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.function()
        return []


@pytest.fixture
def workers() -> Iterator[PythonWorkers]:
    made = PythonWorkers("python workers", 1)
    yield made
    made.close(5)


def test_a_wait_ends_before_the_next_command_has_run(workers: PythonWorkers) -> None:
    lane, held, seen = workers.open_lane(0), threading.Event(), threading.Event()
    first = workers.submit(lane, Execute(Handle(held.wait), (), ()))
    second = workers.submit(lane, Execute(Handle(seen.wait), (), ()))
    held.set()
    workers.wait(first, 30)
    assert workers.completed(lane) == 1
    seen.set()
    workers.wait(second, 30)


def test_a_wait_ends_although_the_next_command_cannot_be_prepared(workers: PythonWorkers) -> None:
    lane, held = workers.open_lane(0), threading.Event()
    small = workers.allocate(0, 4)
    small.storage = torch.UntypedStorage(4)
    # A size that no tensor can have.
    beyond = View(small, torch.float32, (-1,), (1,))
    first = workers.submit(lane, Execute(Handle(held.wait), (), ()))
    second = workers.submit(lane, Execute(Handle(held.wait), (beyond,), ()))
    held.set()
    workers.wait(first, 30)
    workers.wait(second, 30)
    (failure,) = workers.failures(second)
    assert failure.ticket == second


def test_a_destructor_inside_the_lock_cannot_hang_the_device(workers: PythonWorkers) -> None:
    lane, held = workers.open_lane(0), threading.Event()
    first = workers.submit(lane, Execute(Handle(held.wait), (), ()))
    waits = (lambda: workers.wait(first, 30), lambda: workers.wait_for_room(lane))
    for wait in waits:  # as the garbage collector may run one between any two lines there
        with workers._lock, pytest.raises(RuntimeError, match="^wait: this destructor"):
            wait()
    held.set()
    workers.wait(first, 30)


def test_who_waits_is_woken_between_what_torch_prepares_and_the_run(
    workers: PythonWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    class Waiter:
        def release(self) -> None:
            happened.append("woken")

    def prepared(command: Command) -> Callable[[], None]:
        happened.append("prepared")
        return prepare(command)

    monkeypatch.setattr(python, "prepare", prepared)
    lane, held = workers.open_lane(0), threading.Event()
    first = workers.submit(lane, Execute(Handle(held.wait), (), ()))
    second = workers.submit(lane, Execute(Handle(lambda: happened.append("run")), (), ()))
    workers._lanes[lane].waiters.append((first.value, 0, Waiter()))  # type: ignore[arg-type]
    held.set()
    workers.wait(second, 30)
    assert happened == ["prepared", "prepared", "woken", "run"]
