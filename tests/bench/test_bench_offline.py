"""`ropeway bench throughput | latency | startup`: against an engine that counts, and once with a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import tokenizer

from ropeway.bench import latency, offline, startup, throughput
from ropeway.cli import main
from ropeway.config import Config, build_config
from ropeway.engine.client import EngineClient
from ropeway.engine.process_client import InProcessEngineClient
from ropeway.engine.step import KVCapacity, ModelRunnerOutput, SchedulerOutput
from ropeway.server.tokenizer import Tokenizer


class Handle:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class CountingExecutor:
    """Each token is the number of its position. What it was asked to do is kept."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.homes: list[str | None] = []
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []
        self.num_cached: list[int] = []
        self.closed = False

    def start(self) -> KVCapacity:
        self.homes.append(os.environ.get("ROPEWAY_HOME"))
        phases = {"load": 0.25, "kv": 0.5}
        return KVCapacity(257, 16, 512, 8000, "float32", "stub", "Stub", startup_seconds=phases)

    def submit(self, plan: SchedulerOutput) -> Handle:
        for row in plan.added:
            self.prompts.append(row.token_ids[: row.num_prompt_tokens])
            self.seeds.append(row.sampling.seed)
            self.num_cached.append(row.num_computed_tokens)
            assert row.sampling.ignore_eos
            assert row.sampling.temperature == 1.0
        ends = [start + count for start, count in zip(plan.start_positions, plan.num_tokens, strict=True)]
        tokens = [[end] if samples else [] for end, samples in zip(ends, plan.samples, strict=True)]
        errors = {}
        for row, end in enumerate(ends):
            if end == self.fails_at:
                tokens[row], errors[row] = [], "the logits were not numbers"
        return Handle(ModelRunnerOutput(plan.step_id, tokens, errors=errors))

    def close(self) -> None:
        self.closed = True


class StubParts:
    """An engine in a thread, and every one that was made."""

    model_id = "stub"

    def __init__(self, config: Config, **options: Any) -> None:
        self._config = config
        self._options = options
        self.executors: list[CountingExecutor] = []

    def client(self) -> EngineClient:
        executor = CountingExecutor(**self._options)
        self.executors.append(executor)
        return InProcessEngineClient(self._config, lambda: executor)

    def tokenizer(self) -> Tokenizer:
        return tokenizer()


class Bench:
    """Runs a command line as main() does, with stub engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self._path = folder / "result.json"
        self.options: dict[str, Any] = {}
        self.parts: StubParts
        self.config: Config
        self.out = self.err = ""

        def make(config: Config) -> StubParts:
            self.config = config
            self.parts = StubParts(config, **self.options)
            return self.parts

        monkeypatch.setattr(offline, "EngineParts", make)
        for name in [name for name in os.environ if name.startswith("ROPEWAY_")]:
            monkeypatch.delenv(name)

    def run(self, *arguments: str) -> int:
        code = main(["bench", *arguments])
        self.out, self.err = self._capsys.readouterr()
        return code

    def result(self, *arguments: str) -> dict[str, Any]:
        assert self.run(*arguments, "--output-json", str(self._path)) == 0
        assert all(executor.closed for executor in self.parts.executors)
        return json.loads(self._path.read_text())

    @property
    def executor(self) -> CountingExecutor:
        (executor,) = self.parts.executors
        return executor


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Bench:
    return Bench(monkeypatch, capsys, tmp_path)


# throughput


def test_throughput_counts_requests_and_tokens(bench: Bench) -> None:
    result = bench.result("throughput", "--input-len", "20", "--output-len", "7", "--num-prompts", "12")
    assert list(result)[:6] == [
        "model_id", "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second",
    ]  # fmt: skip
    counts = {name: result[name] for name in result if name.startswith(("num_", "total_"))}
    assert counts == {
        "num_requests": 12, "total_num_tokens": 324, "total_prompt_tokens": 240, "total_output_tokens": 84,
    }  # fmt: skip
    seconds = result["elapsed_time"]
    assert result["requests_per_second"] == pytest.approx(12 / seconds)
    assert result["tokens_per_second"] == pytest.approx(324 / seconds)
    assert result["output_tokens_per_second"] == pytest.approx(84 / seconds)
    assert [len(prompt) for prompt in bench.executor.prompts] == [20] * 12
    assert len({tuple(prompt) for prompt in bench.executor.prompts}) == 12
    for word in ("Requests (req/s)", "240", "84"):
        assert word in bench.out


def test_throughput_with_several_answers_and_warm_ups(bench: Bench) -> None:
    arguments = ("--input-len", "20", "--output-len", "3", "--num-prompts", "4", "--n", "2", "--num-warmups", "3")
    result = bench.result("throughput", *arguments, "--disable-detokenize")
    assert (result["num_requests"], result["total_prompt_tokens"], result["total_output_tokens"]) == (4, 80, 24)
    prompts = [tuple(prompt) for prompt in bench.executor.prompts]
    warm, counted = prompts[:3], prompts[3:]
    assert not set(warm) & set(counted)
    assert counted[::2] == counted[1::2]
    assert len(set(bench.executor.seeds[3:])) == 8  # or the answers to one prompt would be the same


def test_throughput_takes_datasets_and_is_repeatable(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {index}"}) + "\n" for index in range(3)))
    custom = ("--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "5", "--output-len", "2")
    assert bench.result("throughput", *custom)["num_requests"] == 5
    assert len({tuple(prompt) for prompt in bench.executor.prompts}) == 3
    seen = []
    for seed in ("3", "3", "4"):
        bench.result(
            "throughput", "--dataset-name", "nano", "--max-total-len", "64", "--num-prompts", "4", "--seed", seed
        )
        seen.append(bench.executor.prompts)
        assert all(len(prompt) < 64 for prompt in seen[-1])
    assert seen[0] == seen[1] != seen[2]


# latency


def test_latency_of_a_batch(bench: Bench) -> None:
    arguments = ("--input-len", "40", "--output-len", "5", "--batch-size", "3", "--num-iters-warmup", "2")
    result = bench.result("latency", *arguments, "--num-iters", "4")
    assert len(result["latencies"]) == len(result["first_token_latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert sorted(result["percentiles"].values()) == list(result["percentiles"].values())
    assert all(first < whole for first, whole in zip(result["first_token_latencies"], result["latencies"], strict=True))
    prompts = bench.executor.prompts
    assert prompts == prompts[:3] * 6
    assert {len(prompt) for prompt in prompts} == {40}
    assert "Latency of a batch" in bench.out
    assert "each further step" in bench.out


@pytest.mark.parametrize(("flags", "is_cached"), [([], False), (["--enable-prefix-caching"], True)])
def test_latency_caches_no_prefix_unless_asked(bench: Bench, flags: list[str], is_cached: bool) -> None:
    bench.result("latency", "--input-len", "40", "--output-len", "1", "--num-iters", "2", "--batch-size", "1", *flags)
    assert any(bench.executor.num_cached) == is_cached
    assert "each further step" not in bench.out  # there is none


def test_latency_defaults_are_those_that_users_know() -> None:
    defaults = {flag.name: flag.default for flag in latency.flags() if isinstance(flag.default, int)}
    assert defaults == {
        "input_len": 32, "output_len": 128, "batch_size": 8, "n": 1, "num_iters_warmup": 10, "num_iters": 30,
    }  # fmt: skip


# startup


def test_startup_cold_and_warm(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_HOME", "/warm")
    result = bench.result("startup", "--num-iters-cold", "2", "--num-iters-warmup", "1", "--num-iters-warm", "3")
    homes = [executor.homes[0] for executor in bench.parts.executors]
    assert homes[2:] == ["/warm"] * 4
    assert len({*homes[:2], "/warm"}) == 3  # each cold start has an empty home of its own
    assert not any(Path(home).exists() for home in homes[:2] if home)
    assert os.environ["ROPEWAY_HOME"] == "/warm"
    for kind, count in (("cold", 2), ("warm", 3)):
        for name in ("startup", "first_token"):
            times = result[f"{kind}_{name}_times"]
            assert len(times) == count
            assert result[f"avg_{kind}_{name}_time"] == pytest.approx(sum(times) / count)
            assert result[f"{kind}_{name}_percentiles"]["99"] <= max(times)
        ready = result[f"{kind}_startup_times"]
        assert all(a < b for a, b in zip(ready, result[f"{kind}_first_token_times"], strict=True))
        assert result[f"avg_{kind}_phases"] == {"load": 0.25, "kv": 0.5}


def test_startup_without_cold_starts(bench: Bench) -> None:
    result = bench.result("startup", "--num-iters-cold", "0", "--num-iters-warmup", "0", "--num-iters-warm", "1")
    assert not any("cold" in name for name in result)
    assert "ROPEWAY_HOME" not in os.environ
    assert "Cold" not in bench.out


# Flags and faults


def test_engine_flags_reach_the_engine(bench: Bench) -> None:
    run = ("latency", "--num-iters", "1", "--num-iters-warmup", "0", "--output-len", "2")
    assert bench.run(*run, "org/model", "--max_num_seqs", "7", "--load-format=dummy", "--seed", "9", "-q", "none") == 0
    config = bench.config
    assert (config.model.model, config.model.load_format, config.model.seed) == ("org/model", "dummy", 9)
    assert config.scheduler.max_num_seqs == 7
    assert "--quantization is ignored" in bench.err
    assert build_config({}).cache.enable_prefix_caching
    assert bench.run("throughput", "--num-prompts", "1", "--input-len", "2") == 0
    assert bench.config.cache.enable_prefix_caching
    assert bench.config.model.model == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["throughput", "--input-len", "500", "--output-len", "20"],
            "500 tokens and 20 output tokens is more than the 512",
        ),
        (["latency", "--input-len", "512", "--output-len", "1"], "512"),
        (["throughput", "--dataset-name", "custom"], "--dataset-path"),
        (["throughput", "--backend", "hf"], "--backend"),
        (["throughput", "--num-prompts", "0"], "--num-prompts"),
        (["latency", "--batch-size", "0"], "--batch-size"),
        (["latency", "--num-iters", "0"], "--num-iters"),
        (["latency", "--port", "80"], "--port"),
        (["latency", "--use-beam-search"], "--use-beam-search"),
        (["startup", "--num-iters-cold", "-1"], "--num-iters-cold"),
        (["startup", "--num-iters-cold", "0", "--num-iters-warm", "0"], "--num-iters-warm"),
        (["startup", "--block-size", "0"], "--block-size"),
        (["latency", "a", "--model", "b"], "two models"),
    ],
)
def test_what_cannot_be_is_refused(bench: Bench, arguments: list[str], words: str) -> None:
    assert bench.run(*arguments) == 2
    assert words in bench.err
    assert bench.err.count("\n") == 1


def test_a_result_that_cannot_be_written(bench: Bench, tmp_path: Path) -> None:
    arguments = ("--num-iters", "1", "--num-iters-warmup", "0", "--output-len", "2")
    assert bench.run("latency", *arguments, "--output-json", str(tmp_path)) == 2
    assert str(tmp_path) in bench.err


@pytest.mark.parametrize("name", ["throughput", "latency"])
def test_a_request_that_fails_ends_the_run(bench: Bench, name: str) -> None:
    bench.options = {"fails_at": 36}
    assert bench.run(name, "--input-len", "32", "--output-len", "8") == 1
    assert "the logits were not numbers" in bench.err
    assert bench.executor.closed


def test_help_tells_the_commands_own_flags_first(capsys: pytest.CaptureFixture[str]) -> None:
    for module in (throughput, latency, startup):
        name = module.__name__.rpartition(".")[2]
        assert main(["bench", name, "--help"]) == 0
        text = capsys.readouterr().out
        own = [option for flag in module.flags() for option in flag.opts]
        assert [option for option in own if option not in text] == []
        assert text.index("--output-json") < text.index("--max-model-len")
        assert "--api-key" not in text
        for section in (module.HELP, (module.__doc__ or "")):
            assert section


@pytest.mark.real_model
def test_a_real_engine(tmp_path: Path) -> None:
    """Through the console script: the flags, the engine's own process, the result."""
    path = tmp_path / "result.json"
    flags = ["--num-iters-cold", "0", "--num-iters-warmup", "0", "--num-iters-warm", "1", "--output-json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "ropeway", "bench", "startup", *flags, "--max-model-len", "64", "--num-threads", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    (ready,), (first,) = result["warm_startup_times"], result["warm_first_token_times"]
    assert 0 < ready < first
    assert result["avg_warm_phases"]["load"] > 0
    assert "until the first token" in done.stdout
    assert re.search(r"phase: load, mean .*\d", done.stdout)
