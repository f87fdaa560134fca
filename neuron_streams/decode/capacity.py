"""Slots and rows: which requests hold them, which wait, and which give them up.

A slot is a request's place in the KV cache, a row its place in a step. There are `max_batch_size`
rows; there may be more slots, so that a request can keep its slot without a row: while it is
paused, or while more urgent ones fill the rows. A step looks at the rows and at the first of each
queue, so its cost does not depend on how many requests wait or are paused.
"""

from __future__ import annotations

from collections import deque

from neuron_streams.decode.request import Request, RequestStatus
from neuron_streams.decode.request_queue import RequestQueue

__all__ = ["Capacity"]


class Capacity:
    """Slots and rows of the requests that need further steps.

    A request whose last token is in flight is not among them: it takes no row, it cannot be
    preempted, and its slot comes free by itself.

    Args:
        num_slots: Slots of the model, the scratch slot 0 included.
        max_batch_size: Most rows of a step.
    """

    def __init__(self, num_slots: int, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.free_slots = deque(range(1, num_slots))
        self.waiting = RequestQueue(_order)
        self.rows: dict[Request, None] = {}
        self._num_slots = num_slots
        self._rowless = RequestQueue(_order)
        self._holders = RequestQueue(_order_of_victims)

    def add(self, request: Request) -> None:
        """Queue a request: for a slot where it is waiting, for a row where it holds one.

        A paused one is in no queue, but can lose its slot.
        """
        if request.status is RequestStatus.RUNNING:
            self._holders.add(request)
        if not request.paused:
            waits = request.status is RequestStatus.WAITING
            (self.waiting if waits else self._rowless).add(request)

    def discard(self, request: Request) -> None:
        """Take a request out, wherever it is. Its slot is given back with `free_slots`."""
        for queue in (self.waiting, self._rowless, self._holders):
            queue.discard(request)
        self.rows.pop(request, None)

    def fill_rows(self) -> None:
        """Give the rows to the first of those that hold slots."""
        while (request := self._rowless.first) is not None:
            if self._is_full and _order(self._last_row) < _order(request):
                break
            self._give_row(request)

    def has_row_for(self, request: Request) -> bool:
        """Whether fewer requests than there are rows are at least as urgent as this one.

        The rows hold the most urgent ones, so the last row decides.
        """
        return not self._is_full or request.priority < self._last_row.priority

    def start(self, request: Request) -> None:
        """Give a waiting request a free slot and a row, if need be that of the last in order."""
        self.waiting.discard(request)
        request.slot = self.free_slots.popleft()
        request.status = RequestStatus.RUNNING
        self._holders.add(request)
        self._give_row(request)

    @property
    def somebody_waits(self) -> bool:
        """Whether a request that is not paused waits for a slot or a row."""
        return self.waiting.first is not None or self._rowless.first is not None

    @property
    def slots_come_free(self) -> bool:
        """Whether a slot is held for steps in flight alone."""
        return self._num_slots - 1 - len(self.free_slots) > len(self._holders)

    def victim_for(self, request: Request) -> Request | None:
        """The request that has to give up its slot; None where that is not justified.

        A paused one if there is any, else one that is less urgent; of those the last in order.
        """
        victim = self._holders.first
        if victim is None or not (victim.paused or request.priority < victim.priority):
            return None
        return victim

    @property
    def _is_full(self) -> bool:
        return len(self.rows) >= self.max_batch_size

    @property
    def _last_row(self) -> Request:
        return max(self.rows, key=_order)

    def _give_row(self, request: Request) -> None:
        if self._is_full:
            last = self._last_row
            del self.rows[last]
            self._rowless.add(last)
        self._rowless.discard(request)
        self.rows[request] = None


def _order(request: Request) -> tuple[float, int]:
    return request.order


def _order_of_victims(request: Request) -> tuple[bool, float, int]:
    priority, arrival = request.order
    return not request.paused, -priority, -arrival
