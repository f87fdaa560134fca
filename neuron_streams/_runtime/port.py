"""The port: what the rest of the package asks of an asynchronous NEFF runtime.

A *lane* is an in-order list of commands, a *ticket* `(lane, value)` says "this lane has got as far
as its value-th command". Per lane, commands run first in, first out; across lanes only `after`
orders them. The commands of one device share its execution units, and a unit is a capacity, not a
thread. Nothing here knows a stream, an event or a tensor: those are built from tickets.

Commands, buffers and failures are objects of the extension (`_torch/csrc/core.h`); the classes of
those names here say what a runtime may ask of them.

Source: the Neuron runtime's explicit async API (`nrta_*`), whose handles are execution-unit queues
and sequence numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

__all__ = [
    "FORGOTTEN",
    "Buffer",
    "CancelledError",
    "Command",
    "Copy",
    "Execute",
    "Failure",
    "Form",
    "Handle",
    "Kind",
    "Payload",
    "Runtime",
    "Ticket",
    "Unit",
    "View",
    "cancelled",
    "closed",
]

FORGOTTEN = (1 << 63) - 1  # a closed lane has completed whatever it was given


class Unit(enum.IntEnum):
    """An execution unit of a NeuronCore, or none: PEERS are waits for other processes."""

    COMPUTE = 0
    TENSOR_OP = 1
    COLLECTIVES = 2
    PEERS = 3

    @property
    def queues(self) -> int:
        """How many commands it runs at a time."""
        return (1, 2, 3, 58)[self]


class Kind(enum.IntEnum):
    """What a command is.

    A marker has nothing to run and completes when all before it has; a pledge completes when the
    host says so (`Runtime.complete`); a sleep keeps a unit busy.
    """

    MARKER = 0
    PLEDGE = 1
    SLEEP = 2
    COPY = 3
    EXECUTE = 4
    OPERATOR = 5
    COLLECTIVE = 6


class Ticket(NamedTuple):
    """The `value`-th command of a lane, counted from 1."""

    lane: int
    value: int


class CancelledError(RuntimeError):
    """A command that had not completed when its runtime was closed."""


class Failure(Protocol):
    """The first cause of a command that did not run to its end; shared by all that it poisoned."""

    @property
    def error(self) -> BaseException: ...
    @property
    def ticket(self) -> Ticket: ...
    @property
    def what(self) -> str: ...
    @property
    def traceback(self) -> TracebackType | None: ...


class Buffer(Protocol):
    """Device memory. `writer` is the ticket of the last command submitted to write it."""

    @property
    def device(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def peer(self) -> object: ...  # what `Runtime.allocate` gave for it
    @property
    def writer(self) -> Ticket | None: ...
    @property
    def failure(self) -> Failure | None: ...


Form: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""The dtype, size and stride of a view."""


class View(Protocol):
    """A strided window on a buffer: sizes, strides and offset in elements of dtype."""

    @property
    def buffer(self) -> Buffer: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def size(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def lazy(self) -> bool: ...  # conjugated or negated when it is read


class Command(Protocol):
    """Plain data: what to run, on which unit, which buffers it reads and writes."""

    name: str
    at: float | None  # of a timed marker: the moment of its completion, in seconds

    @property
    def kind(self) -> int: ...
    @property
    def unit(self) -> int: ...
    @property
    def quick(self) -> bool: ...  # cheaper to run in place than to wake a thread for
    @property
    def timed(self) -> bool: ...
    @property
    def seconds(self) -> float: ...  # of a sleep
    @property
    def reads(self) -> Sequence[Buffer]: ...
    @property
    def outputs(self) -> Sequence[Buffer]: ...
    @property
    def mutated(self) -> Sequence[Buffer]: ...

    def blame(self) -> Failure | None:
        """The failure of the first poisoned buffer that it reads."""

    def attempt(self, ticket: Ticket) -> Failure | None:
        """Run to the end here, unless what it reads is poisoned, and settle what it writes."""

    def settle(self, failure: Failure | None) -> None:
        """Poison the outputs of a command that failed, or cure what one has written whole."""


class Copy(Command, Protocol):
    """Copy a view into another; either may be host memory (a plain tensor), which is kept alive."""

    @property
    def source(self) -> View | torch.Tensor: ...
    @property
    def target(self) -> View | torch.Tensor: ...


class Execute(Command, Protocol):
    """Run a loaded executable: inputs in its order (a buffer and an offset in bytes each), one
    fresh buffer for each of its outputs."""

    @property
    def handle(self) -> Handle: ...
    @property
    def inputs(self) -> Sequence[tuple[Buffer, int]]: ...


@dataclass(frozen=True, slots=True)
class Payload:
    """A compiled model as a runtime takes it: `format` says how to read `content`.

    Formats: `"program"` (a chain of AOTInductor libraries), `"exported"` (a torch.export program),
    `"neff"` (bytes for the hardware). A runtime refuses a format that it cannot run.
    """

    format: str
    name: str
    content: Any = field(repr=False)


class Handle(Protocol):
    """A payload loaded on one device. `address` is that of a program for the chain runner.

    Where it has none, or None, CPU runtimes call `run`; where it has a true `draws`, they give it a
    generator of the host as well.
    """

    name: str

    def run(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run to the end on the calling thread, with the GIL free where there is compiled code."""


class Runtime(Protocol):
    """An asynchronous NEFF runtime. Thread-safe. Only `wait`, `close` and a full queue block."""

    name: str

    def device_count(self) -> int: ...

    def open_lane(self, device: int, priority: int = 0, *, host: bool = False) -> int:
        """A new lane; one of `host` runs nothing, its pledges are completed by `complete`."""

    def close_lane(self, lane: int) -> None:
        """Forget the lane once its pending commands have completed; never waits."""

    def submit(
        self, lane: int, command: Command, after: Sequence[Ticket] = (), wait: bool = True
    ) -> Ticket | None:
        """Waits where the device has no room; returns None instead unless `wait`."""

    def wait_for_room(self, lane: int) -> None:
        """Block until the lane's device may have room. A submission then may be too late again."""

    def complete(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """Complete the pledges of a host lane up to `ticket`, or fail them with an error."""

    def submitted(self, lane: int) -> int:
        """How many commands the lane was given; 0 if it was closed and has done them all."""

    def lanes(self, device: int) -> Sequence[int]:
        """The lanes open on a device, those of the host left out."""

    def completed(self, lane: int) -> int:
        """How many commands of the lane have completed, failed ones included."""

    def completed_at(self, ticket: Ticket) -> float | None:
        """Seconds on the runtime's clock at which a timed marker completed; None while pending."""

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        """Block until the ticket completes. Raises TimeoutError; never raises its failure."""

    def failures(self, ticket: Ticket, since: int = 0) -> Sequence[Failure]:
        """Those of the ticket's lane with `since < value <= ticket.value`, each cause once."""

    def drain(self) -> None:
        """Block until everything that can run has run."""

    # A runtime with memory of its own has `allocate(device, nbytes)`, too. What that returns is the
    # buffer's `peer` and is let go of with it; its `address` is where the host reaches the memory
    # directly, 0 where it cannot: then the host's data come and go by commands. It has
    # `reaches_memory`, which says whether the host can, `reserved`, `reset_reserved`, `empty_cache`
    # and `memory_info` as well, for torch's statistics.

    def load(self, payload: Payload, device: int) -> Handle: ...

    def busy_intervals(self) -> Sequence[tuple[int, int, float, float, str]]:
        """What ran lately, oldest first: device, unit, start, end (seconds), name."""

    def close(self, timeout: float | None = None) -> None:
        """Run what is queued until `timeout` seconds, cancel the rest, wake every waiter."""


def closed(runtime: str) -> RuntimeError:
    return RuntimeError(
        f"the {runtime} runtime of neuron_streams is closed, so it takes no more "
        "commands; streams of a closed runtime cannot be used again"
    )


def cancelled(command: Command, ticket: Ticket, running: bool) -> CancelledError:
    """The failure of a command that the end of its runtime found pending."""
    why = "was still running" if running else "had not started"
    return CancelledError(
        f"{command.name!r} (command {ticket.value} of lane {ticket.lane}) {why} when the runtime "
        "was closed"
    )
