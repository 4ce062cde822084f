"""What prefix caching costs when nothing is ever found, and what it gives when most of a prompt is shared.

    python benchmarks/prefix_cache.py               # all parts; the real ones run the demo model in this process
    python benchmarks/prefix_cache.py --stub-only

The cost lies in the engine alone (hashing, publishing, looking up), so it is measured there and set against the step:
wall-clock ratios of whole runs are shown too, but on a shared machine they cannot resolve half a percent.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from stub import stub_engine, write_result

from ropeway.engine.core import EngineCore, build_core
from ropeway.hashing import chain_hash
from ropeway.protocol import AddRequest, ResetPrefixCache, SamplingParams

VOCAB = 49152
request_ids = count()


@dataclass
class Run:
    seconds: float
    engine_seconds: float  # schedule and update
    steps: int
    hits: int
    queries: int


def run(engine: EngineCore, prompts: list[list[int]], max_tokens: int, caching: bool) -> Run:
    """All prompts at once, from a cold cache to the last token."""
    engine.handle(ResetPrefixCache())
    engine.scheduler.kv.enable_prefix_caching = caching
    for prompt in prompts:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        engine.handle(AddRequest(next(request_ids), prompt, sampling, time.monotonic()))
    engine_seconds = 0.0
    steps = hits = queries = 0
    began = time.perf_counter()
    while not engine.idle:
        outputs = engine.step()
        if outputs is not None:
            steps += 1
            engine_seconds += outputs.stats.schedule_seconds + outputs.stats.update_seconds
            hits += outputs.stats.num_new_prefix_hits
            queries += outputs.stats.num_new_prefix_queries
    return Run(time.perf_counter() - began, engine_seconds, steps, hits, queries)


def random_prompts(source: random.Random, number: int, length: int, shared: int = 0) -> list[list[int]]:
    stem = [source.randrange(VOCAB) for _ in range(shared)]
    return [[*stem, *(source.randrange(VOCAB) for _ in range(length - shared))] for _ in range(number)]


def hash_cost(block_size: int = 16) -> float:
    """Microseconds per block."""
    source = random.Random(0)
    blocks = [[source.randrange(VOCAB) for _ in range(block_size)] for _ in range(2000)]
    rounds = []
    for _ in range(7):
        parent = b""
        began = time.perf_counter()
        for block in blocks:
            parent = chain_hash(parent, block)
        rounds.append((time.perf_counter() - began) / len(blocks) * 1e6)
    return statistics.median(rounds)


def interleaved(
    engine: EngineCore, source: random.Random, rounds: int, number: int, length: int, max_tokens: int
) -> tuple[list[Run], list[Run]]:
    """Fresh random prompts in every round; off and on in turn."""
    off, on = [], []
    for _ in range(rounds):
        prompts = random_prompts(source, number, length)
        off.append(run(engine, prompts, max_tokens, False))
        on.append(run(engine, prompts, max_tokens, True))
    assert all(r.hits == 0 for r in (*on, *off))
    return off, on


def zero_hits(name: str, off: list[Run], on: list[Run], step_seconds: float) -> dict[str, Any]:
    cost = statistics.median(
        (a.engine_seconds / a.steps) - (b.engine_seconds / b.steps) for a, b in zip(on, off, strict=True)
    )
    ratios = sorted(a.seconds / b.seconds for a, b in zip(on, off, strict=True))
    share = 100 * cost / step_seconds
    print(
        f"{name}: caching adds {cost * 1e6:.1f} µs to a step of {step_seconds * 1e3:.1f} ms, {share:.2f} % "
        f"(wall time on/off: median {statistics.median(ratios):.4f}, {ratios[0]:.4f} to {ratios[-1]:.4f})",
        flush=True,
    )
    return {
        "microseconds_per_step": cost * 1e6,
        "step_ms": step_seconds * 1e3,
        "share_percent": share,
        "wall_ratios": ratios,
    }


def time_to_first_token(engine: EngineCore, prompt: list[int], caching: bool) -> float:
    engine.scheduler.kv.enable_prefix_caching = caching
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    began = time.perf_counter()
    engine.handle(AddRequest(next(request_ids), prompt, sampling, time.monotonic()))
    while not engine.idle:
        engine.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="cost and gain of prefix caching")
    parser.add_argument("--stub-only", action="store_true")
    parser.add_argument(
        "--step-ms", type=float, default=10.0, help="length of the step that the stub's cost is set against"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    source = random.Random(0)
    result: dict[str, Any] = {"hash_us_per_block": hash_cost()}
    print(f"hash of one block of 16 tokens: {result['hash_us_per_block']:.2f} µs", flush=True)
    stub = stub_engine(num_blocks=20_000, max_num_seqs=256)
    off, on = interleaved(stub, source, args.rounds, 512, 512, 128)
    result["stub"] = zero_hits("stub, 512 requests of 512 + 128 tokens", off, on, args.step_ms / 1e3)
    if not args.stub_only:
        # torch loads here; the stub parts run without it.
        from ropeway.config import build_config
        from ropeway.hub import resolve_model
        from ropeway.worker.executor import LocalExecutor

        config = build_config({"num_gpu_blocks_override": 3000})
        engine, _ = build_core(config, LocalExecutor(config, resolve_model("")), time.perf_counter)
        off, on = interleaved(engine, source, args.rounds, 16, 256, 64)
        step_seconds = statistics.median(r.seconds / r.steps for r in off)
        result["real"] = zero_hits("demo model, 16 requests of 256 + 64 tokens", off, on, step_seconds)
        engine.handle(ResetPrefixCache())
        prompts = random_prompts(source, 2 * args.rounds + 1, 1024, shared=768)
        time_to_first_token(engine, prompts[0], True)  # leaves the shared part in the cache
        cold, warm = [], []
        for index in range(args.rounds):
            cold.append(time_to_first_token(engine, prompts[1 + 2 * index], False))
            warm.append(time_to_first_token(engine, prompts[2 + 2 * index], True))
        ratios = sorted(b / a for a, b in zip(cold, warm, strict=True))
        result["shared_75_percent"] = {"ttft_ratio": ratios}
        print(
            f"1,024-token prompts that share 768: time to first token {statistics.median(ratios):.2f} of the cold one "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
        engine.close()
    write_result(args.out, "prefix_cache", result)


if __name__ == "__main__":
    main()
