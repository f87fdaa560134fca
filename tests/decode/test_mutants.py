"""A few guards, broken: `python -m tests.decode.mutants` breaks all of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.decode import mutants


@pytest.mark.timeout(300)
def test_the_tests_notice_a_broken_guard() -> None:
    command = [sys.executable, "-m", "tests.decode.mutants", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_guard_that_is_broken_is_there() -> None:
    for mutant in mutants.MUTANTS.values():
        mutants._Finder(mutant)
