"""A priority queue from which any request can be removed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from neuron_streams.decode.request import Request

__all__ = ["RequestQueue"]


class RequestQueue:
    """Requests, least key first. `add`, `discard` and `first` take O(log n), amortised.

    `discard` leaves its heap entry behind. A stale entry is dropped when it reaches the top, and
    the heap is rebuilt once more than half of it is stale.

    Args:
        key: Different for any two requests. It is computed when a request is added.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, Request]] = []
        self._entries: dict[Request, tuple[Any, Request]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: object) -> bool:
        return request in self._entries

    def __iter__(self) -> Iterator[Request]:
        """All of them, in order. It sorts: for inspection, not for a step."""
        return (request for _, request in sorted(self._entries.values()))

    @property
    def first(self) -> Request | None:
        """The request with the least key; None if the queue is empty."""
        heap = self._heap
        while heap:
            request = heap[0][1]
            if self._entries.get(request) is heap[0]:
                return request
            heapq.heappop(heap)
        return None

    def add(self, request: Request) -> None:
        """Add a request that is not in the queue."""
        entry = self._key(request), request
        heapq.heappush(self._heap, entry)
        self._entries[request] = entry

    def discard(self, request: Request) -> None:
        """Remove a request if it is in the queue."""
        self._entries.pop(request, None)
        if len(self._heap) > 2 * len(self._entries):
            heap = list(self._entries.values())
            heapq.heapify(heap)
            self._heap = heap
