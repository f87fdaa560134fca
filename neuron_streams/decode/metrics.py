"""How long requests took, in seconds of `time.perf_counter`.

A token counts as there when the thread that drives the loop takes it. Time that a request spent
paused, or waiting for a slot, counts like any other: its caller waited.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["RecentLatencies", "RequestMetrics"]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a request that has ended; `token_times` has one for each token."""

    arrived_at: float
    finished_at: float
    num_prompt_tokens: int
    token_times: tuple[float, ...]

    @property
    def first_token_at(self) -> float | None:
        """None where there is no token."""
        return self.token_times[0] if self.token_times else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def seconds(self) -> float:
        """From its arrival to its end."""
        return self.finished_at - self.arrived_at

    @property
    def time_to_first_token(self) -> float | None:
        """None where there is no token."""
        return self.token_times[0] - self.arrived_at if self.token_times else None

    @property
    def inter_token_latencies(self) -> tuple[float, ...]:
        """Between each token and the one before; one fewer than there are tokens."""
        return tuple(after - before for before, after in itertools.pairwise(self.token_times))


class RecentLatencies:
    """The newest `size` latencies, so that a long run keeps no more than those."""

    def __init__(self, size: int = 4096) -> None:
        self._seconds: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._seconds)

    def __repr__(self) -> str:
        return f"RecentLatencies({len(self)}, p50={self.p50:.6f}, p99={self.p99:.6f})"

    def extend(self, seconds: Iterable[float]) -> None:
        """Add some; the oldest go."""
        self._seconds.extend(seconds)

    def percentile(self, percent: float) -> float:
        """The least latency that so many percent do not exceed; nan where there is none.

        Raises:
            ValueError: `percent` is not from 0 to 100.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percentile({percent}): it must be from 0 to 100.")
        return _nearest_rank(sorted(self._seconds), percent)

    @property
    def p50(self) -> float:
        return self.percentile(50)

    @property
    def p99(self) -> float:
        return self.percentile(99)


def _nearest_rank(ordered: Sequence[float], percent: float) -> float:
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
