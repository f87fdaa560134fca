"""What `python -m benchmarks decode --plot PATH` draws; needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from benchmarks.decode import Found

COLORS = {
    "sync": "#8c8c8c",
    "materialize": "#56b4e9",
    "gather": "#009e73",
    "generate": "#e69f00",
    "generate_batch": "#d55e00",
}


def save(found: Found, path: str) -> None:
    """The two claims on the toy, and tokens/s beside transformers where they were measured."""
    figure = Figure(
        figsize=(11, 7 if found.rates else 3.5), layout="constrained", facecolor="white"
    )
    grid = figure.add_gridspec(2 if found.rates else 1, 2)
    _lines(figure.add_subplot(grid[0, 0]), found, found.gain, 100, "gain over sync, %")
    _lines(figure.add_subplot(grid[0, 1]), found, found.share, 1, "async share")
    if found.rates:
        _bars(figure.add_subplot(grid[1, :]), found.rates)
    figure.savefig(path, dpi=110)


def _lines(
    panel: Any, found: Found, values: dict[tuple[float, int], float], scale: int, label: str
) -> None:
    times, lengths = (sorted(set(each)) for each in zip(*found.gain, strict=True))
    for ms in times:
        points = [values[ms, length] * scale for length in lengths]
        panel.plot(lengths, points, marker="o", label=f"device {ms:g} ms")
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, lengths)
    panel.set(title=f"toy, materialize: {label}", xlabel="tokens of a response", ylabel=label)
    panel.legend(frameon=False)


def _bars(panel: Any, rates: dict[str, dict[str, float]]) -> None:
    """Each group is relative to its synchronous loop, since tokens/s grow with the batch."""
    for at, by_name in enumerate(rates.values()):
        for n, (name, rate) in enumerate(by_name.items()):
            bar = panel.bar(at + 0.16 * n, rate / by_name["sync"], 0.15, color=COLORS[name])
            panel.bar_label(bar, [f"{rate:.0f}"], fontsize=8)
    names = [label.removeprefix("SmolLM2 ").replace(", ", "\n") for label in rates]
    panel.set_xticks([at + 0.32 for at in range(len(rates))], names)
    panel.set(title="SmolLM2-135M, tokens/s", ylabel="relative to sync")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    panel.legend(handles=handles, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
