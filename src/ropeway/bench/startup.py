"""`ropeway bench startup`: from the engine process's start to ready and to the first token, cold and warm.

Owns: the command's flags, the run, its result. Must not know: how the engine is made, what it does while it starts.
Called by: cli.

Cold: nothing that earlier starts have kept (packed weights, ...) is there. The model's files themselves are as warm in
the machine's page cache as they happen to be.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ropeway.bench.offline import Parts, Prompt, generate, percentiles_of, progress, run_async, started
from ropeway.bench.report import print_table, save_result
from ropeway.config import Config
from ropeway.errors import ConfigError

HELP = (
    "Start the engine again and again, without and with what earlier starts have kept, and measure how long it takes."
)
DEFAULTS: dict[str, Any] = {}
PROMPT = [10, 20, 30, 40, 50, 60, 70, 80]  # ids that every vocabulary has


def flags() -> list[click.Parameter]:
    """Besides the engine's own."""

    def count(name: str, default: int, help: str) -> click.Option:
        return click.Option([name], type=click.IntRange(0), default=default, show_default=True, help=help)

    return [
        count("--num-iters-cold", 3, "Starts without anything kept from earlier ones."),
        count("--num-iters-warmup", 1, "Starts in between, not counted, that leave something to keep."),
        count("--num-iters-warm", 3, "Starts after them."),
        click.Option(["--output-json"], metavar="FILE", help="Write the result here."),
    ]


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the start of the engine process."""

    ready: float
    first_token: float
    phases: dict[str, float]  # of the engine itself, by name


def run(config: Config, flags: dict[str, Any], parts: Parts) -> int:
    """Exit code. Raises ConfigError, EngineDeadError."""
    if not flags["num_iters_cold"] + flags["num_iters_warm"]:
        raise ConfigError("--num-iters-cold and --num-iters-warm are both 0: there is nothing to measure")
    return run_async(_run(parts, **flags))


async def _run(
    parts: Parts, *, num_iters_cold: int, num_iters_warmup: int, num_iters_warm: int, output_json: str | None
) -> None:
    starts: dict[str, list[Start]] = {"cold": [], "warm": []}
    with progress("starts", num_iters_cold + num_iters_warmup + num_iters_warm) as advance:
        for _ in range(num_iters_cold):
            with nothing_kept():
                starts["cold"].append(await measure(parts))
            advance()
        for number in range(-num_iters_warmup, num_iters_warm):
            start = await measure(parts)
            if number >= 0:
                starts["warm"].append(start)
            advance()
    result: dict[str, Any] = {"model_id": parts.model_id}
    for kind, found in starts.items():
        if found:
            result |= result_of(kind, found)
    report(starts)
    if output_json is not None:
        save_result(Path(output_json), result)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """An empty home for the engines started within: they inherit it. The model has been found before."""
    before = os.environ.get("ROPEWAY_HOME")
    with tempfile.TemporaryDirectory(prefix="ropeway-cold-", ignore_cleanup_errors=True) as folder:
        os.environ["ROPEWAY_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["ROPEWAY_HOME"]
            else:
                os.environ["ROPEWAY_HOME"] = before


async def measure(parts: Parts) -> Start:
    client = parts.client()
    began = time.perf_counter()
    async with started(client) as ready:
        ready_after = time.perf_counter() - began
        answer = await generate(client, Prompt(PROMPT, 1), seed=0)
        return Start(ready_after, answer.first_token - began, ready.startup_seconds)


def result_of(kind: str, starts: Sequence[Start]) -> dict[str, Any]:
    """kind: "cold" or "warm"."""
    result: dict[str, Any] = {}
    for name, values in (
        ("startup", [start.ready for start in starts]),
        ("first_token", [start.first_token for start in starts]),
    ):
        result |= {
            f"avg_{kind}_{name}_time": statistics.fmean(values),
            f"{kind}_{name}_times": values,
            f"{kind}_{name}_percentiles": percentiles_of(values),
        }
    return result | {f"avg_{kind}_phases": _phases(starts)}


def _phases(starts: Sequence[Start]) -> dict[str, float]:
    names = dict.fromkeys(name for start in starts for name in start.phases)
    return {name: statistics.fmean(start.phases.get(name, 0.0) for start in starts) for name in names}


def report(starts: dict[str, list[Start]]) -> None:
    sections = []
    for kind, found in starts.items():
        if not found:
            continue
        rows: list[tuple[str, Any]] = [("starts", len(found))]
        for title, values in (
            ("until ready", [start.ready for start in found]),
            ("until the first token", [start.first_token for start in found]),
        ):
            rows += [(f"{title}, median", statistics.median(values)), (f"{title}, longest", max(values))]
        rows += [(f"phase: {name}, mean", seconds) for name, seconds in _phases(found).items()]
        sections.append((f"{kind.capitalize()}, s", rows))
    print_table("Start-up benchmark", sections)
