"""The devices' generators, spelled as in torch.cuda.

What a device draws depends on its seed and on the order of submission, not on how streams
interleave. Seeds set before the first use are kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import torch

from neuron_streams._context import DeviceLike, context, core, index_of, lazy_call

__all__ = [
    "default_generators",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def _generator(device: DeviceLike) -> torch.Generator:
    context()
    generator: torch.Generator = core().default_generator(index_of(device))
    return generator


def _all() -> list[torch.Generator]:
    return [_generator(index) for index in range(context().count)]


class _Generators(Sequence[torch.Generator]):
    """The generators of the devices, by index; looked up at each use, so that none starts here."""

    @overload
    def __getitem__(self, index: int) -> torch.Generator: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[torch.Generator, ...]: ...
    def __getitem__(self, index: int | slice) -> torch.Generator | tuple[torch.Generator, ...]:
        return tuple(_all())[index]

    def __len__(self) -> int:
        return context().count


default_generators: Sequence[torch.Generator] = _Generators()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """The seed and the offset of a device's generator, as 16 bytes. Host: returns at once.

    Source: torch.cuda.get_rng_state, whose default is the current device, too.
    """
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices. Host: returns at once."""
    return [generator.get_state() for generator in _all()]


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Continue where a state was taken. Host: returns at once."""
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Continue on all devices where the states were taken. Host: returns at once."""
    for generator, state in zip(_all(), new_states, strict=False):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    """Seed the current device's generator. Host: returns at once."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices; torch.manual_seed calls it. Host: returns at once.

    Before the first use the seed is kept for it, so that seeding starts no runtime.
    """
    number = int(seed)

    def apply() -> None:
        for generator in _all():
            generator.manual_seed(number)

    lazy_call(apply, key=manual_seed_all)


def seed() -> None:
    """Seed the current device's generator at random. Host: returns at once."""
    _generator(None).seed()


def seed_all() -> None:
    """Seed the generators of all devices with one random number. Host: returns at once."""
    first, *others = _all()
    number = first.seed()
    for generator in others:
        generator.manual_seed(number)


def initial_seed() -> int:
    """The seed of the current device's generator. Host: returns at once."""
    return _generator(None).initial_seed()
