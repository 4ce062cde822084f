"""Figures of one level, ratios within rounds, and the table. Pure: no clock, no process, no file.

Called by: benchmarks/peers.py and its test.

The machine's speed drifts by half within minutes. So a ratio is only ever taken between two systems of the same round,
which ran one after the other, and the median and the range are taken over those ratios, never over absolute figures of different rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from peers_lib.client import Timing

OURS = "ropeway"
BEST = "best peer"


@dataclass(frozen=True)
class Measurement:
    """One system at one level in one round. Times are medians over the requests."""

    round: int
    concurrency: int
    system: str
    requests: int
    seconds: float  # first request sent to last token
    output_tok_s: float
    ttft_ms: float
    tpot_ms: float  # time per output token after the first; 0 where there is only one


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError without values."""
        known = sorted(values)
        if not known:
            raise ValueError("a spread needs at least one value")
        return cls(median(known), known[0], known[-1])


@dataclass(frozen=True)
class Ratio:
    """Ropeway divided by a peer, over the rounds that both were measured in. metric: output_tok_s, ttft_ms or tpot_ms."""

    concurrency: int
    peer: str
    metric: str
    spread: Spread
    rounds: int


def measure(round_: int, concurrency: int, system: str, timings: Sequence[Timing]) -> Measurement:
    """timings: of all requests of the level, at least one."""
    seconds = max(timing.last_token for timing in timings) - min(timing.sent for timing in timings)
    per_token = [
        (timing.last_token - timing.first_token) / (timing.output_tokens - 1)
        for timing in timings
        if timing.output_tokens > 1
    ]
    return Measurement(
        round=round_,
        concurrency=concurrency,
        system=system,
        requests=len(timings),
        seconds=seconds,
        output_tok_s=sum(timing.output_tokens for timing in timings) / seconds,
        ttft_ms=1e3 * median(timing.first_token - timing.sent for timing in timings),
        tpot_ms=1e3 * median(per_token) if per_token else 0.0,
    )


def ratios(measurements: Sequence[Measurement]) -> list[Ratio]:
    """Of every metric at every level, against each peer, and against whichever peer was best in each round."""
    found = []
    for concurrency in sorted({entry.concurrency for entry in measurements}):
        level = [entry for entry in measurements if entry.concurrency == concurrency]
        peers = list(dict.fromkeys(entry.system for entry in level if entry.system != OURS))
        for metric, better in (("output_tok_s", max), ("ttft_ms", min), ("tpot_ms", min)):
            values = {(entry.round, entry.system): float(getattr(entry, metric)) for entry in level}
            for round_ in {entry.round for entry in level}:
                others = [values[round_, peer] for peer in peers if values.get((round_, peer))]
                if others:
                    values[round_, BEST] = better(others)
            for peer in [*peers, BEST]:
                pairs = [
                    (value, values[round_, peer])
                    for (round_, system), value in values.items()
                    if system == OURS and values.get((round_, peer))
                ]
                if pairs:
                    spread = Spread.of(ours / theirs for ours, theirs in pairs)
                    found.append(Ratio(concurrency, peer, metric, spread, len(pairs)))
    return found


def table(measurements: Sequence[Measurement], ready: Mapping[str, Sequence[float]], skipped: Mapping[str, str]) -> str:
    """Everything a reader wants to see, as text.

    ready: seconds from start to first token per system and round. skipped: why a system has no figures.
    """
    compared = {(ratio.concurrency, ratio.peer, ratio.metric): ratio.spread for ratio in ratios(measurements)}
    rows = [["clients", "system", "output tok/s", "TTFT ms", "TPOT ms", "ropeway: tok/s", "TTFT", "TPOT"]]
    for concurrency in sorted({entry.concurrency for entry in measurements}):
        level = [entry for entry in measurements if entry.concurrency == concurrency]
        systems = list(dict.fromkeys(entry.system for entry in level))
        for system in [*systems, BEST]:
            entries = [entry for entry in level if entry.system == system]
            metrics = ("output_tok_s", "ttft_ms", "tpot_ms")
            figures = [
                _figure(Spread.of(getattr(entry, metric) for entry in entries)) if entries else "" for metric in metrics
            ]
            factors = [_factor(compared.get((concurrency, system, metric))) for metric in metrics]
            if entries or any(factors):
                rows.append([str(concurrency), system, *figures, *factors])
    lines = _aligned(rows)
    for system, seconds in ready.items():
        own = f"{system}: {_figure(Spread.of(seconds))} s from start to first token"
        pairs = [ours / theirs for ours, theirs in zip(ready.get(OURS, []), seconds, strict=False)]
        lines.append(own + (f"; ropeway takes {_factor(Spread.of(pairs))} of it" if pairs and system != OURS else ""))
    lines += [f"{system}: does not run here: {reason}" for system, reason in skipped.items()]
    return "\n".join(lines)


def as_json(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """The measurements and their ratios in plain types."""
    return {
        "measurements": [vars(entry) for entry in measurements],
        "ratios": [{**vars(ratio), "spread": vars(ratio.spread)} for ratio in ratios(measurements)],
    }


def _figure(spread: Spread) -> str:
    digits = 1 if spread.median < 100 else 0
    middle = f"{spread.median:.{digits}f}"
    return middle if spread.low == spread.high else f"{middle} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def _factor(spread: Spread | None) -> str:
    if spread is None:
        return ""
    middle = f"{spread.median:.2f}x"
    return middle if spread.low == spread.high else f"{middle} ({spread.low:.2f} to {spread.high:.2f})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if number == 0 or (number + 1 < len(rows) and rows[number + 1][0] != row[0]):
            lines.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
    return lines
