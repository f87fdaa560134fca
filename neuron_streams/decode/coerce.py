"""What callers pass, as plain Python values.

A value is converted where it comes in: in a launch, between the values of other requests, one that
cannot be converted would be a failure for all of them.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping
from typing import Any

__all__ = ["flag", "items", "mapping", "number", "shown", "text", "whole"]


def whole(name: str, value: object) -> int:
    """An int, from whatever has `__index__`.

    Raises:
        ValueError: It is no whole number, or several.
    """
    try:
        return operator.index(_single(value))
    except Exception:
        raise ValueError(f"{name} has {shown(value)}; it must be a whole number, an int.") from None


def number(name: str, value: object) -> float:
    """A float, from whatever has `__float__` or `__index__` and is no text.

    What is too large for a float is infinite.

    Raises:
        ValueError: It is no real number, or several.
    """
    try:
        return _float(_single(value))
    except Exception:
        raise ValueError(f"{name} is {shown(value)}; it must be a number, a float.") from None


def flag(name: str, value: object) -> bool:
    """A bool, from whatever equals one.

    Raises:
        ValueError: It equals neither.
    """
    try:
        return bool((False, True).index(_single(value)))
    except Exception:
        raise ValueError(f"{name} is {shown(value)}; it must be True or False.") from None


def text(name: str, value: object) -> str:
    """A plain str, from any subclass.

    Raises:
        ValueError: It is no str.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} is {shown(value)}; it must be a string.")
    return str.__str__(value)  # its characters, also where the subclass shows others


def items(name: str, values: Any) -> list[Any]:
    """The elements of an iterable or of a tensor.

    Raises:
        ValueError: It has none, or is text.
    """
    try:
        if isinstance(values, (str, bytes, bytearray)):
            raise TypeError("text is no list of its characters")
        # One copy of a tensor, and not one for each element.
        return list(values.tolist() if hasattr(values, "tolist") else values)
    except Exception as error:
        raise ValueError(f"{name} is {shown(values)}; it must be a list or a tuple.") from error


def mapping(name: str, values: object) -> list[tuple[Any, Any]]:
    """The pairs of a mapping.

    Raises:
        ValueError: It is none.
    """
    try:
        if not isinstance(values, Mapping):
            raise TypeError("no mapping")
        return [(key, values[key]) for key in values]
    except Exception as error:
        raise ValueError(
            f"{name} is {shown(values)}; it must be a mapping, such as a dict."
        ) from error


def shown(value: object) -> str:
    """The `repr` of a value, cut short; of one that has none, the name of its type."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _single(value: object) -> Any:
    if getattr(value, "ndim", 0):
        raise TypeError("an array is no single number, even of one element")
    return value


def _float(value: Any) -> float:
    # float() would parse text, and the bytes of any buffer.
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    if not is_number or isinstance(value, (str, bytes)):
        raise TypeError("no real number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
