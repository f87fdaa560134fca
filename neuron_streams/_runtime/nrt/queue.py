"""One queue of an execution unit: the requests in flight on it, first in, first out.

A request is known by its sequence number. Numbers of a queue are consecutive, and one that has
completed says that all before it have, so the queue is asked for its last completed number only.
"""

from __future__ import annotations

import ctypes
import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from neuron_streams._runtime.nrt.lib import Abi, Library
from neuron_streams._runtime.nrt.sets import SetPair
from neuron_streams._runtime.nrt.status import Status
from neuron_streams._runtime.nrt.structs import ErrorRecord

if TYPE_CHECKING:
    from neuron_streams._runtime.nrt.order import Step

__all__ = ["Errors", "Queue", "Request"]

NUMBER = (1 << 48) - 1  # the bits of a sequence that count; those above name the unit
NEVER_WRITTEN = -1  # no status; seen after completion, the library broke its promise


class Request:
    """One call of a schedule function, and all that must stay alive until it has completed.

    That is the status storage and, in `kept`, tensor sets, buffers and host tensors.
    """

    __slots__ = ("arguments", "began", "function", "kept", "number", "outcome", "queue", "sets")

    def __init__(
        self,
        queue: Queue,
        function: Callable[..., int],
        arguments: Sequence[Any],
        kept: object,
        sets: SetPair | None = None,
    ) -> None:
        self.queue = queue
        self.function = function
        self.arguments = arguments
        self.kept = kept
        self.sets = sets
        self.outcome = ctypes.c_int(NEVER_WRITTEN)
        self.number = 0
        self.began = 0.0

    def release(self) -> None:
        """Give the tensor sets back: it has completed, or was never taken."""
        if self.sets is not None:
            self.sets.give_back()
        self.sets = None


class Errors:
    """The failures of a core on SDK 2.28, where a tracker keeps them by sequence.

    Whether reading the list empties it is not documented, so what was read is kept until it is
    asked for, and a record that comes again does no harm.
    """

    def __init__(self, library: Library, device: int) -> None:
        self._library = library
        self._read: dict[int, int] = {}
        self._seen = 0
        self.tracker = ctypes.c_void_p()
        library.call("nrta_error_tracker_create", device, ctypes.byref(self.tracker))

    def of(self, sequence: int) -> int:
        records, count = ctypes.POINTER(ErrorRecord)(), ctypes.c_size_t()
        self._library.call(
            "nrta_error_tracker_get_list",
            self.tracker,
            ctypes.byref(records),
            ctypes.byref(count),
        )
        if count.value < self._seen:
            self._seen = 0
        for index in range(self._seen, count.value):
            self._read[records[index].seq_id] = records[index].error_code
        self._seen = count.value
        return self._read.pop(sequence, Status.SUCCESS)

    def close(self) -> None:
        self._library.nrta_error_tracker_destroy(self.tracker)


class Queue:
    """A queue: what is ready for it, most urgent first, and what is in flight on it."""

    __slots__ = (
        "_library",
        "_sequence",
        "asleep",
        "awaited",
        "device",
        "errors",
        "fd",
        "flight",
        "free_at",
        "full",
        "high",
        "index",
        "ready",
        "unit",
    )

    def __init__(
        self, library: Library, device: int, unit: int, index: int, errors: Errors | None
    ) -> None:
        self._library = library
        self._sequence = ctypes.c_uint64()
        self.device = device
        self.unit = unit
        self.index = index
        self.errors = errors
        self.ready: list[tuple[int, int, Step]] = []
        self.flight: deque[tuple[Request, Step]] = deque()
        self.asleep: Step | None = None
        self.awaited: list[Queue] = []  # those held up by what is in flight here
        self.full = False  # the hardware refused one; until something completes
        self.high = 0  # the bits that name the unit, of every sequence
        self.free_at = 0.0
        self.fd = -1

    @property
    def busy(self) -> bool:
        return bool(self.flight) or self.asleep is not None

    @property
    def front(self) -> int:
        """The sequence of the oldest request in flight."""
        return self.high | self.flight[0][0].number

    def push(self, priority: int, order: int, step: Step) -> None:
        heapq.heappush(self.ready, (priority, order, step))

    def schedule(self, request: Request, step: Step) -> int:
        """Give a request to the hardware, which takes it, or returns a status and takes nothing."""
        outcome = request.outcome if self.errors is None else self.errors.tracker
        pointer = ctypes.byref(outcome) if self.errors is None else outcome
        status = request.function(
            *request.arguments, self.index, pointer, ctypes.byref(self._sequence)
        )
        if status == Status.SUCCESS:
            sequence = self._sequence.value
            request.number = sequence & NUMBER
            self.high = sequence & ~NUMBER
            request.began = time.perf_counter()
            self.flight.append((request, step))
        return status

    def harvest(self) -> list[tuple[Request, Step, int]]:
        """Take out the requests that have completed, each with its status."""
        self._library.call(
            "nrta_get_sequence", self.device, self.unit, self.index, ctypes.byref(self._sequence)
        )
        last, done = self._sequence.value & NUMBER, []
        while self.flight and self.flight[0][0].number <= last:
            request, step = self.flight.popleft()
            done.append((request, step, self._status(request)))
        self.full = self.full and not done
        return done

    def _status(self, request: Request) -> int:
        request.release()
        if self.errors is not None:
            return self.errors.of(self.high | request.number)
        return request.outcome.value


def errors_for(library: Library, device: int) -> Errors | None:
    """Where the failures of a device's requests are found, None: in their own status storage."""
    return Errors(library, device) if library.abi is Abi.SDK_2_28 else None
