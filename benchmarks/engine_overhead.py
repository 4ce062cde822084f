"""The engine's own time per step in steady decode: schedule plus update behind a stub executor.

    python benchmarks/engine_overhead.py

Beside each figure stands vLLM 0.32's scheduler alone on a 2-core Zen 5 machine (schedule + update, measured with the
same method). The machines differ, so the ratio is a rough one.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from pathlib import Path
from typing import Any

from stub import stub_engine, write_result

from ropeway.protocol import AddRequest, SamplingParams

VLLM_MICROSECONDS = {16: 102 + 44, 128: 685 + 309, 256: 1365 + 632}


def measure(num_running: int, num_steps: int) -> tuple[list[float], list[float]]:
    engine = stub_engine(num_blocks=num_running * 128, max_num_seqs=num_running, max_num_batched_tokens=8192)
    for request_id in range(num_running):
        prompt = [(request_id * 37 + position) % 1000 for position in range(100 + request_id % 16)]
        engine.handle(AddRequest(request_id, prompt, SamplingParams(max_tokens=1900), 0.0))
    prompt_tokens = num_running * 108
    for _ in range(prompt_tokens // 8192 + 20):
        engine.step()
    assert len(engine.scheduler.running) == num_running
    schedule, update = [], []
    gc.collect()
    for _ in range(num_steps):
        outputs = engine.step()
        assert outputs is not None
        assert len(outputs.token_ids) == num_running
        schedule.append(outputs.stats.schedule_seconds * 1e6)
        update.append(outputs.stats.update_seconds * 1e6)
    return schedule, update


def main() -> None:
    parser = argparse.ArgumentParser(description="schedule + update per step, behind a stub executor")
    parser.add_argument("--running", type=int, nargs="+", default=[16, 128, 256, 1024])
    parser.add_argument("--steps", type=int, default=800, help="a multiple of the block size, so that growth is in it")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    print(
        f"{'running':>8} {'schedule µs':>12} {'update µs':>12} {'sum µs':>10} {'median':>8} {'vLLM µs':>9} {'ratio':>7}"
    )
    for num_running in args.running:
        schedule, update = measure(num_running, args.steps)
        total = [a + b for a, b in zip(schedule, update, strict=True)]
        mean, median = statistics.mean(total), statistics.median(total)
        peer = VLLM_MICROSECONDS.get(num_running)
        ratio = f"{peer / mean:.1f}x" if peer else ""
        print(
            f"{num_running:8} {statistics.mean(schedule):12.1f} {statistics.mean(update):12.1f} {mean:10.1f} "
            f"{median:8.1f} {peer or '':>9} {ratio:>7}"
        )
        result[str(num_running)] = {"mean_us": mean, "median_us": median, "min_us": min(total), "max_us": max(total)}
    write_result(args.out, "engine_overhead", result)


if __name__ == "__main__":
    main()
