"""What fails a step at its launch, and that step alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from neuron_streams.decode.coerce import shown
from neuron_streams.decode.logprobs import split
from neuron_streams.decode.model import Sampled

__all__ = ["StepError", "check_sampled", "part_of_the_step"]

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class StepError(Exception):
    """The step that is being launched has failed, because of `error`; others may not."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def part_of_the_step() -> Iterator[None]:
    """Around what depends on the step's own requests, and on no wait for other steps."""
    try:
        yield
    except Exception as error:
        raise StepError(error) from error


def check_sampled(sampled: Sampled, rows: int, num_steps: int = 1) -> None:
    """Refuse what are no token ids of so many rows, and steps; never waits for them.

    Raises:
        TypeError: They are something else.
    """
    tokens: object = split(sampled)[0]
    dtype, shape = getattr(tokens, "dtype", None), [*getattr(tokens, "shape", ())]
    windowed = [num_steps] if num_steps > 1 else []
    if dtype in _INTEGERS and shape and shape[:-1] == windowed and shape[-1] >= rows:
        return
    found = shown(tokens) if dtype is None else f"{dtype} {shape}"
    raise TypeError(
        f"The model returned {found} for {rows} rows; prefill, prefill_chunk, packed, decode and"
        f" decode_gather must return sampled token ids, int32 [{rows}] or more, and decode_window"
        " so many of each step (see decode.Model)."
    )
