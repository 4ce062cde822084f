"""How much allocated KV memory holds no token, and how full the pool is when the first request is preempted.

    python benchmarks/kv_waste.py                      # lengths drawn from the published quantiles of a chat trace
    python benchmarks/kv_waste.py --trace FILE.csv     # arrived_at,num_prefill_tokens,num_decode_tokens

All requests wait at the start, so the pool is under pressure all the time. Nothing is computed: the scheduler and the
block tables are the real ones, behind a stub executor.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
from bisect import bisect_left
from pathlib import Path

from stub import stub_engine, write_result

from ropeway.protocol import AddRequest, SamplingParams

# Quantiles of the Azure conversation trace of 2023 (prompt and output tokens), after Patel et al., "Splitwise", 2024.
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
PROMPT_TOKENS = (10, 1020, 2735, 4142, 7000)
OUTPUT_TOKENS = (5, 129, 424, 601, 1000)


def draw(quantiles: tuple[int, ...], source: random.Random) -> int:
    """A length whose distribution is linear between the known quantiles."""
    u = source.random()
    index = max(1, bisect_left(QUANTILES, u))
    share = (u - QUANTILES[index - 1]) / (QUANTILES[index] - QUANTILES[index - 1])
    return round(quantiles[index - 1] + share * (quantiles[index] - quantiles[index - 1]))


def read_trace(path: Path, count: int) -> list[tuple[int, int]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:count]
    return [(int(row["num_prefill_tokens"]), max(1, int(row["num_decode_tokens"]))) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="KV memory waste behind a stub executor")
    parser.add_argument("--trace", type=Path, help="CSV with request lengths")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    source = random.Random(args.seed)
    if args.trace:
        lengths = read_trace(args.trace, args.requests)
    else:
        lengths = [(draw(PROMPT_TOKENS, source), draw(OUTPUT_TOKENS, source)) for _ in range(args.requests)]
    engine = stub_engine(num_blocks=args.pool_tokens // args.block_size, block_size=args.block_size)
    for request_id, (prompt, output) in enumerate(lengths):
        tokens = [source.randrange(50_000) for _ in range(prompt)]
        engine.handle(AddRequest(request_id, tokens, SamplingParams(max_tokens=output), 0.0))
    waste, fill, running = [], [], []
    preemptions = steps = recomputed = 0
    fill_before_first = None
    while not engine.idle:
        outputs = engine.step()
        if outputs is None or not outputs.stats.num_used_blocks:
            continue
        stats = outputs.stats
        steps += 1
        if stats.num_new_preemptions and fill_before_first is None and fill:
            fill_before_first = fill[-1]
        preemptions += stats.num_new_preemptions
        recomputed += stats.num_new_recomputed_tokens
        waste.append(1 - stats.num_live_tokens / (stats.num_used_blocks * args.block_size))
        fill.append(stats.num_live_tokens / (stats.num_blocks * args.block_size))
        running.append(stats.num_running)
    result = {
        "requests": len(lengths),
        "block_size": args.block_size,
        "pool_tokens": args.pool_tokens,
        "steps": steps,
        "mean_running": round(statistics.mean(running), 1),
        "waste_mean_percent": round(100 * statistics.mean(waste), 3),
        "waste_max_percent": round(100 * max(waste), 3),
        "live_mean_percent": round(100 * statistics.mean(fill), 2),
        "live_before_first_preemption_percent": fill_before_first and round(100 * fill_before_first, 2),
        "preemptions": preemptions,
        "recomputed_tokens": recomputed,
    }
    for name, value in result.items():
        print(f"{name:40} {value}")
    write_result(args.out, "kv_waste", result)


if __name__ == "__main__":
    main()
