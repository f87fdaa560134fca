"""Draw what async scheduling hides: ten steps of a synchronous loop above ten of an async one.

A step keeps the device busy for some 5 ms; after each, the caller needs some 2 ms for its tokens.
Of five rounds, each loop shows its fastest, since others may use the machine too.

Writes overlap.png, and overlap.json for chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.busy import BusyModel, spin
from neuron_streams.decode import DecodeLoop, SamplingParams, StepTrace
from neuron_streams.decode.trace import ROWS

STEPS, WARM, ROUNDS = 10, 6, 5
MODES = {"synchronous": False, "asynchronous": True}
COLORS = {
    "schedule": "#e69f00",
    "prepare": "#56b4e9",
    "launch": "#0072b2",
    "decode": "#009e73",
    "read": "#cc79a7",
    "update": "#d55e00",
    "use the tokens": "#8c8c8c",
}
MEANINGS = {"decode": "the step on the device", "read": "wait for the tokens, read them"}


def fastest(model: BusyModel, host_ms: float, async_scheduling: bool) -> StepTrace:
    rounds = (record(model, host_ms, async_scheduling) for _ in range(ROUNDS))
    return min(rounds, key=step_ms)


def record(model: BusyModel, host_ms: float, async_scheduling: bool) -> StepTrace:
    """The last ten steps of a loop, and the caller's work behind them."""
    params = SamplingParams(max_tokens=WARM + STEPS, ignore_eos=True)
    with DecodeLoop(model, async_scheduling=async_scheduling) as loop:
        for number in range(model.batch_buckets[0]):
            loop.add_request(str(number), [1, 2, 3], params)
        with loop.trace(max_steps=STEPS) as trace:
            while loop.has_unfinished_requests():
                if loop.step():
                    with trace.span("use the tokens"):
                        spin(host_ms / 1e3)
    return trace


def step_ms(trace: StepTrace) -> float:
    """From one step's start on the device to the next one's, on average."""
    starts = [record.device.start for record in trace.records if record.device]
    return (starts[-1] - starts[0]) / (len(starts) - 1) * 1e3


def draw(traces: dict[str, StepTrace], path: Path) -> None:
    """One panel for each trace, on one scale."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 5.2), layout="constrained", facecolor="white")
    panels = figure.subplots(len(traces), sharex=True)
    for panel, (mode, trace) in zip(panels, traces.items(), strict=True):
        _draw_rows(panel, trace)
        panel.set_title(f"{mode}: {step_ms(trace):.1f} ms a step", loc="left", fontsize=11)
    panels[-1].set_xlabel("ms")
    panels[-1].set_xlim(left=-0.5)
    figure.suptitle("Ten decode steps: what async scheduling hides", fontweight="bold")
    legend = [Patch(color=color, label=MEANINGS.get(name, name)) for name, color in COLORS.items()]
    figure.legend(
        handles=legend,
        loc="outside lower center",
        ncols=len(legend),
        frameon=False,
        fontsize=9,
        handlelength=1,
        columnspacing=1.4,
    )
    figure.savefig(path, dpi=110)


def _draw_rows(panel: Any, trace: StepTrace) -> None:
    spans = trace.spans
    origin = min(span.start for span in spans)
    for span in spans:
        at, color = ROWS.index(span.row), COLORS[span.name]
        place = (span.start - origin) * 1e3, (span.end - span.start) * 1e3
        # A white edge parts neighbours; one of its own color keeps a short span from vanishing.
        edge = "white" if place[1] > 1 else color
        panel.broken_barh([place], (at - 0.35, 0.7), facecolor=color, edgecolor=edge, linewidth=1)
    for number, step in enumerate(trace.records, 1):
        if step.device is not None:
            middle = (step.device.start + step.device.end) / 2 - origin
            panel.text(middle * 1e3, 2, number, ha="center", va="center", color="white")
    panel.set_yticks(range(len(ROWS)), ROWS)
    panel.set_ylim(len(ROWS) - 0.5, -0.5)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    parser.add_argument("--device-ms", type=float, default=5.0, metavar="MS")
    parser.add_argument("--host-ms", type=float, default=2.0, metavar="MS")
    options = parser.parse_args(argv)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        install = "pip install -e '.[pictures]' -c constraints.txt"
        print(f"overlap_picture: matplotlib is not installed; run: {install}", file=sys.stderr)
        return 1
    model = BusyModel(options.device_ms)
    traces = {mode: fastest(model, options.host_ms, MODES[mode]) for mode in MODES}
    options.out.mkdir(parents=True, exist_ok=True)
    draw(traces, options.out / "overlap.png")
    events = [e for n, (mode, t) in enumerate(traces.items()) for e in t.chrome_events(mode, n)]
    (options.out / "overlap.json").write_text(json.dumps({"traceEvents": events}))
    for mode, trace in traces.items():
        print(f"{mode:13} {step_ms(trace):6.2f} ms a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
