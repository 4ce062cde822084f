"""What the machine gives right now: read bandwidth and the peak of a matrix product. A number taken on a shared machine
means little without it.

    python benchmarks/probe.py        # one JSON object; takes a few seconds
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

READ_BYTES = 2**29  # far beyond any last-level cache
SECONDS = 1.0  # spent on each figure; the best pass counts
GEMM_ORDER = 2048
BF16_TRIAL_ORDER = 256  # without bf16 units a large product would take minutes, so a small one decides on the size


def probe() -> dict[str, float | int]:
    """Reads and multiplies on all the cores that this process may use. Takes about four seconds and READ_BYTES of memory.

    Returns cores, read_gb_s (GB/s), fp32_gflop_s and bf16_gflop_s (GFLOP/s of a square product).
    """
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    with torch.inference_mode():
        block = torch.ones(READ_BYTES // 4)
        read = READ_BYTES / _best_seconds(lambda: block.sum()) / 1e9
        fp32 = _gemm_gflop_s(torch, torch.float32, GEMM_ORDER)
        trial = _gemm_gflop_s(torch, torch.bfloat16, BF16_TRIAL_ORDER, seconds=0.1)
        bf16 = max(trial, _gemm_gflop_s(torch, torch.bfloat16, GEMM_ORDER if trial > 50 else 2 * BF16_TRIAL_ORDER))
    return {"cores": cores, "read_gb_s": round(read, 1), "fp32_gflop_s": round(fp32), "bf16_gflop_s": round(bf16)}


def probe_in_own_process() -> dict[str, Any]:
    """The same, without torch and its threads staying in the caller's process."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__))], capture_output=True, text=True, check=True, timeout=120
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _gemm_gflop_s(torch: Any, dtype: Any, order: int, seconds: float = SECONDS) -> float:
    left, right = torch.ones(order, order, dtype=dtype), torch.ones(order, order, dtype=dtype)
    return 2 * order**3 / _best_seconds(lambda: left @ right, seconds) / 1e9


def _best_seconds(work: Callable[[], object], seconds: float = SECONDS) -> float:
    work()
    best = float("inf")
    stop = time.perf_counter() + seconds
    while (began := time.perf_counter()) < stop:
        work()
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    print(json.dumps(probe()))
