from __future__ import annotations

import pytest

from neuron_streams.decode.life import Life


def make() -> tuple[Life, list[str]]:
    released: list[str] = []
    return Life(lambda: released.append("released")), released


def test_a_life_goes_on_after_a_change_and_after_a_wait() -> None:
    life, released = make()
    with life.changing("launching"):
        assert not life.goes_on
    with life.waiting():
        pass
    with pytest.raises(KeyboardInterrupt), life.waiting():
        raise KeyboardInterrupt
    assert life.goes_on
    assert not life.was_interrupted
    life.check("step")
    assert released == []


def test_an_interrupted_change_ends_it_and_every_check_says_so() -> None:
    life, released = make()
    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), life.changing("launching a step"):
        raise interrupt
    assert released == ["released"]
    assert life.was_interrupted
    for what in ("step", "drain"):
        with pytest.raises(
            RuntimeError,
            match=rf"^{what}: the decode loop has ended, since KeyboardInterrupt\(\) interrupted it"
            r" while it was launching a step\. close\(\) it, and make another\.$",
        ) as caught:
            life.check(what)
        assert caught.value.__cause__ is interrupt


def test_a_change_that_was_left_without_a_word_is_found_at_the_next_call() -> None:
    life, released = make()
    life.changing("launching a step").__enter__()
    assert life.was_interrupted
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^step: the decode loop has ended, since Keyboard"):
            life.check("step")
    assert released == ["released"]


@pytest.mark.parametrize("what", ["changing", "waiting"])
def test_an_error_ends_it_and_every_check_raises_the_same(what: str) -> None:
    life, released = make()
    error = ArithmeticError("no")
    with pytest.raises(ArithmeticError), life.waiting() if what == "waiting" else life.changing(""):
        raise error
    assert not life.was_interrupted
    for _ in range(2):
        with pytest.raises(ArithmeticError) as caught:
            life.check("step")
        assert caught.value is error
    assert released == ["released"]


def test_what_fails_after_a_failed_step_is_because_of_that_but_an_interrupt_is_not() -> None:
    first = LookupError("the step")
    life, _ = make()
    life.step_error = first
    with pytest.raises(LookupError) as caught, life.changing("launching a step"):
        raise ArithmeticError("the launch after it")
    assert caught.value is first
    with pytest.raises(LookupError):
        life.check("step")
    life, _ = make()
    life.step_error = first
    with pytest.raises(KeyboardInterrupt), life.changing("launching a step"):
        raise KeyboardInterrupt


def test_a_closed_one_says_that_and_nothing_else() -> None:
    life, _ = make()
    life.changing("launching a step").__enter__()
    life.closed = True
    assert not life.was_interrupted
    with pytest.raises(RuntimeError, match="^step: the decode loop is closed; make another"):
        life.check("step")
