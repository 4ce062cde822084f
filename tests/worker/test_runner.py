"""The model runner on a tiny decoder: plans in, tokens out, rows that fail or run once too often."""

from __future__ import annotations

import json

import pytest
import torch

from ropeway.attention.torch_ref import TorchAttention
from ropeway.engine.step import NewRow, SchedulerOutput
from ropeway.model.loader import load_model
from ropeway.model.parallel import SINGLE
from ropeway.model.registry import parse_config
from ropeway.protocol import SamplingParams
from ropeway.worker.device import CpuDevice
from ropeway.worker.runner import ModelRunner, allocate_kv_cache

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
BLOCK = 4


class Poison:
    """A decoder whose logits, and whose KV through its hidden states, turn to NaN for one token id."""

    def __init__(self, decoder, token: int) -> None:
        self.decoder, self.token = decoder, token

    def __call__(self, input_ids, positions, kv_layers, backend, meta, logits_indices):
        logits = self.decoder(input_ids, positions, kv_layers, backend, meta, logits_indices)
        slots = meta.slot_mapping[input_ids == self.token]
        for layer in kv_layers:
            layer[slots // BLOCK, :, :, slots % BLOCK] = float("nan")
        logits[input_ids[logits_indices] == self.token] = float("nan")
        return logits


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return load_model(
        folder,
        parse_config(TINY),
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="dummy",
        seed=1,
        group=SINGLE,
    )


def make_runner(model, num_blocks: int = 40) -> ModelRunner:
    backend = TorchAttention(BLOCK)
    cache = allocate_kv_cache(
        backend,
        num_blocks=num_blocks,
        num_layers=3,
        block_size=BLOCK,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return ModelRunner(
        model, backend, CpuDevice(), cache, block_size=BLOCK, max_num_seqs=4, max_model_len=128, vocab_size=120
    )


def new_row(request_id: int, tokens: list[int], blocks: list[int], **sampling) -> NewRow:
    params = SamplingParams(**{"max_tokens": 50, "temperature": 0.0, **sampling})
    return NewRow(request_id, 0, tokens, len(tokens), 0, blocks, params)


def plan(*rows: tuple[int, int, int, bool], **parts) -> SchedulerOutput:
    ids, starts, counts, samples = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    return SchedulerOutput(7, ids, [0] * len(ids), starts, counts, samples, total_tokens=sum(counts), **parts)


def generate(runner: ModelRunner, request_id: int, prompt: list[int], blocks: list[int], steps: int, **sampling):
    """Alone, prompt in one step; the row is removed at the end."""
    result = runner.execute(
        plan((request_id, 0, len(prompt), True), added=[new_row(request_id, prompt, blocks, **sampling)])
    )
    tokens = list(result.token_ids[0])
    for position in range(len(prompt), len(prompt) + steps - 1):
        tokens += runner.execute(plan((request_id, position, 1, True))).token_ids[0]
    runner.execute(plan(removed=[request_id]))
    return tokens


PROMPTS = [[5, 9, 33, 7, 2, 110], [4], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
BLOCKS = [[9, 3, 5, 21], [1, 30, 2], [12, 4, 8, 17, 6]]


def test_rows_together_equal_rows_alone_with_chunks_and_late_arrivals(decoder):
    alone = [generate(make_runner(decoder), 0, p, b, 5) for p, b in zip(PROMPTS, BLOCKS, strict=True)]
    assert all(len(tokens) == 5 for tokens in alone)
    runner = make_runner(decoder)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def run(step: SchedulerOutput) -> None:
        result = runner.execute(step)
        assert result.step_id == 7
        assert result.execute_seconds > 0
        for request_id, samples, tokens in zip(step.request_ids, step.samples, result.token_ids, strict=True):
            assert len(tokens) == samples
            seen[request_id] += tokens

    run(plan((2, 0, 4, False), added=[new_row(2, PROMPTS[2], BLOCKS[2])]))
    run(plan((0, 0, 6, True), (2, 4, 3, False), added=[new_row(0, PROMPTS[0], BLOCKS[0])]))
    run(plan((2, 7, 2, True), (0, 6, 1, True)))
    run(plan((0, 7, 1, True), (1, 0, 1, True), (2, 9, 1, True), added=[new_row(1, PROMPTS[1], BLOCKS[1])]))
    for offset in range(1, 5):
        rows = [(i, len(PROMPTS[i]) + len(seen[i]) - 1, 1, True) for i in (1, 2, 0) if len(seen[i]) < 5]
        if rows:
            run(plan(*rows))
        assert offset < 5
    assert [seen[i] for i in range(3)] == alone


def test_a_plan_without_rows_only_frees(decoder):
    runner = make_runner(decoder)
    runner.execute(plan((0, 0, 1, True), added=[new_row(0, [1], [1])]))
    result = runner.execute(plan(removed=[0, 99]))
    assert result.token_ids == []
    assert runner.rows.index == {}


def test_a_step_without_samples_returns_empty_rows(decoder):
    result = make_runner(decoder).execute(plan((0, 0, 2, False), added=[new_row(0, [1, 2, 3], [1])]))
    assert result.token_ids == [[]]
    assert result.errors == {}


def test_a_nan_row_fails_alone_and_leaves_nothing_behind(decoder):
    bad_token = 77
    assert all(bad_token not in prompt for prompt in PROMPTS)
    want = generate(make_runner(decoder), 0, PROMPTS[0], BLOCKS[0], 6)
    assert bad_token not in want
    runner = make_runner(Poison(decoder, bad_token))
    first = runner.execute(
        plan(
            (0, 0, 6, True),
            (1, 0, 5, True),
            added=[new_row(0, PROMPTS[0], BLOCKS[0]), new_row(1, [1, 2, 3, 4, bad_token], [7, 8], temperature=1.0)],
        )
    )
    assert set(first.errors) == {1}
    assert first.token_ids[1] == []
    tokens = list(first.token_ids[0])
    # The bad row runs on once before the engine has seen its error, as it does under overlap.
    tokens += runner.execute(plan((0, 6, 1, True), (1, 5, 1, True))).token_ids[0]
    tokens += runner.execute(plan((0, 7, 1, True), removed=[1])).token_ids[0]
    tokens += runner.execute(plan((0, 8, 1, True))).token_ids[0]
    tokens += runner.execute(plan((0, 9, 1, True))).token_ids[0]
    tokens += runner.execute(plan((0, 10, 1, True))).token_ids[0]
    assert tokens == want
    # The next owner of the bad row's blocks starts in what it left there.
    assert generate(runner, 2, PROMPTS[0], [8, 7, 3, 5], 6) == want


def test_a_row_that_runs_once_too_often_does_no_harm(decoder):
    want = [generate(make_runner(decoder), 0, PROMPTS[i], BLOCKS[i], 4) for i in (0, 2)]
    runner = make_runner(decoder)
    runner.execute(plan((0, 0, 6, True), added=[new_row(0, PROMPTS[0], BLOCKS[0])]))
    for position in (6, 7, 8):
        runner.execute(plan((0, position, 1, True)))
    runner.execute(plan((0, 9, 1, True)))  # stale: it had ended with the step before
    assert generate(runner, 1, PROMPTS[2], [*BLOCKS[0], 2], 4) == want[1]  # in the blocks it wrote to
    step = plan((0, 0, 6, True), removed=[0], added=[new_row(0, PROMPTS[0], BLOCKS[1] + [33])])
    tokens = list(runner.execute(step).token_ids[0])  # the same id again, after a preemption
    tokens += [runner.execute(plan((0, position, 1, True))).token_ids[0][0] for position in (6, 7, 8)]
    assert tokens == want[0]


def test_logprobs_come_with_their_rows(decoder):
    runner = make_runner(decoder)
    added = [new_row(0, PROMPTS[0], BLOCKS[0]), new_row(1, PROMPTS[1], BLOCKS[1], logprobs=4)]
    result = runner.execute(plan((0, 0, 6, True), (1, 0, 1, True), added=added))
    assert set(result.logprobs) == {1}
    (entry,) = result.logprobs[1]
    assert entry.rank == 1
    assert entry.top_ids[0] == result.token_ids[1][0]
    assert len(entry.top_logprobs) == 4
    assert entry.logprob == entry.top_logprobs[0] < 0


def test_a_block_is_one_piece_over_all_layers(decoder):
    cache = allocate_kv_cache(
        TorchAttention(8),
        num_blocks=5,
        num_layers=3,
        block_size=8,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert cache.shape == (5, 3, 2, 2, 8, 4)
    assert cache[2].is_contiguous()
    assert not cache.any()


def test_blocks_are_copied_before_the_step_writes(decoder):
    want = [generate(make_runner(decoder), 0, PROMPTS[0], BLOCKS[0], 4, seed=seed, temperature=1.0) for seed in (1, 2)]
    runner = make_runner(decoder)
    first, second = (new_row(i, PROMPTS[0], BLOCKS[i], seed=i + 1, temperature=1.0) for i in range(2))
    second.block_ids, second.num_computed_tokens = [BLOCKS[0][0], *BLOCKS[1]], 5
    tokens = [list(runner.execute(plan((0, 0, 6, True), added=[first])).token_ids[0]), []]
    # The first row goes on in the block that the second one gets a copy of.
    copies = [(BLOCKS[0][1], BLOCKS[1][0])]
    step = plan((0, 6, 1, True), (1, 5, 1, True), added=[second], block_copies=copies)
    for position in (7, 8, 9):
        for seen, found in zip(tokens, runner.execute(step).token_ids, strict=True):
            seen += found
        step = plan((0, position, 1, True), (1, position - 1, 1, True))
    tokens[1] += runner.execute(plan((1, 8, 1, True))).token_ids[0]
    assert tokens == want
