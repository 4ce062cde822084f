"""The native CPU attention alone: decoding against the rate at which the cores can read, prefill against their peak.

    python benchmarks/attention.py                  # about two minutes
    python benchmarks/attention.py --rounds 3 --shapes smollm2-135m --dtypes bfloat16

Each round measures the machine, then the kernel over consecutive block ids, then over shuffled ones, so that every ratio
is of neighbours in time; shown are the median and the range over the rounds. The cache is far larger than the
processor's own: each call takes another layer of it.

Decode: bytes of K and V per second over bytes per second of a plain read of the same memory. Table: time over shuffled
blocks, over time over consecutive ones. Prefill: operations that the causal mask leaves, over the peak.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stub import write_result
from torch import Tensor

from ropeway_kernels import cpu

POOL_BYTES = 2**28
SAMPLE_SECONDS = 0.05
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    "smollm2-135m": Shape(9, 3, 64),
    "qwen2.5-0.5b": Shape(14, 2, 64),
    "llama-3.2-1b": Shape(32, 8, 64),
    "qwen3-0.6b": Shape(16, 8, 128),
    "one head per kv head": Shape(8, 8, 64),
}


class Step:
    """`batch` requests of `context` tokens of which the last `new` are computed, over as many layers as fit the pool."""

    def __init__(self, shape: Shape, dtype: torch.dtype, batch: int, context: int, new: int, block_size: int) -> None:
        blocks = -(-context // block_size)
        layer_shape = (batch * blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        layer_bytes = torch.Size(layer_shape).numel() * dtype.itemsize
        self.bytes_read = 2 * batch * context * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        visible = sum(range(context - new + 1, context + 1))
        self.operations = 4 * batch * shape.num_heads * shape.head_dim * visible
        # Layers of one size out of one pool; a random megabyte over and over is as good as random throughout.
        num_layers = max(1, POOL_BYTES // layer_bytes)
        self.pool = cpu.allocate(num_layers * layer_bytes // dtype.itemsize, dtype)
        pattern = torch.randn(2**18).to(dtype)
        for start in range(0, len(self.pool), len(pattern)):
            part = self.pool[start : start + len(pattern)]
            part.copy_(pattern[: len(part)])
        self.layers = self.pool.view(num_layers, *layer_shape)
        self.scale = shape.head_dim**-0.5
        self.q = torch.randn(batch * new, shape.num_heads, shape.head_dim).to(dtype)
        self.query_start_loc = torch.arange(0, batch * new + 1, new, dtype=torch.int32)
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32)
        self.consecutive = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
        self.shuffled = torch.randperm(batch * blocks).to(torch.int32).view(batch, blocks)

    def seconds(self, kernels: cpu.NativeKernels, block_table: Tensor) -> float:
        """Of one call, on average."""
        calls, layer = 0, 0
        began = time.perf_counter()
        while calls < 3 or time.perf_counter() - began < SAMPLE_SECONDS:
            kernels.attention(
                self.q, self.layers[layer], self.query_start_loc, self.seq_lens, block_table, scale=self.scale
            )
            calls, layer = calls + 1, (layer + 1) % len(self.layers)
        return (time.perf_counter() - began) / calls


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def text(values: dict[str, float]) -> str:
    return f"{values['median']:6.1%} ({values['min']:.1%} to {values['max']:.1%})"


def rounds(count: int, measure: Callable[[], tuple[float, ...]]) -> list[list[float]]:
    """One list per figure that `measure` gives; a first round warms up and is not counted."""
    measure()
    return [list(column) for column in zip(*(measure() for _ in range(count)), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="native attention: share of read bandwidth and of peak")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2-135m", "one head per kv head"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    kernels = cpu.load()
    if kernels is None:
        raise SystemExit(f"no native kernels: {cpu.why_not()}")
    kernels.set_num_threads(args.threads)
    print(f"{kernels.isa}, {args.threads} threads, blocks of {args.block_size}")
    results: list[dict[str, Any]] = []

    for name in args.shapes:
        for dtype in args.dtypes:
            for batch in args.batches:
                for context in args.contexts:
                    step = Step(SHAPES[name], DTYPES[dtype], batch, context, 1, args.block_size)

                    def decode(step: Step = step) -> tuple[float, ...]:
                        bandwidth = kernels.read_rate(step.pool)
                        consecutive = step.seconds(kernels, step.consecutive)
                        shuffled = step.seconds(kernels, step.shuffled)
                        return step.bytes_read / shuffled / bandwidth, shuffled / consecutive - 1, bandwidth

                    share, overhead, bandwidth = map(summary, rounds(args.rounds, decode))
                    print(
                        f"decode  {name:20} {dtype:8} batch {batch:2} context {context:5}: {text(share)} of "
                        f"{bandwidth['median'] / 1e9:.1f} GB/s, table {text(overhead)}",
                        flush=True,
                    )
                    results.append(
                        {"kind": "decode", "shape": name, "dtype": dtype, "batch": batch, "context": context}
                        | {"share": share, "table_overhead": overhead, "read_bytes_s": bandwidth}
                    )
            for prompt in args.prompts:
                step = Step(SHAPES[name], DTYPES[dtype], 1, prompt, prompt, args.block_size)

                def prefill(step: Step = step) -> tuple[float, ...]:
                    peak = kernels.peak()
                    return step.operations / step.seconds(kernels, step.shuffled) / peak, peak

                share, peak = map(summary, rounds(args.rounds, prefill))
                print(
                    f"prefill {name:20} {dtype:8} {prompt:5} tokens: {text(share)} of "
                    f"{peak['median'] / 1e9:.0f} GFLOP/s",
                    flush=True,
                )
                results.append(
                    {"kind": "prefill", "shape": name, "dtype": dtype, "prompt": prompt}
                    | {"share": share, "peak_flop_s": peak}
                )
    write_result(args.out, "attention", {"isa": kernels.isa, "threads": args.threads, "rows": results})


if __name__ == "__main__":
    main()
