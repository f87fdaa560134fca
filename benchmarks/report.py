"""What every benchmark returns: rows of figures, each with its unit, budget and peer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

__all__ = ["Row", "percentile", "render", "timed"]


@dataclass(frozen=True)
class Row:
    """One figure. `budget` is what the design asks for, `met` whether it holds."""

    what: str
    value: float
    unit: str
    budget: str = ""
    met: bool | None = None
    beside: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def render(name: str, rows: Iterable[Row]) -> str:
    """A table for people."""
    lines = [name]
    for row in rows:
        mark = {True: "ok", False: "MISSED", None: ""}[row.met]
        budget = f"(budget {row.budget}) {mark}" if row.budget else ""
        lines.append(f"  {row.what:58}{row.value:>11.3f} {row.unit:9}{budget:26} {row.beside}")
    return "\n".join(line.rstrip() for line in lines)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share (0 to 1) of the values lies; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def timed(action: Callable[[], object], repeat: int = 5) -> float:
    """Median seconds of one call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
