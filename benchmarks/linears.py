"""The native CPU linears alone: one row against the rate at which the cores can read, many against their peak.

    python benchmarks/linears.py                    # about a minute
    python benchmarks/linears.py --rounds 5 --models llama-3.2-1b --rows 1,256

A pass runs every linear of several layers and the head on weights that are far larger than the processor's cache. Each
round measures the machine right before and after a pass, so that every ratio is of neighbours in time; shown are the
median and the range over the rounds.

Read: bytes of weights per second over bytes per second of a plain read. Peak: multiply-adds per second, two operations
each, over the peak with all operands in registers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from stub import write_result

from ropeway_kernels import cpu

READ_BYTES = 2**28
PEAK_ITERATIONS = 400_000
WEIGHT_BYTES = 2**29  # of the layers that a pass takes, about
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Of one layer (q, k and v together; out; gate and up together; down), and of the head: outputs, inputs.
MODELS = {
    "smollm2-135m": ([(960, 576), (576, 576), (3072, 576), (576, 1536)], (49152, 576)),
    "qwen2.5-0.5b": ([(1152, 896), (896, 896), (9728, 896), (896, 4864)], (151936, 896)),
    "llama-3.2-1b": ([(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)], (128256, 2048)),
}


def main() -> None:
    options = _options()
    native = cpu.load()
    if native is None:
        raise SystemExit(cpu.why_not())
    results = []
    print(f"{'model':<14} {'rows':>5}  {'share of read':<20} share of peak")
    for name in options.models:
        layer, head = MODELS[name]
        layer_bytes = sum(n * k for n, k in layer) * DTYPES[options.dtype].itemsize
        shapes = layer * max(1, WEIGHT_BYTES // layer_bytes) + [head]
        weights = [native.pack(torch.randn(n, k).to(DTYPES[options.dtype])) for n, k in shapes]
        for rows in options.rows:
            record = {"model": name, "rows": rows, **_measure(native, weights, rows, options)}
            results.append(record)
            read, peak = (_text(record[key]) for key in ("share_of_read", "share_of_peak"))
            print(f"{name:<14} {rows:>5}  {read:<20} {peak}", flush=True)
    write_result(
        options.output, "linears", {"dtype": options.dtype, "threads": torch.get_num_threads(), "runs": results}
    )


def _measure(
    native: cpu.NativeKernels, weights: list[cpu.PackedWeight], rows: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    block = cpu.allocate(READ_BYTES // 4, torch.float32).fill_(1.0)
    inputs = {w.in_features: torch.randn(rows, w.in_features).to(DTYPES[options.dtype]) for w in weights}
    size = sum(w.data.nbytes for w in weights)
    operations = 2 * rows * sum(w.out_features * w.in_features for w in weights)

    def machine() -> tuple[float, float]:
        return native.read_rate(block), native.peak(PEAK_ITERATIONS)

    result: dict[str, list[float]] = {"share_of_read": [], "share_of_peak": []}
    for _ in range(options.rounds):
        before = machine()
        began = time.perf_counter()
        for weight in weights:
            native.linear(inputs[weight.in_features], weight)
        seconds = time.perf_counter() - began
        read, peak = (statistics.mean(pair) for pair in zip(before, machine(), strict=True))
        result["share_of_read"].append(size / seconds / read)
        result["share_of_peak"].append(operations / seconds / peak)
    return result


def _text(shares: list[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 256])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options: Any = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(MODELS)}")
    return options


if __name__ == "__main__":
    main()
