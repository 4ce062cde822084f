"""Metrics to the last digit, the table and the file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ropeway.bench.report import (
    Metrics,
    RequestOutcome,
    measure,
    print_table,
    result_of,
    save_result,
    statistics,
    statistics_rows,
)
from ropeway.errors import ConfigError

OUTCOMES = [
    # TTFT 0.5, gaps 0.25 and 0.5, TPOT 0.375, E2EL 1.25
    RequestOutcome(prompt_len=10, output_len=3, start=2.0, token_times=[2.5, 2.75, 3.25]),
    # TTFT 1, one gap of 1 that brought two tokens, TPOT 0.5, E2EL 2
    RequestOutcome(prompt_len=20, output_len=3, start=3.0, token_times=[4.0, 5.0]),
    # TTFT 0.25, no gap, no TPOT
    RequestOutcome(prompt_len=30, output_len=1, start=5.0, token_times=[5.25]),
    RequestOutcome(prompt_len=99, output_len=1, start=0.0, token_times=[9.0], error="HTTP 500: no"),
]


def metrics(goodput: dict[str, float] | None = None) -> Metrics:
    return measure(OUTCOMES, 4.0, percentiles=[50, 99.9], goodput=goodput)


def test_totals_and_rates() -> None:
    found = metrics()
    assert (found.completed, found.failed, found.duration) == (3, 1, 4.0)
    assert (found.total_input_tokens, found.total_output_tokens) == (60, 7)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (0.75, 1.75, 16.75)
    assert found.request_goodput is None


def test_times() -> None:
    found = metrics()
    assert found.ttft.mean == pytest.approx((500 + 1000 + 250) / 3)
    assert (found.ttft.median, found.tpot.mean, found.tpot.std) == (500.0, 437.5, 62.5)
    assert found.itl.mean == pytest.approx((250 + 500 + 1000) / 3)
    assert found.e2el.percentiles[50] == 1250.0
    assert found.e2el.percentiles[99.9] == pytest.approx(1250 + 0.998 * 750)


def test_peaks() -> None:
    found = metrics()
    # Seconds from 2.0: three tokens of the first in [2, 3) and [3, 4); 1.5 of the second at 4.0 and at 5.0; one at 5.25.
    assert found.max_output_tokens_per_s == 2.5
    assert found.max_concurrent_requests == 2


def test_one_request_after_another_is_never_two() -> None:
    outcomes = [RequestOutcome(output_len=1, start=float(at), token_times=[at + 1.0]) for at in range(5)]
    assert measure(outcomes, 5.0).max_concurrent_requests == 1


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 500}, 2),
        ({"ttft": 499.9}, 1),
        ({"ttft": 1000, "tpot": 375}, 2),  # an answer of one token keeps any TPOT
        ({"e2el": 1250, "tpot": 374}, 1),
        ({"e2el": 0}, 0),
        ({"ttft": 1e9, "tpot": 1e9, "e2el": 1e9}, 3),
    ],
)
def test_goodput_counts_requests_that_keep_every_objective(objectives: dict[str, float], good: int) -> None:
    assert metrics(objectives).request_goodput == good / 4


def test_statistics_of_nothing() -> None:
    found = statistics([], [99])
    assert (found.mean, found.median, found.std, found.percentiles) == (None, None, None, {99: None})


def test_a_run_in_which_nothing_succeeded() -> None:
    found = measure(OUTCOMES[3:], 1.0, goodput={"ttft": 1})
    assert (found.completed, found.failed, found.output_throughput, found.request_goodput) == (0, 1, 0.0, 0.0)
    assert found.max_concurrent_requests == 0
    json.dumps(result_of(found, ["ttft", "tpot", "itl", "e2el"]), allow_nan=False)


def test_the_fields_of_the_result() -> None:
    result = result_of(metrics(), ["ttft", "e2el"])
    assert list(result) == [
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
        "mean_ttft_ms",
        "median_ttft_ms",
        "std_ttft_ms",
        "p50_ttft_ms",
        "p99.9_ttft_ms",
        "mean_e2el_ms",
        "median_e2el_ms",
        "std_e2el_ms",
        "p50_e2el_ms",
        "p99.9_e2el_ms",
    ]
    assert result["median_ttft_ms"] == 500.0


def test_results_are_saved_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    save_result(path, {"a": 1})
    save_result(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    save_result(path, {"a": 3}, append=True)
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [2, 3]
    with pytest.raises(ConfigError, match="cannot write"):
        save_result(path / "below-a-file", {})


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = statistics_rows("ttft", dataclasses.replace(metrics().ttft, mean=1234.5678, median=None))
    print_table("Run", [("", [("Requests", 12345), ("Rate", "unlimited")]), rows])
    out = capsys.readouterr().out
    for text in ("Run", "12,345", "unlimited", "(TTFT), ms", "1,234.57", "P99.9"):
        assert text in out
    assert "median" in out
    assert "-" in next(line for line in out.splitlines() if "median" in line)
