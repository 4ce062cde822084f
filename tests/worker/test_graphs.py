"""Captured decode steps: when they are captured, that a replay is the eager step, and what would make one stale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fake_device import FakeDevice, StaleGraph
from ropeway.attention.base import AttentionMetadata
from ropeway.worker.batch import InputBatch
from ropeway.worker.graphs import DecodeGraphs, padded_sizes
from ropeway.worker.sampler import SamplingInputs
from static_attention import StaticAttention

MAX_BLOCKS, VOCAB = 5, 7


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert padded_sizes(most) == sizes


def test_many_rows_have_a_bound() -> None:
    assert padded_sizes(5000)[-1] == 512
    graphs = DecodeGraphs(lambda *_: torch.zeros(0), FakeDevice(), 5000, MAX_BLOCKS, 20)
    assert (graphs.padded_size(3), graphs.padded_size(9), graphs.padded_size(512)) == (4, 16, 512)
    assert graphs.padded_size(513) == 0


def forward(input_ids, positions, meta, logits_indices):
    """Depends on every input of a step, and on the order of its rows."""
    x = input_ids * 3 + positions * 5 + meta.slot_mapping * 7 + meta.seq_lens.long() * 11 + meta.plan.visible * 13
    x = x + meta.block_table[:, :MAX_BLOCKS].long().sum(-1) * 17 + meta.query_start_loc[1:].long() + logits_indices
    return (x[:, None] * torch.arange(1, VOCAB + 1)).float()


def batch_of(device: FakeDevice, size: int, seed: int) -> InputBatch:
    rng = np.random.default_rng(seed)

    def numbers(*shape: int, dtype=np.int64) -> np.ndarray:
        return rng.integers(0, 50, shape, dtype=dtype)

    seq_lens = numbers(size, dtype=np.int32)
    t = device.upload(
        {
            "input_ids": numbers(size),
            "positions": numbers(size),
            "slots": numbers(size),
            "starts": np.arange(size + 1, dtype=np.int32),
            "seq_lens": seq_lens,
            "table": numbers(size, MAX_BLOCKS, dtype=np.int32),
        }
    )
    meta = AttentionMetadata(t["starts"], t["seq_lens"], t["table"], t["slots"], size, size, 1, 20)
    meta.host_query_lens, meta.host_seq_lens = np.ones(size, np.int32), seq_lens
    meta = StaticAttention(device, 4).prepare(meta)
    return InputBatch(
        t["input_ids"], t["positions"], t["input_ids"], meta, [], t["input_ids"], SamplingInputs(num_rows=0)
    )


def run(device: FakeDevice, graphs: DecodeGraphs, size: int, seed: int, eager=forward) -> None:
    """One step, compared with the eager one."""
    with device.launching(), torch.inference_mode():
        batch = batch_of(device, size, seed)
        expected = eager(batch.input_ids, batch.positions, batch.meta, torch.arange(size))
        got = device.download([expected, graphs.run(batch)])
        device.end_step()
        expected, logits = got.result()
    assert torch.equal(logits, expected)
    assert logits.shape == (size, VOCAB)


def make(device: FakeDevice, step=forward, **options) -> DecodeGraphs:
    with device.launching(), torch.inference_mode():
        return DecodeGraphs(step, device, 8, MAX_BLOCKS, 20, **options)


@pytest.mark.parametrize("order", ["late", "early", "random"])
def test_the_first_use_is_eager_the_second_captures_and_all_replays_are_the_eager_step(order) -> None:
    device = FakeDevice(order)
    graphs = make(device)
    for seed, (size, captures, replays) in enumerate(
        [(4, 0, 0), (2, 0, 0), (4, 1, 1), (4, 1, 2), (8, 1, 2), (2, 2, 3), (4, 2, 4), (8, 3, 5), (2, 3, 6), (8, 3, 7)]
    ):
        run(device, graphs, size, seed)
        assert (device.num_captures, device.num_replays) == (captures, replays)


def test_without_capture_every_step_is_eager() -> None:
    device = FakeDevice()
    graphs = make(device, capture=False)
    for seed in range(4):
        run(device, graphs, 4, seed)
    assert device.num_captures == 0


def test_a_step_that_reads_what_was_uploaded_for_another_cannot_be_captured() -> None:
    device = FakeDevice()
    seen = []

    def leaky(input_ids, positions, meta, logits_indices):
        return forward(seen[-1].input_ids, positions, meta, logits_indices)

    graphs = make(device, leaky)
    with device.launching(), torch.inference_mode():
        for seed in range(2):
            seen.append(batch_of(device, 4, seed))
            if seed == 0:
                graphs.run(seen[-1])
            else:
                with pytest.raises(StaleGraph, match="staging"):
                    graphs.run(seen[-1])
            device.end_step()


def test_memory_that_went_away_after_the_capture_is_found() -> None:
    device = FakeDevice()
    weights = [torch.ones(VOCAB)]

    def step(*arguments):
        return forward(*arguments) * weights[0]

    graphs = make(device, step)
    for seed in range(3):
        run(device, graphs, 4, seed)
    weights[0] = torch.ones(VOCAB)  # as a cache that was allocated anew
    with pytest.raises(StaleGraph, match="freed"):
        run(device, graphs, 4, 3)


@pytest.mark.parametrize("name", ["_input_ids", "_positions", "_slot_mapping", "_seq_lens", "_block_table"])
def test_a_static_buffer_that_is_replaced_is_found(name: str) -> None:
    device = FakeDevice()
    graphs = make(device)
    for seed in range(3):
        run(device, graphs, 4, seed)
    with torch.inference_mode():
        setattr(graphs, name, getattr(graphs, name).clone())
    if name in ("_input_ids", "_positions"):
        with pytest.raises(StaleGraph, match="freed"):
            run(device, graphs, 4, 3)
        return
    with pytest.raises(AssertionError):  # its old one lives on in the captured metadata, with old values
        run(device, graphs, 4, 3)


def test_a_plan_that_is_not_copied_gives_another_answer() -> None:
    """Or the comparison above would prove nothing about plans."""
    device = FakeDevice()
    graphs = make(device)
    for seed in range(2):
        run(device, graphs, 4, seed)
    state = graphs._states[4]
    assert state.meta is not None
    plan = state.meta.plan
    state.meta = replace(state.meta, plan=replace(plan, rows=plan.rows.clone(), visible=plan.visible.clone()))
    with pytest.raises(AssertionError):
        run(device, graphs, 4, 2)
