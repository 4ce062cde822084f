"""The whole path from requests to tokens, in this process: golden tokens, the nano workload, idle time while decoding.

Owns: the small models, the workload, the roofline's formula. Must not know: kernels. Called by: check.py.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Context, Finding, at_least, at_most, holds

from ropeway.config import build_config
from ropeway.engine.core import EngineCore, build_core
from ropeway.protocol import AddRequest, SamplingParams
from ropeway.worker.executor import LocalExecutor

LONG_GAP = 5e-6  # seconds; kernels of one graph follow each other within 1 to 2 microseconds
DATASHEET_BANDWIDTH = 4.8e12  # of an H200; rooflines elsewhere are often given against it

_TINY = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**_TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gemma3": {  # windows on all layers but the last, and other norms
        **_TINY,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 64,
    },
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    output_len: int
    temperature: float = 0.0


class Engine:
    """An engine with its executor in this process. Closes on exit."""

    def __init__(self, model: dict[str, Any], context: Context, **flags: Any) -> None:
        """flags: names of ropeway.config's fields."""
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(model))
        config = build_config({"load_format": "dummy", "device": context.device.type, "seed": context.seed, **flags})
        self._executor = LocalExecutor(config, folder)
        self._context = context
        self.core: EngineCore
        self.core, self.ready = build_core(config, self._executor, time.monotonic)
        self._ids = itertools.count()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.core.close()
        self._folder.cleanup()
        gc.collect()  # the runner and its graphs know each other
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()

    def add(self, job: Job) -> int:
        number = next(self._ids)
        sampling = SamplingParams(
            max_tokens=job.output_len, temperature=job.temperature, ignore_eos=True, seed=number + 1
        )
        self.core.handle(AddRequest(number, job.prompt, sampling, time.monotonic()))
        return number

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """All at once; the tokens of each."""
        numbers = [self.add(job) for job in jobs]
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        while not self.core.idle:
            self._context.check_time()
            outputs = self.core.step()
            if outputs is None:
                continue
            if outputs.errors:
                raise RuntimeError(f"requests ended in errors: {outputs.errors}")
            ends = itertools.accumulate(outputs.token_counts, initial=0)
            for number, (begin, end) in zip(outputs.request_ids, itertools.pairwise(ends), strict=True):
                tokens[number] += outputs.token_ids[begin:end]
        return [tokens[number] for number in numbers]


# --- golden ---------------------------------------------------------------------------------------------------------


def golden(context: Context) -> Iterator[Finding]:
    """Greedy tokens of tiny models: with graphs, without, and on the CPU with plain torch, all in float32; then bf16
    with graphs and without."""
    on_gpu = context.device.type == "cuda"
    source = random.Random(context.seed)
    lengths, steps = ([1, 7, 130, 15, 64, 33], 40) if on_gpu else ([1, 7, 18], 4)
    for name, model in TINY_MODELS.items():
        jobs = [Job([source.randrange(1000) for _ in range(length)], steps) for length in lengths]
        flags = {"block_size": 16, "num_gpu_blocks_override": 400, "max_num_seqs": 8, "max_num_batched_tokens": 96}
        cpu = Context(torch.device("cpu"), True, context.seed, context.deadline)
        answers: dict[str, list[list[int]]] = {}
        with Engine(model, cpu, attention_backend="torch", dtype="float32", **flags) as engine:
            answers["cpu"] = engine.run(jobs)
        for dtype in ("float32", "bfloat16") if on_gpu else ("float32",):
            for mode in ("graphs", "eager") if on_gpu else ("eager",):
                eager = {"enforce_eager": mode == "eager"} if on_gpu else {}
                with Engine(model, context, attention_backend="triton", dtype=dtype, **eager, **flags) as engine:
                    answers[f"{mode} {dtype}"] = engine.run(jobs)
            if on_gpu:
                same = answers[f"graphs {dtype}"] == answers[f"eager {dtype}"]
                yield holds(f"{name}, {dtype}: graphs = eager", same)
        yield holds(
            f"{name}, float32: Triton kernels = torch on the CPU",
            answers["eager float32"] == answers["cpu"],
            note=f"{agreement(answers['eager float32'], answers['cpu']):.1%} of tokens",
        )


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


# --- the nano workload ----------------------------------------------------------------------------------------------


def nano_jobs(count: int = 256, shortest: int = 100, longest: int = 1024, vocab: int = 10000) -> list[Job]:
    """The published workload: Python's generator at seed 0 draws all prompts, then all output lengths."""
    source = random.Random(0)
    prompts = [[source.randint(0, vocab - 1) for _ in range(source.randint(shortest, longest))] for _ in range(count)]
    return [Job(prompt, source.randint(shortest, longest), temperature=0.6) for prompt in prompts]


def decode_roofline(model: dict[str, Any], jobs: list[Job], bandwidth: float, itemsize: int = 2) -> float:
    """Tokens per second if decoding did nothing but read memory, each byte once per step.

    Sum over the steps t = 1 .. max(output_len) - 1 of (W + sum over the rows still running of (prompt_len + t) * K),
    over the bandwidth, is the time; sum of output_len over it, the rate. W: bytes of all weights, a tied head once. K:
    bytes of K and V of one token over all layers. All requests decode from the first step on, and prefill costs
    nothing: so no engine can reach it. bandwidth in bytes per second.
    """
    hidden, head_dim, layers = model["hidden_size"], model["head_dim"], model["num_hidden_layers"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    per_layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * model["intermediate_size"]
    tables = model["vocab_size"] * hidden * (1 if model.get("tie_word_embeddings") else 2)
    weights = itemsize * (layers * per_layer + tables)
    token = itemsize * 2 * layers * kv_heads * head_dim
    read = 0
    for job in jobs:
        steps = job.output_len - 1
        read += token * (steps * len(job.prompt) + steps * (steps + 1) // 2)
    read += weights * (max(job.output_len for job in jobs) - 1)
    return sum(job.output_len for job in jobs) * bandwidth / read


def nano(context: Context) -> Iterator[Finding]:
    """Every request is there at the start; the clock runs until the last token is."""
    if context.quick:
        jobs = nano_jobs(4, 3, 9, 1000)
        with Engine(
            TINY_MODELS["qwen3"], context, attention_backend="triton", num_gpu_blocks_override=100, max_num_seqs=8
        ) as engine:
            tokens = engine.run(jobs)
        yield holds("every request got its tokens", [len(row) for row in tokens] == [job.output_len for job in jobs])
        return
    jobs = nano_jobs()
    bandwidth = context.facts.get("bandwidth") or 4.3e12
    roofline = decode_roofline(QWEN3_06B, jobs, bandwidth)
    with Engine(QWEN3_06B, context, max_model_len=4096, max_num_seqs=256, enable_prefix_caching=False) as engine:
        yield Finding("start-up", sum(engine.ready.startup_seconds.values()), "s")
        # Graphs are captured and kernels compiled when first needed; a server meets that once, not with each workload.
        began = time.perf_counter()
        engine.run(jobs)
        yield Finding("the first time, with captures and compilation", time.perf_counter() - began, "s")
        times = []
        for _ in range(2):
            began = time.perf_counter()
            tokens = engine.run(jobs)
            times.append(time.perf_counter() - began)
        seconds = min(times)
        yield holds("every request got its tokens", [len(row) for row in tokens] == [job.output_len for job in jobs])
        rate = sum(map(len, tokens)) / seconds
        yield Finding("output", rate, "tok/s")
        yield Finding("time", seconds, "s", note=f"of {times[0]:.2f} and {times[1]:.2f}")
        context.facts["nano"] = rate
        yield Finding("roofline at the measured copy bandwidth", roofline, "tok/s")
        yield at_least("share of the decode roofline", rate / roofline, 0.75)
        datasheet = decode_roofline(QWEN3_06B, jobs, DATASHEET_BANDWIDTH)
        yield Finding("share of it at 4.8 TB/s", rate / datasheet, note=f"{datasheet:.0f} tok/s")


# --- idle time ------------------------------------------------------------------------------------------------------


def idle(context: Context) -> Iterator[Finding]:
    """256 rows of Qwen3-0.6B decode; a trace of the device tells when it did nothing.

    Idle is the sum of all gaps above LONG_GAP: shorter ones lie between kernels of the same graph, which no host can
    close. They are told apart, as is the step's time against the time that the device was busy.
    """
    steps = 40
    jobs = [Job(job.prompt[:512], 400, temperature=0.6) for job in nano_jobs()]
    flags = {"max_model_len": 4096, "max_num_seqs": 256, "enable_prefix_caching": False}
    with Engine(QWEN3_06B, context, kv_cache_memory_bytes=60 * 2**30, **flags) as engine:
        for job in jobs:
            engine.add(job)
        decoding = 0
        while decoding < 30:  # all are past their prompts, and the graph is captured
            context.check_time()
            outputs = engine.core.step()
            full = outputs is not None and outputs.stats.num_new_decode_tokens == len(jobs)
            decoding = decoding + 1 if full else 0
        walls = []
        for _ in range(steps):
            began = time.perf_counter()
            engine.core.step()
            walls.append(time.perf_counter() - began)
        context.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(steps):
                engine.core.step()
            context.synchronize()
        spans = device_spans(trace)
        engine.core.close()
    yield Finding("step of 256 rows, wall time", statistics.median(walls) * 1e3, "ms")
    if not spans:
        yield holds("the profiler saw the device", False)
        return
    busy, gaps = busy_and_gaps(spans)
    total = busy + sum(gaps)
    yield Finding("device busy per step", busy / steps * 1e3, "ms", note="traced")
    yield Finding("gaps within graphs", sum(gap for gap in gaps if gap <= LONG_GAP) / total, note="share of the time")
    yield Finding("longest gap", max(gaps, default=0.0) * 1e6, "us")
    yield at_most("device idle between kernels of the host", sum(gap for gap in gaps if gap > LONG_GAP) / total, 0.01)


def device_spans(trace: Any) -> list[tuple[float, float]]:
    """Begin and end in seconds of all that the device did, from a finished profile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return [
        (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events if event.get("cat", "") in kinds
    ]


def busy_and_gaps(spans: list[tuple[float, float]]) -> tuple[float, list[float]]:
    """Seconds in which at least one span was open, and the lengths of all pauses in between."""
    spans = sorted(spans)
    busy, gaps, begin, end = 0.0, [], *spans[0]
    for start, stop in spans[1:]:
        if start > end:
            busy += end - begin
            gaps.append(start - end)
            begin = start
        end = max(end, stop)
    return busy + end - begin, gaps
