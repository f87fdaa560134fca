"""The port: what the rest of the package asks of an asynchronous NEFF runtime.

A *lane* is an in-order list of commands, a *ticket* `(lane, value)` says "this lane has got as far
as its value-th command". Per lane, commands run first in, first out; across lanes only `after`
orders them. The commands of one device share its execution units, and a unit is a capacity, not a
thread. Nothing here knows a stream, an event or a tensor: those are tickets with manners.

Source: the Neuron runtime's explicit async API (`nrta_*`), whose handles are execution-unit queues
and sequence numbers.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from neuron_streams._runtime.ledger import Ledger

__all__ = [
    "Buffer",
    "Command",
    "Copy",
    "Execute",
    "Failure",
    "Form",
    "Handle",
    "Marker",
    "Operator",
    "Payload",
    "Pledge",
    "Runtime",
    "Sleep",
    "Ticket",
    "Unit",
    "View",
]


class Unit(enum.Enum):
    """An execution unit of a NeuronCore; the value is how many queues it has."""

    COMPUTE = 1
    TENSOR_OP = 2
    COLLECTIVES = 3

    @property
    def queues(self) -> int:
        return self.value


class Ticket(NamedTuple):
    """The `value`-th command of a lane, counted from 1."""

    lane: int
    value: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The first cause of a command that did not run to its end; shared by all that it poisoned."""

    error: BaseException
    ticket: Ticket
    what: str
    traceback: TracebackType | None = None


class Buffer:
    """Device memory: a storage that may not be there yet, and the reason if it never will be.

    `writer` is the ticket of the last command submitted to write it and `named` says whether any
    command ever named it, both set by whoever submits; `failure` poisons it, set and cleared by the
    runtime as commands complete.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "failure",
        "ledger",
        "named",
        "nbytes",
        "storage",
        "writer",
    )

    def __init__(
        self,
        device: int,
        nbytes: int,
        storage: torch.UntypedStorage | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.device = device
        self.nbytes = nbytes
        self.storage = storage
        self.ledger = ledger
        if ledger is not None:
            ledger.born(nbytes)
        self.writer: Ticket | None = None
        self.named = False
        self.failure: Failure | None = None

    def fill(self, source: torch.Tensor) -> None:
        """Write a host tensor of as many bytes into memory that no command has named yet."""
        copy = source.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
        self.storage = copy.resolve_conj().untyped_storage()

    def __del__(self) -> None:
        if self.ledger is not None:
            self.ledger.dead(self.nbytes)


Form: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""The dtype, size and stride of a view."""


@dataclass(slots=True, init=False)
class View:
    """A strided window on a buffer: sizes, strides and offset in elements of dtype.

    Never changed once made. It is not frozen, and keeps its `form` in one piece as well, because
    one is made for each output of a call, and each input is checked against what is expected.
    """

    buffer: Buffer
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    form: Form = field(repr=False, compare=False)

    def __init__(
        self,
        buffer: Buffer,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int = 0,
    ) -> None:
        self.buffer = buffer
        self.dtype = dtype
        self.size = size
        self.stride = stride
        self.offset = offset
        self.form = (dtype, size, stride)

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    @property
    def whole(self) -> bool:
        """Whether writing the view overwrites every byte of its buffer."""
        return self.nbytes == self.buffer.nbytes


class Marker:
    """Nothing to run: completes when all before it has. `timed` keeps the moment in `at`.

    `cell` is where a timed marker has its moment, so that a runtime in C can write it.
    """

    __slots__ = ("__weakref__", "cell", "name", "timed")

    def __init__(self, timed: bool = False, name: str = "marker") -> None:
        self.timed = timed
        self.name = name
        self.cell = array("d", (math.nan,)) if timed else None

    @property
    def at(self) -> float | None:
        """The moment of completion, in seconds on the runtime's clock; None while pending."""
        moment = math.nan if self.cell is None else self.cell[0]
        return None if math.isnan(moment) else moment

    @at.setter
    def at(self, moment: float) -> None:
        if self.cell is not None:
            self.cell[0] = moment


@dataclass(slots=True)
class Pledge:
    """A command of a host lane: completes when the host says so (`Runtime.complete`)."""

    name: str = "pledge"


@dataclass(slots=True)
class Sleep:
    """Keep a unit busy for `seconds`."""

    seconds: float
    unit: Unit = Unit.COMPUTE
    name: str = "sleep"


@dataclass(slots=True)
class Copy:
    """Copy source into target; either may be host memory (a plain tensor), which is kept alive."""

    source: View | torch.Tensor
    target: View | torch.Tensor
    unit: Unit = Unit.TENSOR_OP
    name: str = "copy"


@dataclass(slots=True)
class Execute:
    """Run a loaded executable: inputs in its order, one fresh buffer for each of its outputs.

    `mutated` are the positions of the inputs it updates in place (an alias on hardware).
    """

    handle: Handle
    inputs: Sequence[View]
    outputs: Sequence[Buffer]
    mutated: Sequence[int] = ()
    unit: Unit = Unit.COMPUTE
    name: str = "execute"


@dataclass(slots=True)
class Operator:
    """Run one eager operator; views among the arguments stand for device tensors.

    `outputs` receive the storages of the results that alias no argument, in order; `mutated` are
    the views that the operator writes in place, `overwrites` says that it writes them whole.
    """

    op: torch._ops.OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...] = ()
    mutated: tuple[View, ...] = ()
    overwrites: bool = False
    unit: Unit = Unit.COMPUTE
    name: str = "operator"


Command: TypeAlias = Marker | Pledge | Sleep | Copy | Execute | Operator


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
    """A payload loaded on one device. CPU runtimes call `run`; others keep their own secrets."""

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
    ) -> Ticket:
        """Waits where the device has no room; raises NoRoom instead unless `wait`."""

    def wait_for_room(self, lane: int) -> None:
        """Block until the lane's device may have room. Who submits then may be too late again."""

    def complete(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """Keep the pledges of a host lane up to `ticket`, or break them with an error."""

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

    def failures(self, ticket: Ticket, since: int = 0) -> tuple[Failure, ...]:
        """Those of the ticket's lane with `since < value <= ticket.value`, each cause once."""

    def allocate(self, device: int, nbytes: int) -> Buffer: ...

    def ledger(self, device: int) -> Ledger:
        """What `allocate` has given out on a device."""

    def load(self, payload: Payload, device: int) -> Handle: ...

    def busy_intervals(self) -> Sequence[tuple[int, Unit, float, float, str]]:
        """What ran lately, oldest first: device, unit, start, end (seconds), name."""

    def close(self, timeout: float | None = None) -> None:
        """Run what is queued until `timeout` seconds, cancel the rest, wake every waiter."""
