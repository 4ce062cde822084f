"""What the engine benchmarks share: an executor that computes nothing, and an engine built around it.

The stub answers every sampling row with one fixed token, so what remains of a step is the engine's own time.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from ropeway.engine.core import EngineCore
from ropeway.engine.kv_cache import KVCacheManager
from ropeway.engine.policy import POLICIES
from ropeway.engine.scheduler import Scheduler
from ropeway.engine.step import KVCapacity, ModelRunnerOutput, SchedulerOutput


class StubHandle:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class StubExecutor:
    def start(self) -> KVCapacity:
        raise NotImplementedError("the benchmarks size the pool themselves")

    def submit(self, plan: SchedulerOutput) -> StubHandle:
        return StubHandle(ModelRunnerOutput(plan.step_id, [[7] if samples else [] for samples in plan.samples]))

    def close(self) -> None:
        pass


def stub_engine(
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 16384,
    prefix_caching: bool = True,
) -> EngineCore:
    """num_blocks: usable ones."""
    scheduler = Scheduler(
        KVCacheManager(num_blocks + 1, block_size, prefix_caching),
        POLICIES["fcfs"](),
        time.perf_counter,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    return EngineCore(scheduler, StubExecutor(), time.perf_counter)


def write_result(path: Path | None, name: str, result: dict[str, Any]) -> None:
    """One JSON file with the figures and where they come from. Nothing is written without a path."""
    if path is None:
        return
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    record = {"benchmark": name, "commit": commit, "machine": platform.processor() or platform.machine(), **result}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
