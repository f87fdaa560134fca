"""When the device ran the newest steps, by the timestamps of its own stream."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

__all__ = ["DeviceTimes"]


class DeviceTimes:
    """Timing events around each of the newest steps, and what lies between two of them.

    The event before a step completes when the step before has ended or, on an idle device, at once.
    Where it has completed by the time at which the model's call returns, the device had nothing to
    do during that call, so the host's time in it counts as idle too.

    Args:
        size: Steps that are looked back upon.
    """

    def __init__(self, size: int = 64) -> None:
        self._steps: deque[tuple[Any, Any, float] | None] = deque(maxlen=size)

    def add(self, start: Any, end: Any, waited: float) -> None:
        """Take in a launched step: events recorded before and after it.

        Args:
            start, end: The events.
            waited: Seconds for which the device waited for the call to submit the step.
        """
        self._steps.append((start, end, waited))

    def rest(self) -> None:
        """There is nothing to do: what comes until the next step is not held against anybody."""
        if self._steps and self._steps[-1] is not None:
            self._steps.append(None)

    @property
    def idle_share(self) -> float:
        """Of the time since the oldest step began, that in which none ran, 0 to 1. Never waits.

        Only steps that have ended count, and no time without requests. From any thread.
        """
        ran = idle = 0.0
        for before, step in itertools.pairwise([None, *self._steps]):
            if step is None or not step[1].query():
                continue
            lasted, waited = step[0].elapsed_time(step[1]), step[2] * 1e3
            idle += min(lasted, waited)
            ran += max(0.0, lasted - waited)
            if before is not None:
                idle += max(0.0, before[1].elapsed_time(step[0]))
        return idle / (ran + idle) if ran + idle else 0.0
