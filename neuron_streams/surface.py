"""Every name of torch.cuda's stream, event, device, memory and graph surface, and its class.

Each row has a class: *match* (the same), *modified* (how), *mismatch* (why), *absent* (what to use
instead; calling it raises that sentence) or *added*. The table of docs/surface.md and the errors of
absent names are made from these rows; a test fails on a name of torch.cuda that has none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from neuron_streams._surface_rows import (
    ACCELERATOR,
    ADDED,
    AMP,
    CLASSES,
    COMM,
    CUDA,
    EVENT,
    NEURON,
    NVTX,
    OUTSIDE,
    STREAM,
)
from neuron_streams.errors import AbsentError, AbsentImportError, UnsupportedError

__all__ = [
    "Absent",
    "OUTSIDE",
    "Row",
    "SPACES",
    "find",
    "markdown",
    "missing",
    "not_importable",
    "placeholder",
    "rows",
]

Kind: TypeAlias = Literal["match", "modified", "mismatch", "absent", "added"]


class Row(NamedTuple):
    """One name. `signature` is that of torch for a callable, empty for a plain value."""

    space: str
    name: str
    kind: Kind
    signature: str
    note: str

    @property
    def full_name(self) -> str:
        return f"{self.space}.{self.name}"


SPACES = {
    "torch.cuda": CUDA,
    "torch.cuda.Stream": STREAM,
    "torch.cuda.Event": EVENT,
    "torch.cuda.amp": AMP,
    "torch.cuda.comm": COMM,
    "torch.cuda.nvtx": NVTX,
    "torch.accelerator": ACCELERATOR,
    "torch.neuron": NEURON,
    "neuron_streams": ADDED,
}


def rows(space: str | None = None) -> Iterator[Row]:
    """All rows, or those of one namespace, in the order of the table."""
    for name, lines in SPACES.items():
        if space in (None, name):
            for line in lines:
                yield Row(name, *line)


def find(space: str, name: str) -> Row | None:
    """The row of a name, None if the table has none."""
    return next((row for row in rows(space) if row.name == name), None)


def missing(what: str, *spaces: str) -> AttributeError:
    """The error for an attribute that is not there: the row's sentence where there is one.

    It is an AttributeError, so that `hasattr` and `getattr` with a default tell the truth to code
    that looks before it leaps.
    """
    for space in spaces:
        row = find(space, what.rpartition(".")[2])
        if row is not None and row.kind == "absent":
            return AbsentError(f"neuron_streams.{what}: absent. {row.note}")
    return AttributeError(f"neuron_streams has no attribute {what!r}")


def not_importable(error: AttributeError) -> Exception:
    """What `from neuron_streams import graphs` raises: an ImportError with the sentence."""
    return AbsentImportError(*error.args) if isinstance(error, AbsentError) else error


class _AbsentClass(type):
    """A class that can be named, as in annotations and isinstance, and has no instance."""

    _sentence: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(cls._sentence)


@functools.cache
def placeholder(name: str) -> Any:
    """What stands for a class or function of torch.cuda that is absent; None for any other name.

    A program may name it, import it and annotate with it: only a call raises the row's sentence.
    """
    row = find("torch.cuda", name)
    if row is None or row.kind != "absent" or not row.signature:
        return None
    sentence = f"neuron_streams.{name}: absent. {row.note}"
    if name in CLASSES:
        return _AbsentClass(name, (), {"_sentence": sentence, "__module__": "neuron_streams"})

    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(sentence)

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = sentence
    return absent


class Absent:
    """An attribute of a class that is there only to say what to use instead."""

    def __init__(self, space: str) -> None:
        self._space = space

    def __set_name__(self, owner: type, name: str) -> None:
        self._what = f"{self._space.rpartition('.')[2]}.{name}"

    def __get__(self, owner: object, kind: type | None = None) -> NoReturn:
        raise missing(self._what, self._space)


def markdown(space: str | None = None) -> str:
    """The table of docs/surface.md: of one namespace, or of all with a heading each."""
    if space is not None:
        lines = ["| name | class | how, why, or what instead |", "|---|---|---|"]
        for row in rows(space):
            name = f"`{row.name}{row.signature}`".replace("|", "\\|")
            lines.append(f"| {name} | *{row.kind}* | {row.note} |")
        return "\n".join(lines)
    return "\n\n".join(f"## {name}\n\n{markdown(name)}" for name in SPACES)
