"""The pure parts of benchmarks/peers.py: what a stream of bytes says, ratios within rounds, the table and its JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from peers_lib.client import LoadError, Timing, timing
from peers_lib.report import BEST, Measurement, Spread, as_json, measure, ratios, table

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def frame(**fields: Any) -> bytes:
    text = b"data: " + json.dumps(fields).encode() + b"\n\n"
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"


def token(text: str = "a") -> bytes:
    return frame(choices=[{"index": 0, "text": text}])


def usage(tokens: int) -> bytes:
    return frame(choices=[], usage={"completion_tokens": tokens})


def entry(round_: int, system: str, tok_s: float, ttft: float = 10.0, concurrency: int = 8) -> Measurement:
    return Measurement(round_, concurrency, system, 4, 1.0, tok_s, ttft, 5.0)


def test_token_times_are_those_of_the_pieces_that_completed_their_frames() -> None:
    last = token("data: {not a frame}\n\n")
    pieces = [HEAD, token(), token() + last[:9], last[9:], usage(3) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]
    assert timing(1.0, pieces, [1.5, 2.0, 3.0, 4.0, 9.0], 3) == Timing(1.0, 2.0, 4.0, 3)


def test_one_piece_may_hold_head_and_frames() -> None:
    assert timing(1.0, [HEAD + token() + token() + usage(2)], [2.0], 2) == Timing(1.0, 2.0, 2.0, 2)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([HEAD, token(), usage(1)], "1 tokens came"),
        ([HEAD, token(), token()], "None tokens came"),
        ([HEAD, usage(2)], "in 0 frames"),
        ([HEAD, token(), b"data: {"], "within a frame"),
        ([HEAD, b"data: {]\n\n"], "no JSON"),
        ([HEAD, token(), frame(error={"message": "engine died"})], "engine died"),
        ([], "answered nothing"),
    ],
)
def test_an_incomplete_answer_is_an_error(pieces: list[bytes], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        timing(0.0, pieces, [1.0 + number for number in range(len(pieces))], 2)


def test_a_refusal_carries_its_status() -> None:
    with pytest.raises(LoadError, match="loading") as caught:
        timing(0.0, [b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error": "loading"}'], [1.0], 2)
    assert caught.value.status == 503


def test_measure() -> None:
    timings = [Timing(10.0, 10.5, 12.5, 5), Timing(11.0, 11.1, 14.0, 5), Timing(11.0, 11.3, 12.3, 5)]
    figures = measure(2, 3, "x", timings)
    assert (figures.round, figures.concurrency, figures.system, figures.requests) == (2, 3, "x", 3)
    assert figures.seconds == pytest.approx(4.0)
    assert figures.output_tok_s == pytest.approx(15 / 4)
    assert figures.ttft_ms == pytest.approx(300)
    assert figures.tpot_ms == pytest.approx(500)


def test_one_output_token_has_no_time_per_token() -> None:
    assert measure(0, 1, "x", [Timing(0.0, 1.0, 1.0, 1)]).tpot_ms == 0


def test_ratios_are_taken_within_rounds() -> None:
    # The machine runs at half speed in the second round: figures differ by two, each ratio is 1.5.
    measurements = [entry(0, "ropeway", 300), entry(0, "vllm", 200), entry(1, "ropeway", 150), entry(1, "vllm", 100)]
    found = {(ratio.peer, ratio.metric): ratio for ratio in ratios(measurements)}
    assert found["vllm", "output_tok_s"].spread == Spread(1.5, 1.5, 1.5)
    assert found["vllm", "output_tok_s"].rounds == 2


def test_the_best_peer_is_chosen_per_round_and_metric() -> None:
    measurements = [
        *(entry(0, "ropeway", 100, ttft=10), entry(0, "a", 50, ttft=40), entry(0, "b", 20, ttft=20)),
        *(entry(1, "ropeway", 100, ttft=10), entry(1, "a", 10, ttft=5), entry(1, "b", 80, ttft=20)),
    ]
    found = {(ratio.peer, ratio.metric): ratio.spread for ratio in ratios(measurements)}
    assert found[BEST, "output_tok_s"] == Spread(1.625, 1.25, 2.0)
    assert found[BEST, "ttft_ms"] == Spread(1.25, 0.5, 2.0)


def test_a_round_that_one_of_two_missed_does_not_count() -> None:
    measurements = [entry(0, "ropeway", 100), entry(0, "a", 50), entry(1, "ropeway", 100), entry(2, "a", 1)]
    (ratio,) = [ratio for ratio in ratios(measurements) if (ratio.peer, ratio.metric) == ("a", "output_tok_s")]
    assert (ratio.spread.median, ratio.rounds) == (2.0, 1)


def test_without_ropeway_there_are_figures_but_no_ratios() -> None:
    measurements = [entry(0, "a", 50), entry(0, "b", 60)]
    assert ratios(measurements) == []
    assert "50.0" in table(measurements, {}, {})
    assert BEST not in table(measurements, {}, {})


def test_table() -> None:
    measurements = [
        *(entry(0, "ropeway", 300), entry(0, "a", 200), entry(1, "ropeway", 330), entry(1, "a", 110)),
        *(entry(0, "ropeway", 40, concurrency=1), entry(0, "a", 20, concurrency=1)),
    ]
    text = table(measurements, {"ropeway": [2.0, 4.0], "a": [4.0, 4.0]}, {"b": "no AVX-512"})
    lines = text.splitlines()
    assert lines[0].startswith("clients  system")
    assert any(line.startswith("1 ") and " a " in line and "2.00x" in line for line in lines)
    assert any(
        line.startswith("8 ") and "155 (110 to 200)" in line and "2.25x (1.50 to 3.00)" in line for line in lines
    )
    assert "ropeway: 3.0 (2.0 to 4.0) s from start to first token" in lines
    assert "a: 4.0 s from start to first token; ropeway takes 0.75x (0.50 to 1.00) of it" in lines
    assert lines[-1] == "b: does not run here: no AVX-512"


def test_json_is_plain() -> None:
    record = json.loads(json.dumps(as_json([entry(0, "ropeway", 300), entry(0, "a", 200)])))
    assert record["measurements"][1]["system"] == "a"
    assert record["ratios"][0] == {
        "concurrency": 8,
        "peer": "a",
        "metric": "output_tok_s",
        "spread": {"median": 1.5, "low": 1.5, "high": 1.5},
        "rounds": 1,
    }


def test_a_spread_needs_a_value() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])
