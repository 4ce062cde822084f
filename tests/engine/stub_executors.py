"""Executors without a model, for tests of what stands around the core. Light to import: a spawned engine loads it."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ropeway.engine.step import Handle, KVCapacity, ModelRunnerOutput, SchedulerOutput
from ropeway.errors import ConfigError


@dataclass
class Done:
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


@dataclass
class PositionExecutor:
    """The token after position p is p + 1, so the k-th output of a prompt of n tokens is n + k, whatever the batch.

    The faults are armed by the prompt's first token, so that a test chooses the moment: CRASH raises in the step, KILL
    ends the process, HANG waits for `resume` (in-process only).
    """

    num_blocks: int = 65
    max_model_len: int = 4096
    step_seconds: float = 0.0
    num_steps: int = 0
    closed: bool = False
    resume: threading.Event = field(default_factory=threading.Event)

    CRASH = 60001
    KILL = 60002
    HANG = 60003

    def start(self) -> KVCapacity:
        return KVCapacity(
            num_blocks=self.num_blocks,
            block_size=16,
            max_model_len=self.max_model_len,
            vocab_size=65536,
            dtype="float32",
            device="stub",
            architecture="Stub",
            startup_seconds={"stub": 0.0},
        )

    def submit(self, plan: SchedulerOutput) -> Handle:
        for row in plan.added:
            if row.token_ids[0] == self.CRASH:
                raise RuntimeError(f"crash over {row.token_ids}")
            if row.token_ids[0] == self.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            if row.token_ids[0] == self.HANG:
                self.resume.wait(30)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.num_steps += 1
        ends = [start + count for start, count in zip(plan.start_positions, plan.num_tokens, strict=True)]
        return Done(
            ModelRunnerOutput(plan.step_id, [[end] if s else [] for end, s in zip(ends, plan.samples, strict=True)])
        )

    def close(self) -> None:
        self.closed = True


@dataclass
class Factory:
    """Picklable. ``once``: a file that the first engine makes and later ones find; then they fail as told."""

    step_seconds: float = 0.0
    config_error: str = ""
    crash: str = ""
    die: bool = False
    once: Path | None = None
    hang_seconds: float = 0.0

    def __call__(self) -> PositionExecutor:
        if self.once is not None and not self.once.exists():
            self.once.touch()
            return PositionExecutor(step_seconds=self.step_seconds)
        if self.die:
            os._exit(7)
        if self.hang_seconds:
            time.sleep(self.hang_seconds)
        if self.config_error:
            raise ConfigError(self.config_error)
        if self.crash:
            raise RuntimeError(self.crash)
        return PositionExecutor(step_seconds=self.step_seconds)
