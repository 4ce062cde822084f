"""`ropeway bench serve` from its flags to its files, against a scripted server."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_fakes import (
    CLOSE,
    MODEL,
    Request,
    chat_events,
    chunked,
    completion_events,
    json_answer,
    openai_server,
    plain,
    tokenizer,
    tokenizer_folder,
)

import ropeway.bench.serve
from ropeway.bench.datasets import SampleRequest
from ropeway.bench.plot import over_time
from ropeway.bench.report import RequestOutcome
from ropeway.bench.serve import command, request_body
from ropeway.bench.serve_options import ServeOptions, make_options
from ropeway.cli import main
from ropeway.errors import ConfigError

SMALL = ["--num-prompts", "4", "--random-input-len", "10", "--random-output-len", "3"]


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeOptions]:
    """The options that a command line would run with."""
    seen: list[ServeOptions] = []

    def run(options: ServeOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(ropeway.bench.serve, "run", run)

    def parse(*arguments: str) -> ServeOptions:
        assert main(["bench", "serve", *arguments]) == 0
        return seen.pop()

    return parse


def answers(request: Request) -> Any:
    """As many tokens as were asked for, in either API."""
    body = request.body
    if "messages" in body:
        count = body["max_completion_tokens"]
        return chunked(chat_events([" word"] * count, usage=(12, count)))
    return chunked(completion_events([" word"] * body["max_tokens"], usage=(len(body["prompt"]), body["max_tokens"])))


# Flags

Parse = Callable[..., ServeOptions]


def test_defaults_are_those_that_users_know(parse: Parse) -> None:
    options = parse()
    assert (options.backend, options.base_url, options.endpoint) == (
        "openai",
        "http://127.0.0.1:8000",
        "/v1/completions",
    )
    assert (options.request_rate, options.burstiness, options.max_concurrency) == (math.inf, 1.0, None)
    assert (options.percentile_metrics, options.metric_percentiles) == (["ttft", "tpot", "itl"], [99.0])
    assert (options.seed, options.num_warmups, options.label, options.self_timed) == (0, 0, "openai", False)
    dataset = options.dataset
    assert (dataset.dataset_name, dataset.num_prompts, dataset.prompt_form) == ("random", 1000, "ids")
    assert (dataset.random_input_len, dataset.random_output_len, dataset.random_range_ratio) == (1024, 128, 0.0)
    assert options.body == {"stream": True, "stream_options": {"include_usage": True}}


def test_several_values_may_follow_one_flag(parse: Parse) -> None:
    options = parse(
        *("--goodput", "ttft:200", "tpot:50.5", "--metadata", "version=0.3", "tp=1", "--header", "x-a=1", "x-b=c=d"),
        *("--goodput=e2el:1000", "--metric-percentiles", "25,50,99.9"),
    )
    assert options.goodput == {"ttft": 200.0, "tpot": 50.5, "e2el": 1000.0}
    assert options.metadata == {"version": "0.3", "tp": "1"}
    assert options.headers == {"x-a": "1", "x-b": "c=d"}
    assert options.metric_percentiles == [25.0, 50.0, 99.9]


def test_spellings_and_shared_lengths(parse: Parse) -> None:
    options = parse("--num_prompts", "5", "--dataset-name", "prefix_repetition", "--input-len", "7", "--output-len=9")
    assert (options.dataset.num_prompts, options.dataset.dataset_name) == (5, "prefix_repetition")
    assert (options.dataset.random_input_len, options.dataset.prefix_repetition_output_len) == (7, 9)


def test_flags_that_change_nothing_are_accepted(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse("--trust-remote-code", "--tokenizer-mode", "auto", "--disable-tqdm", "--num-prompts", "3")
    assert options.dataset.num_prompts == 3
    assert capsys.readouterr().err.count("is ignored") == 2


def test_the_form_of_prompts(parse: Parse, tmp_path: Path) -> None:
    file = ["--dataset-path", str(tmp_path)]
    assert parse("--backend", "vllm").dataset.prompt_form == "ids"
    assert parse("--text-prompts").dataset.prompt_form == "text"
    assert parse("--dataset-name", "custom", *file).dataset.prompt_form == "text"
    chat = parse("--backend", "openai-chat", "--dataset-name", "sharegpt", *file)
    assert (chat.dataset.prompt_form, chat.endpoint) == ("chat", "/v1/chat/completions")
    assert parse("--dataset-name", "timed_trace", *file).self_timed
    assert not parse("--dataset-name", "timed_trace", *file, "--no-self-timed", "--request-rate", "3").self_timed


def test_where_the_server_is(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("--host", "::1", "--port", "81").base_url == "http://[::1]:81"
    assert parse("--base-url", "https://host/x").base_url == "https://host/x"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert parse().headers == {"Authorization": "Bearer secret"}
    assert parse("--header", "authorization=Basic x").headers == {"authorization": "Basic x"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "itl:5"], "ttft, tpot, e2el"),
        (["--goodput", "ttft:soon"], "milliseconds"),
        (["--goodput", "ttft"], "KEY:VALUE"),
        (["--metadata", "x"], "KEY=VALUE"),
        (["--percentile-metrics", "ttft,tps"], "tps is unknown"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--metric-percentiles", "p99"], "numbers"),
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--burstiness", "0"], "--burstiness"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--seed", "-1"], "--seed"),
        (["--extra-body", "{"], "not JSON"),
        (["--extra-body", "[]"], "JSON object"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], "does not go with"),
        (["--self-timed"], "timed_trace"),
        (["--dataset-name", "timed_trace", "--dataset-path", "x", "--request-rate", "2"], "--no-self-timed"),
        (["--dataset-name", "sonnet"], "sonnet"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--base-url", "localhost:8000"], "URL"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_group_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert [name for name in ("serve", "throughput", "latency", "startup") if name not in out] == []
    assert main(["bench", "nothing"]) == 2


# Bodies


def body_of(sample: SampleRequest, **flags: Any) -> Any:
    context = command.make_context("serve", [])
    return json.loads(request_body(make_options({**context.params, **flags}), MODEL, sample))


def test_bodies() -> None:
    common = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    ids = SampleRequest([1, 2], None, 2, 5)
    assert body_of(ids) == {**common, "prompt": [1, 2], "max_tokens": 5}
    assert body_of(SampleRequest(None, "a", 1, 5)) == {**common, "prompt": "a", "max_tokens": 5}
    messages = [{"role": "user", "content": "Hi"}]
    chat = SampleRequest(None, None, 1, 5, None, messages)
    assert body_of(chat, backend="openai-chat") == {**common, "messages": messages, "max_completion_tokens": 5}


def test_the_users_own_fields_win() -> None:
    body = body_of(
        SampleRequest([1], None, 1, 5),
        temperature=0.0,
        top_k=3,
        ignore_eos=True,
        extra_body='{"top_k": 4, "max_tokens": 6, "new": {"a": 1}}',
    )
    assert {name: body[name] for name in ("temperature", "top_k", "ignore_eos", "max_tokens", "new")} == {
        "temperature": 0.0,
        "top_k": 4,
        "ignore_eos": True,
        "max_tokens": 6,
        "new": {"a": 1},
    }


# Runs


def bench(url: str, *arguments: str) -> int:
    return main(["bench", "serve", "--base-url", url, *SMALL, *arguments])


def test_a_run_and_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(answers).running() as server:
        code = bench(
            server.url,
            *("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--max-concurrency", "2"),
            *("--goodput", "e2el:60000", "--metadata", "machine=mine"),
        )
    assert code == 0
    assert server.most_answering <= 2
    posts = [request for request in server.requests if request.method == "POST"]
    assert [len(request.body["prompt"]) for request in posts] == [10] * 4
    assert {request.body["model"] for request in posts} == {MODEL}
    out = capsys.readouterr().out
    for text in ("Successful requests", "12", "P99", "Time to first token", "End-to-end"):
        assert text in out
    result = json.loads((tmp_path / "new" / "r.json").read_text())
    head = {
        "endpoint_type": "openai",
        "backend": "openai",
        "label": "openai",
        "model_id": MODEL,
        "tokenizer_id": str(tokenizer_folder()),
        "num_prompts": 4,
        "machine": "mine",
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 2,
        "completed": 4,
        "failed": 0,
        "total_input_tokens": 40,
        "total_output_tokens": 12,
        "input_lens": [10] * 4,
        "output_lens": [3] * 4,
        "generated_texts": [" word word word"] * 4,
        "errors": [""] * 4,
    }
    assert {name: result[name] for name in head} == head
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(4 / result["duration"])
    assert result["output_throughput"] == pytest.approx(12 / result["duration"])
    assert 1 <= result["max_concurrent_requests"] <= 2
    assert result["p50_ttft_ms"] == pytest.approx(np.percentile(result["ttfts"], 50) * 1000)
    assert result["p99_e2el_ms"] == pytest.approx(np.percentile(result["latencies"], 99) * 1000)
    assert result["mean_itl_ms"] == pytest.approx(np.mean(np.concatenate(result["itls"])) * 1000)
    assert [len(gaps) for gaps in result["itls"]] == [2] * 4
    assert {"date", "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "max_output_tokens_per_s"} <= set(result)


def test_without_detail_and_with_a_name_of_its_own(tmp_path: Path) -> None:
    with openai_server(answers).running() as server:
        assert bench(server.url, "--append-result", "--result-dir", str(tmp_path), "--label", "mine") == 0
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert path.name == f"mine-infqps-{MODEL}-{result['date']}.json"
    assert not {"ttfts", "generated_texts", "errors"} & set(result)


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(answers).running() as server:
        assert bench(server.url, "--backend", "openai-chat") == 0
    posts = [request for request in server.requests if request.method == "POST"]
    for request in posts:
        assert request.path == "/v1/chat/completions"
        (message,) = request.body["messages"]
        assert len(tokenizer().encode(message["content"])) == 10
    assert len(posts) == 4


def test_the_same_seed_sends_the_same_requests() -> None:
    sent = []
    for seed in ("0", "0", "1"):
        with openai_server(answers).running() as server:
            assert bench(server.url, "--seed", seed, "--max-concurrency", "1") == 0
        sent.append([request.body for request in server.requests])
    assert sent[0] == sent[1] != sent[2]


def test_a_trace_keeps_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,1\n0.1,6,2\n0.3,7,3\n")
    with openai_server(answers).running() as server:
        code = bench(
            server.url,
            *("--dataset-name", "timed_trace", "--dataset-path", str(path)),
            *("--save-result", "--save-detailed", "--result-filename", str(tmp_path / "r.json")),
        )
    assert code == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["input_lens"], result["output_lens"]) == ([5, 6, 7], [1, 2, 3])
    for start, arrival in zip(result["start_times"], (0.0, 0.1, 0.3), strict=True):
        assert start >= arrival - 0.05  # the first one may itself have been late


def test_warm_ups_are_other_prompts_and_not_counted(tmp_path: Path) -> None:
    with openai_server(answers).running() as server:
        options = ["--num-warmups", "3", "--save-result", "--result-filename", str(tmp_path / "r.json")]
        assert bench(server.url, *options) == 0
    prompts = [tuple(request.body["prompt"]) for request in server.requests if request.method == "POST"]
    assert len(prompts) == len(set(prompts)) == 7
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 4


def test_a_server_without_usage_is_counted_by_text_or_by_events(tmp_path: Path) -> None:
    text = tokenizer().decode(tokenizer().encode(" one, two"))
    count = len(tokenizer().encode(text))
    assert count > 2
    path = tmp_path / "r.json"
    for skip, expected in (([], count), (["--skip-tokenizer-init"], 2)):
        with openai_server(lambda request: chunked(completion_events([text[:4], text[4:]]))).running() as server:
            options = ["--save-result", "--save-detailed", "--result-filename", str(path), *skip]
            assert bench(server.url, *options) == 0
        result = json.loads(path.read_text())
        assert (result["output_lens"], result["input_lens"]) == ([expected] * 4, [10] * 4)


def test_names_of_the_model(tmp_path: Path) -> None:
    """--model says where the tokenizer is, --served-model-name what is asked for, the server the rest."""
    folder = str(tokenizer_folder())
    for options, models, name in (
        (["--model", folder], None, folder),
        (["--model", folder, "--served-model-name", "nick"], None, "nick"),
        (["--model", "org/name", "--tokenizer", folder], None, "org/name"),
        (["--model", folder], plain("404 Not Found", b""), folder),
        ([], json_answer({"data": [{"id": folder}]}), folder),
    ):
        with openai_server(answers, *([models] if models else [])).running() as server:
            assert bench(server.url, *options) == 0
        assert {request.body["model"] for request in server.requests if request.body} == {name}


# Failures


def test_some_requests_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def some(request: Request) -> Any:
        index = len([other for other in server.requests if other.method == "POST"])
        if index == 1:
            return plain("503 Service Unavailable", b'{"error": {"message": "busy"}}')
        return [*answers(request)[:2], CLOSE] if index == 2 else answers(request)

    with openai_server(some).running() as server:
        options = ["--max-concurrency", "1", "--save-result", "--result-filename", str(tmp_path / "r.json")]
        assert bench(server.url, *options) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 2, 6)
    err = capsys.readouterr().err
    assert "1 failed: HTTP 503: busy" in err
    assert "1 failed: the server closed the connection in the middle of the answer" in err


def test_all_requests_fail(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = plain("400 Bad Request", b'{"error": {"message": "no such model"}}')
    with openai_server(lambda request: refusal).running() as server:
        assert bench(server.url) == 1
    assert "4 failed: HTTP 400: no such model" in capsys.readouterr().err


def test_a_warm_up_that_fails_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(lambda request: plain("400 Bad Request", b"no")).running() as server:
        assert bench(server.url, "--num-warmups", "1") == 1
    assert len([request for request in server.requests if request.method == "POST"]) == 1
    assert "warm-up request failed: HTTP 400: no" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(answers).running() as server:
        url = server.url
    assert bench(url) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be reached: connection refused" in line
    assert "--ready-check-timeout-sec" in line
    assert bench(url, "--ready-check-timeout-sec", "0.1") == 1


def test_a_server_that_is_starting_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ropeway.bench.serve, "READY_POLL_SECONDS", 0.01)
    starting = openai_server(answers, plain("503 Service Unavailable", b"{}"))
    with starting.running() as server:
        assert bench(server.url) == 1
        assert "answers 503" in capsys.readouterr().err
        script = server.script
        server.script = lambda request: script(request) if len(server.requests) < 5 else ready(request)
        ready = openai_server(answers).script
        assert bench(server.url, "--ready-check-timeout-sec", "20") == 0


def test_a_server_that_lists_no_models_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(answers, plain("404 Not Found", b"")).running() as server:
        assert bench(server.url) == 1
    assert "--model" in capsys.readouterr().err


def test_no_tokenizer_to_be_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(answers).running() as server:
        assert bench(server.url, "--tokenizer", str(tmp_path)) == 2
    assert "tokenizer.json" in capsys.readouterr().err


# Plot


def test_a_plot_lies_beside_the_result(tmp_path: Path) -> None:
    with openai_server(answers).running() as server:
        assert bench(server.url, "--plot", "--save-result", "--result-filename", str(tmp_path / "r.json")) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main(["bench", "serve", "--plot"]) == 2
    assert "ropeway[bench]" in capsys.readouterr().err


def test_what_is_drawn() -> None:
    outcomes = [
        RequestOutcome(output_len=4, start=10.0, token_times=[10.5, 11.5, 12.25, 12.5]),
        RequestOutcome(output_len=2, start=11.0, token_times=[11.25]),
        RequestOutcome(output_len=9, start=0.0, token_times=[5.0], error="failed"),
    ]
    series = over_time(outcomes)
    assert series["time"].tolist() == [0.5, 1.5, 2.5]
    assert series["ttft"][50][:2] == [500.0, 250.0]
    assert math.isnan(series["ttft"][50][2])
    assert series["itl"][50][1:] == [1000.0, 500.0]
    assert series["tokens_per_s"].tolist() == [1.0, 3.0, 4.0]  # the last bin is half a second long
    assert over_time([])["tokens_per_s"].tolist() == [0.0]


def test_options_report_config_errors() -> None:
    context = command.make_context("serve", [])
    with pytest.raises(ConfigError):
        make_options({**context.params, "burstiness": -1.0})
