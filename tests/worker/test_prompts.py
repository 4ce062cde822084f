"""Log-probabilities and embeddings of prompts: equal to one plain forward pass, however the prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_runner import BLOCK, decoder, make_runner, new_row, plan  # noqa: F401 - a fixture

from ropeway.attention.base import AttentionMetadata
from ropeway.attention.torch_ref import TorchAttention
from ropeway.worker import prompts

PROMPT = [5, 9, 33, 7, 2, 110, 64, 63, 62, 1, 1, 8, 77, 30, 119]
BLOCKS = [9, 3, 5, 21, 11]
NEIGHBOUR = [3, 1, 4, 1, 5]


def states(model) -> torch.Tensor:
    """``[tokens, hidden_size]`` of the prompt in one pass."""
    length = len(PROMPT)
    backend = TorchAttention(BLOCK)
    caches = [torch.zeros(backend.kv_shape(40, BLOCK, 2, 8)) for _ in range(3)]
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=torch.tensor([[1, 2, 3, 4]], dtype=torch.int32),
        slot_mapping=torch.arange(length) + BLOCK,
        num_reqs=1,
        num_tokens=length,
        max_query_len=length,
        max_seq_len=length,
    )
    ids, positions = torch.tensor(PROMPT), torch.arange(length)
    with torch.inference_mode():
        return model.hidden(ids, positions, caches, backend, backend.prepare(meta), positions)


def scores(runner, chunks, *, neighbour: bool = False, num_top: int = 4, num_scored: int = 0):
    """TokenLogprobs of the prompt, read in ``chunks``."""
    new = new_row(0, PROMPT, BLOCKS, prompt_logprobs=num_top)
    new.num_scored = num_scored
    added, found, start = [new], [], 0
    for number, count in enumerate(chunks):
        rows = [(0, start, count, start + count == len(PROMPT))]
        if neighbour and start == 0:
            added.append(new_row(1, NEIGHBOUR, [30, 31, 32, 33, 34]))
            rows.insert(0, (1, 0, len(NEIGHBOUR), True))
        elif neighbour:
            rows.insert(0, (1, len(NEIGHBOUR) + number - 1, 1, True))
        step = plan(*rows, added=added)
        result = runner.execute(step)
        assert set(result.prompt_logprobs) <= {len(rows) - 1}
        found += [score for part in result.prompt_logprobs.values() for score in part]
        added, start = [], start + count
    assert start == len(PROMPT)
    return found


CHUNKS = [[15], [1] * 15, [4, 4, 4, 3], [14, 1], [1, 14]]


def test_prompt_logprobs_equal_one_forward_pass(decoder):  # noqa: F811
    want = decoder.logits(states(decoder)).log_softmax(-1)
    found = scores(make_runner(decoder), [15])
    assert len(found) == len(PROMPT) - 1
    for position, score in enumerate(found):
        line = want[position]
        assert score.logprob == pytest.approx(float(line[PROMPT[position + 1]]), abs=1e-5)
        assert score.rank == 1 + int((line > line[PROMPT[position + 1]]).sum())
        best = line.topk(4)
        assert score.top_ids == best.indices.tolist()
        np.testing.assert_allclose(score.top_logprobs, best.values.numpy(), atol=1e-5)


@pytest.mark.parametrize("chunks", CHUNKS[1:])
@pytest.mark.parametrize("neighbour", [False, True])
def test_prompt_logprobs_do_not_depend_on_chunks_or_neighbours(decoder, chunks, neighbour):  # noqa: F811
    want = scores(make_runner(decoder), [15])
    found = scores(make_runner(decoder), chunks, neighbour=neighbour)
    assert [score.top_ids for score in found] == [score.top_ids for score in want]
    assert [score.rank for score in found] == [score.rank for score in want]
    np.testing.assert_allclose([s.logprob for s in found], [s.logprob for s in want], atol=1e-5)


def test_prompt_logprobs_use_few_rows_of_logits_at_a_time(decoder, monkeypatch):  # noqa: F811
    want = scores(make_runner(decoder), [15])
    monkeypatch.setattr(prompts, "_CPU_CHUNK", 120 * 4)
    runner, sizes, head = make_runner(decoder), [], decoder.logits

    def logits(hidden):
        sizes.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(decoder, "logits", logits)
    found = scores(runner, [15])
    assert max(sizes) == 4
    np.testing.assert_allclose([s.logprob for s in found], [s.logprob for s in want], atol=1e-6)


def test_a_row_that_comes_back_scores_only_what_is_still_unknown(decoder):  # noqa: F811
    want = scores(make_runner(decoder), [15])
    found = scores(make_runner(decoder), [4, 11], num_scored=6)
    assert [score.top_ids for score in found] == [score.top_ids for score in want[6:]]
    assert scores(make_runner(decoder), [15], num_scored=14) == []


def test_rows_may_want_different_numbers_of_alternatives(decoder):  # noqa: F811
    rows = [(0, 0, 15, True), (1, 0, 5, True), (2, 0, 2, False)]
    added = [
        new_row(0, PROMPT, BLOCKS, prompt_logprobs=0),
        new_row(1, NEIGHBOUR, [30, 31], prompt_logprobs=3),
        new_row(2, [7], [32], prompt_logprobs=500),
    ]
    rows[2] = (2, 0, 1, True)
    result = make_runner(decoder).execute(plan(*rows, added=added))
    assert set(result.prompt_logprobs) == {0, 1}, "a prompt of one token has nothing to score"
    assert [score.top_ids for score in result.prompt_logprobs[0]] == [[]] * 14
    assert [len(score.top_ids) for score in result.prompt_logprobs[1]] == [3] * 4
    many = make_runner(decoder).execute(
        plan((0, 0, 5, True), added=[new_row(0, NEIGHBOUR, [1, 2], prompt_logprobs=500)])
    )
    assert [len(score.top_ids) for score in many.prompt_logprobs[0]] == [120] * 4


def embed(runner, pooling: str, chunks: list[int]) -> list[float]:
    added, start = [new_row(0, PROMPT, BLOCKS, pooling=pooling, max_tokens=0)], 0
    for count in chunks:
        result = runner.execute(plan((0, start, count, False), added=added))
        start += count
        assert bool(result.embeddings) == (start == len(PROMPT))
        assert result.token_ids == [[]]
        added = []
    return result.embeddings[0]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_embeddings_equal_one_forward_pass(decoder, chunks):  # noqa: F811
    hidden = states(decoder)
    np.testing.assert_allclose(embed(make_runner(decoder), "last", chunks), hidden[-1].numpy(), atol=1e-5)
    np.testing.assert_allclose(embed(make_runner(decoder), "mean", chunks), hidden.mean(0).numpy(), atol=1e-5)


def test_a_mean_begins_again_when_its_row_does(decoder):  # noqa: F811
    runner = make_runner(decoder)
    want = embed(make_runner(decoder), "mean", [15])
    runner.execute(plan((0, 0, 9, False), added=[new_row(0, PROMPT, BLOCKS, pooling="mean", max_tokens=0)]))
    runner.execute(plan(removed=[0]))
    np.testing.assert_allclose(embed(runner, "mean", [15]), want, atol=1e-5)
