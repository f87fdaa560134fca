from __future__ import annotations

import threading

import pytest

from neuron_streams.decode.future import Exclusive, Future


def test_a_future_gives_its_first_outcome_again_and_again() -> None:
    future: Future[int] = Future()
    assert not future.done()
    assert not future.wait(0)
    with pytest.raises(TimeoutError, match="^There is no result within 0 s"):
        future.result(0)
    future.set_result(3)
    future.set_result(4)
    future.set_exception(LookupError())
    assert future.done()
    assert [future.result(0), future.result(0), future.exception(0)] == [3, 3, None]


def test_a_future_raises_what_was_set() -> None:
    future: Future[int] = Future()
    error = LookupError()
    future.set_exception(error)
    assert future.wait()
    assert future.exception() is error
    with pytest.raises(LookupError):
        future.result()


def test_a_waiter_of_a_future_is_woken_by_another_thread() -> None:
    future: Future[int] = Future()
    thread = threading.Thread(target=lambda: future.set_result(1))
    thread.start()
    assert future.result(60) == 1
    thread.join()


def test_sections_exclude_each_other_and_leave_the_lock_free() -> None:
    exclusive = Exclusive()
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def first() -> None:
        inside.set()
        go_on.wait()
        seen.append("first")

    thread = threading.Thread(target=lambda: exclusive(first))
    thread.start()
    inside.wait()
    second = threading.Thread(target=lambda: exclusive(lambda: seen.append("second")))
    second.start()
    go_on.set()
    thread.join()
    second.join()
    assert seen == ["first", "second"]

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exclusive(fail)
    third = threading.Thread(target=lambda: exclusive(lambda: seen.append("third")))
    third.start()
    third.join(60)
    assert seen[-1] == "third"
