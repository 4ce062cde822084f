"""From per-request timings to numbers: metrics under the names of `vllm bench serve`, the table, the JSON file.

Owns: the definitions of TTFT, TPOT, ITL, E2EL and goodput, their statistics, how they are printed and saved. Must not
know: HTTP, datasets, clocks. Called by: bench.serve, bench.throughput, bench.latency, bench.startup.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ropeway.errors import ConfigError

# metric -> (short name, what it is)
METRIC_TITLES = {
    "ttft": ("TTFT", "Time to first token"),
    "tpot": ("TPOT", "Time per output token (without the first)"),
    "itl": ("ITL", "Inter-token latency"),
    "e2el": ("E2EL", "End-to-end latency"),
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class RequestOutcome:
    """One request as the client saw it. Times are seconds of one clock."""

    prompt_len: int = 0  # tokens, as is the next; what the server says, if it says it
    output_len: int = 0
    start: float = 0.0  # when it was sent
    token_times: list[float] = field(default_factory=list)  # receipt of each event that carried output
    text: str = ""
    error: str = ""  # empty: it succeeded

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.start if self.token_times else 0.0

    @property
    def latency(self) -> float:
        """From sending to the last token."""
        return self.token_times[-1] - self.start if self.token_times else 0.0

    @property
    def tpot(self) -> float | None:
        """None for answers of one token, which have none."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None

    @property
    def itls(self) -> list[float]:
        times = self.token_times
        return [after - before for before, after in itertools.pairwise(times)]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one metric, in its own unit. None throughout where there was no value."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: dict[float, float | None]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one run. Rates are per second of its duration."""

    duration: float  # seconds, from the first request sent to the last answer complete
    completed: int
    failed: int
    total_input_tokens: int  # of completed requests, as are all below
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None  # None: no objective was given
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float  # the best whole second
    max_concurrent_requests: int  # the most in flight at one time
    ttft: Statistics  # milliseconds, as are all below
    tpot: Statistics
    itl: Statistics
    e2el: Statistics


def statistics(values: Sequence[float], percentiles: Iterable[float]) -> Statistics:
    """Percentiles are interpolated linearly between the values; std is the population's."""
    if not values:
        return Statistics(None, None, None, dict.fromkeys(percentiles))
    array = np.asarray(values, dtype=np.float64)
    return Statistics(
        float(array.mean()),
        float(np.median(array)),
        float(array.std()),
        {wanted: float(np.percentile(array, wanted)) for wanted in percentiles},
    )


def measure(
    outcomes: Sequence[RequestOutcome],
    duration: float,
    *,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> Metrics:
    """duration: seconds. goodput: metric -> milliseconds; a request counts if it keeps all of them."""
    done = [outcome for outcome in outcomes if not outcome.error]
    input_tokens = sum(outcome.prompt_len for outcome in done)
    output_tokens = sum(outcome.output_len for outcome in done)
    best_second, most_concurrent = _peaks(done)
    rate = 1 / duration if duration > 0 else 0.0

    def milliseconds(values: Iterable[float]) -> Statistics:
        return statistics([value * 1000 for value in values], percentiles)

    return Metrics(
        duration=duration,
        completed=len(done),
        failed=len(outcomes) - len(done),
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(done) * rate,
        request_goodput=sum(_is_good(outcome, goodput) for outcome in done) * rate if goodput else None,
        output_throughput=output_tokens * rate,
        total_token_throughput=(input_tokens + output_tokens) * rate,
        max_output_tokens_per_s=best_second,
        max_concurrent_requests=most_concurrent,
        ttft=milliseconds(outcome.ttft for outcome in done if outcome.token_times),
        tpot=milliseconds(outcome.tpot for outcome in done if outcome.tpot is not None),
        itl=milliseconds(gap for outcome in done for gap in outcome.itls),
        e2el=milliseconds(outcome.latency for outcome in done if outcome.token_times),
    )


def _is_good(outcome: RequestOutcome, goodput: Mapping[str, float]) -> bool:
    seen = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(seen[name] * 1000 <= limit for name, limit in goodput.items())


def _peaks(done: Sequence[RequestOutcome]) -> tuple[float, int]:
    """Most output tokens within one of the seconds counted from the first start, and most requests in flight."""
    answered = [outcome for outcome in done if outcome.token_times]
    if not answered:
        return 0.0, 0
    first = min(outcome.start for outcome in answered)
    tokens: dict[int, float] = defaultdict(float)
    for outcome in answered:
        # An event may carry several tokens; then each event of the request stands for its share of them.
        weight = outcome.output_len / len(outcome.token_times)
        for time in outcome.token_times:
            tokens[int(time - first)] += weight
    # Ends sort before starts at the same time: the one made room for the other.
    changes = [(outcome.start, 1) for outcome in answered] + [(outcome.token_times[-1], -1) for outcome in answered]
    flying = itertools.accumulate(change for _, change in sorted(changes))
    return max(tokens.values()), max(flying)


# Results


def result_of(metrics: Metrics, selected: Iterable[str]) -> dict[str, Any]:
    """The JSON fields of a run: totals and rates, and the statistics of the selected metrics."""
    names = (
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
        "max_concurrent_requests",
    )  # fmt: skip
    result: dict[str, Any] = {name: getattr(metrics, name) for name in names}
    for name in selected:
        found: Statistics = getattr(metrics, name)
        result |= {f"mean_{name}_ms": found.mean, f"median_{name}_ms": found.median, f"std_{name}_ms": found.std}
        result |= {f"p{wanted:g}_{name}_ms": value for wanted, value in found.percentiles.items()}
    return result


def save_result(path: Path, result: Mapping[str, Any], *, append: bool = False) -> None:
    """One JSON object; with append, one more line of a file that may exist. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as stream:
            stream.write(json.dumps(result) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the result to {path}: {error.strerror}") from None


# The table


Rows = Sequence[tuple[str, Any]]


def print_table(title: str, sections: Sequence[tuple[str, Rows]]) -> None:
    """On standard output. sections: (heading or "", rows of (label, value)); None is shown as a dash."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for heading, rows in sections:
        table.add_section()
        if heading:
            table.add_row(f"[bold]{heading}[/bold]", "")
        for label, value in rows:
            table.add_row(label, _shown(value))
    Console().print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def statistics_rows(name: str, found: Statistics) -> tuple[str, Rows]:
    """A section of the table for one metric, in milliseconds."""
    short, title = METRIC_TITLES[name]
    rows: list[tuple[str, Any]] = [("mean", found.mean), ("median", found.median)]
    rows += [(f"P{wanted:g}", value) for wanted, value in found.percentiles.items()]
    return f"{title} ({short}), ms", rows
