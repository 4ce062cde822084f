"""Latency and throughput of one run over its time, as a picture.

Owns: the PNG. Must not know: how the run was made. Called by: bench.serve. matplotlib is an extra, imported here only.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ropeway.bench.report import RequestOutcome
from ropeway.errors import ConfigError

NUM_BINS = 60  # at most; no bin is shorter than a second
PERCENTILES = (50, 90, 99)


def check_installed() -> None:
    """Raises ConfigError that names the extra, before a long run is made for nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with `pip install 'ropeway[bench]'`")


def plot_run(path: Path, outcomes: Sequence[RequestOutcome], *, title: str) -> None:
    """Three panels over seconds since the first request: TTFT, ITL, output tokens per second. Raises ConfigError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = over_time(outcomes)
    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(3, 1, sharex=True)
    for panel, name in zip(panels[:2], ("ttft", "itl"), strict=True):
        for wanted in PERCENTILES:
            panel.plot(series["time"], series[name][wanted], marker=".", label=f"P{wanted}")
        panel.set_ylabel(f"{name.upper()} (ms)")
        panel.set_ylim(bottom=0)
        panel.legend(loc="upper right")
    panels[2].plot(series["time"], series["tokens_per_s"], marker=".", color="tab:green")
    panels[2].set_ylabel("output tokens per s")
    panels[2].set_ylim(bottom=0)
    panels[2].set_xlabel("seconds since the first request")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.suptitle(title)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write the plot to {path}: {error.strerror}") from None


def over_time(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """What is drawn, by bins of equal length: `time` (middle, s), `ttft` and `itl` (percentile -> ms, NaN where nothing
    came), `tokens_per_s`. A TTFT belongs to the bin of its first token, a gap to that of its later token."""
    done = [outcome for outcome in outcomes if not outcome.error and outcome.token_times]
    first = min((outcome.start for outcome in done), default=0.0)
    length = max((outcome.token_times[-1] for outcome in done), default=first) - first
    width = max(1.0, length / NUM_BINS)
    num_bins = max(1, math.ceil(length / width))
    ttfts: list[list[float]] = [[] for _ in range(num_bins)]
    itls: list[list[float]] = [[] for _ in range(num_bins)]
    tokens = np.zeros(num_bins)
    for outcome in done:
        bins = [min(num_bins - 1, int((time - first) / width)) for time in outcome.token_times]
        ttfts[bins[0]].append(outcome.ttft * 1000)
        for index, gap in zip(bins[1:], outcome.itls, strict=True):
            itls[index].append(gap * 1000)
        np.add.at(tokens, bins, outcome.output_len / len(bins))
    # The last bin may be cut short by the end of the run.
    lengths = np.minimum(width, max(length, 1e-9) - width * np.arange(num_bins))
    return {
        "time": width * (np.arange(num_bins) + 0.5),
        "ttft": {wanted: [_percentile(values, wanted) for values in ttfts] for wanted in PERCENTILES},
        "itl": {wanted: [_percentile(values, wanted) for values in itls] for wanted in PERCENTILES},
        "tokens_per_s": tokens / lengths,
    }


def _percentile(values: Sequence[float], wanted: float) -> float:
    return float(np.percentile(values, wanted)) if values else math.nan
