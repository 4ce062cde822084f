"""How the engine is put together from the configuration and what the executor found."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
from stub_executors import PositionExecutor

from ropeway.config import build_config
from ropeway.engine.core import build_core
from ropeway.engine.step import KVCapacity, SchedulerOutput
from ropeway.protocol import AddRequest, SamplingParams


@dataclass
class Recorder(PositionExecutor):
    largest_step: int = 0

    def start(self) -> KVCapacity:
        return replace(super().start(), step_tokens=48)

    def submit(self, plan: SchedulerOutput):
        self.largest_step = max(self.largest_step, sum(plan.num_tokens))
        return super().submit(plan)


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ({"max_num_seqs": 8}, 48),  # the device's own
        ({"max_num_seqs": 8, "max_num_batched_tokens": -1}, 48),
        ({"max_num_seqs": 64}, 64),  # never less than one token for each that may run
        ({"max_num_seqs": 8, "max_num_batched_tokens": 100}, 100),
    ],
)
def test_the_budget_of_a_step_is_the_devices_unless_the_user_gives_one(settings, largest):
    executor = Recorder()
    engine, _ = build_core(build_config(settings), executor, time.monotonic)
    sampling = SamplingParams(max_tokens=1)
    for request_id in range(4):
        engine.handle(AddRequest(request_id, list(range(1, 201)), sampling, time.monotonic()))
    while not engine.idle:
        engine.step()
    assert executor.largest_step == largest
