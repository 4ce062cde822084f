"""RequestRows and the gathered batch: slots, chunks, block edges, rows that leave and come back."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from ropeway.engine.step import NewRow, SchedulerOutput
from ropeway.protocol import SamplingParams
from ropeway.worker.batch import RequestRows
from ropeway.worker.device import CpuDevice

VOCAB = 100


def make_rows(capacity: int = 4, max_model_len: int = 64, block_size: int = 4) -> RequestRows:
    return RequestRows(capacity, max_model_len, block_size, VOCAB, CpuDevice())


def new_row(request_id: int, tokens: list[int], blocks: list[int], num_prompt: int | None = None, **sampling) -> NewRow:
    params = SamplingParams(**{"max_tokens": 50, "temperature": 0.0, **sampling})
    return NewRow(request_id, 0, tokens, len(tokens) if num_prompt is None else num_prompt, 0, blocks, params)


def step(*rows: tuple[int, int, int, bool], added=(), removed=(), new_blocks=None) -> SchedulerOutput:
    """rows: (request id, start, num tokens, samples)"""
    plan = SchedulerOutput(0, added=list(added), removed=list(removed), new_blocks=new_blocks or {})
    for request_id, start, count, samples in rows:
        plan.request_ids.append(request_id)
        plan.start_positions.append(start)
        plan.num_tokens.append(count)
        plan.samples.append(samples)
    return plan


def run(rows: RequestRows, plan: SchedulerOutput, *sampled: int):
    rows.apply(plan)
    batch = rows.gather(plan)
    if sampled:
        rows.commit(batch, torch.tensor(sampled))
    return batch


def test_mixed_batch_of_prefill_chunk_and_decode():
    rows = make_rows()
    run(rows, step((7, 0, 3, True), added=[new_row(7, [11, 12, 13], [5])]), 40)
    batch = run(
        rows,
        step((9, 2, 5, False), (7, 3, 1, True), added=[new_row(9, list(range(20, 32)), [8, 3, 6])]),
    )
    assert batch.input_ids.tolist() == [22, 23, 24, 25, 26, 40]
    assert batch.positions.tolist() == [2, 3, 4, 5, 6, 3]
    assert batch.meta.slot_mapping.tolist() == [8 * 4 + 2, 8 * 4 + 3, 3 * 4, 3 * 4 + 1, 3 * 4 + 2, 5 * 4 + 3]
    assert batch.meta.query_start_loc.tolist() == [0, 5, 6]
    assert batch.meta.seq_lens.tolist() == [7, 4]
    assert batch.meta.block_table.tolist() == [[8, 3], [5, 0]]
    assert (batch.meta.num_reqs, batch.meta.num_tokens) == (2, 6)
    assert (batch.meta.max_query_len, batch.meta.max_seq_len) == (5, 7)
    assert batch.logits_indices.tolist() == [5]
    assert batch.sampled == [1]


def test_decode_crosses_into_an_appended_block():
    rows = make_rows()
    run(rows, step((1, 0, 4, True), added=[new_row(1, [1, 2, 3, 4], [9])]), 50)
    batch = run(rows, step((1, 4, 1, True), new_blocks={1: [2]}), 51)
    assert batch.input_ids.tolist() == [50]
    assert batch.meta.slot_mapping.tolist() == [8]
    assert batch.meta.block_table.tolist() == [[9, 2]]
    batch = run(rows, step((1, 5, 1, True)))
    assert batch.input_ids.tolist() == [51]
    assert batch.meta.slot_mapping.tolist() == [9]


def test_chunks_cover_the_prompt_once():
    prompt = [(3 * i) % VOCAB for i in range(23)]
    for chunk in (1, 3, 4, 5, 23):
        rows = make_rows()
        seen, slots = [], []
        for start in range(0, 23, chunk):
            count = min(chunk, 23 - start)
            added = [new_row(0, prompt, [4, 7, 1, 12, 3, 9])] if start == 0 else []
            batch = run(rows, step((0, start, count, start + count == 23), added=added))
            seen += batch.input_ids.tolist()
            slots += batch.meta.slot_mapping.tolist()
        assert seen == prompt
        assert slots == [[4, 7, 1, 12, 3, 9][i // 4] * 4 + i % 4 for i in range(23)]


def test_prefix_hit_starts_in_the_middle():
    rows = make_rows()
    new = new_row(0, list(range(10)), [3, 4, 5])
    new.num_computed_tokens = 8
    batch = run(rows, step((0, 8, 2, True), added=[new]))
    assert batch.input_ids.tolist() == [8, 9]
    assert batch.meta.seq_lens.tolist() == [10]
    assert batch.meta.block_table.tolist() == [[3, 4, 5]]


def test_a_resumed_row_knows_its_outputs_and_continues_its_noise():
    sampling = {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.0, "min_tokens": 4, "eos_token_ids": (2,)}
    straight, resumed = make_rows(), make_rows()
    run(straight, step((0, 0, 3, True), added=[new_row(0, [1, 2, 3], [1, 2], **sampling)]), 60)
    run(straight, step((0, 3, 1, True)), 61)
    want = run(straight, step((0, 4, 1, True), new_blocks={0: [3]}))

    run(resumed, step((0, 0, 3, True), added=[new_row(0, [1, 2, 3], [1, 2], **sampling)]), 60)
    run(resumed, step((0, 3, 1, True)), 61)
    again = new_row(0, [1, 2, 3, 60, 61], [7, 8], num_prompt=3, **sampling)
    got = run(resumed, step((0, 0, 5, True), removed=[0], added=[again]))
    assert got.input_ids.tolist() == [1, 2, 3, 60, 61]
    assert torch.equal(got.sampling.noise_keys, want.sampling.noise_keys)
    assert got.sampling.banned is not None
    assert got.sampling.banned[1].tolist() == want.sampling.banned[1].tolist() == [2]
    for batch in (want, got):
        penalties = batch.sampling.penalties
        assert penalties is not None
        counts = penalties.output_counts[penalties.slots[0]]
        assert counts.nonzero().flatten().tolist() == [60, 61]
        assert penalties.in_prompt[penalties.slots[0]].nonzero().flatten().tolist() == [1, 2, 3]


def test_two_plans_may_be_made_before_the_first_token_is_known():
    rows = make_rows()
    first = step((0, 0, 2, True), added=[new_row(0, [1, 2], [1, 2])])
    second = step((0, 2, 1, True))  # made while the first runs: the host has no token for position 2
    run(rows, first, 33)
    assert run(rows, second, 34).input_ids.tolist() == [33]
    assert run(rows, step((0, 3, 1, True))).input_ids.tolist() == [34]


def snapshot(rows: RequestRows, request_id: int) -> dict[str, object]:
    """Everything a row holds, by value."""
    row = rows.index[request_id]
    state = {name: rows._params[row][name].item() for name in rows._params.dtype.names}
    state |= {"row": row, "last": rows.last_token[row].item(), "blocks": rows._block_table[row].tolist()}
    state["tokens"] = rows._tokens[row, : state["num_known"]].tolist()
    if state["penalty_slot"] >= 0:
        state["counts"] = rows._penalties.output_counts[state["penalty_slot"]].tolist()
        state["prompt"] = rows._penalties.in_prompt[state["penalty_slot"]].tolist()
    extras = rows._extras.get(row)
    if extras is not None:
        state["bias"] = list(zip(extras.bias_ids.tolist(), extras.bias_values.tolist(), strict=True))
        state["ends"] = extras.ends.tolist()
    return copy.deepcopy(state)


def test_a_row_that_leaves_changes_nothing_in_the_others():
    rng = np.random.default_rng(0)
    rows = make_rows(capacity=8)
    ids = list(range(8))

    def added(i: int) -> NewRow:
        return new_row(
            i,
            rng.integers(0, VOCAB, size=5).tolist(),
            [i + 1, i + 20],
            temperature=0.5 * (i % 3),
            seed=i * 1000,
            presence_penalty=float(i % 2),
            logit_bias=((i % VOCAB, 3.0),) if i % 3 else (),
            min_tokens=i % 4,
            eos_token_ids=(2,),
        )

    run(rows, step(*[(i, 0, 5, True) for i in ids], added=[added(i) for i in ids]), *range(8))
    for round_number in range(30):
        gone = ids.pop(int(rng.integers(len(ids))))
        before = {i: snapshot(rows, i) for i in ids}
        newcomer = 100 + round_number
        rows.apply(step(removed=[gone], added=[added(newcomer)]))
        assert {i: snapshot(rows, i) for i in ids} == before
        ids.append(newcomer)
        assert len({rows.index[i] for i in ids}) == 8


def test_a_reused_row_is_clean():
    rows = make_rows(capacity=1)
    dirty = new_row(
        0,
        [1] * 30,
        list(range(1, 9)),
        temperature=1.0,
        seed=3,
        top_k=4,
        repetition_penalty=2.0,
        logit_bias=((5, 9.0),),
        allowed_token_ids=(5, 6),
        logprobs=2,
    )
    run(rows, step((0, 0, 30, True), added=[dirty]), 5)
    batch = run(rows, step((1, 0, 2, True), removed=[0], added=[new_row(1, [7, 8], [9])]))
    sampling = batch.sampling
    assert batch.meta.block_table.tolist() == [[9]]
    assert not rows._block_table[rows.index[1], 1:].any()
    assert sampling.random_rows is None
    assert sampling.filtered is None
    assert sampling.penalties is None
    assert sampling.bias is None
    assert sampling.allowed == []
    assert sampling.logprobs == []


def test_a_reused_penalty_slot_is_clean():
    rows = make_rows()
    run(rows, step((0, 0, 2, True), added=[new_row(0, [1, 2], [1], presence_penalty=1.0)]), 9)
    plan = step((1, 0, 2, True), removed=[0], added=[new_row(1, [3, 4], [2], presence_penalty=1.0)])
    penalties = run(rows, plan).sampling.penalties
    assert penalties is not None
    assert int(penalties.output_counts[penalties.slots[0]].sum()) == 0
    assert penalties.in_prompt[penalties.slots[0]].nonzero().flatten().tolist() == [3, 4]


def test_rows_grow_and_keep_their_state():
    rows = make_rows(capacity=2)
    run(rows, step((0, 0, 2, True), (1, 0, 1, True), added=[new_row(0, [1, 2], [1]), new_row(1, [3], [2])]), 70, 71)
    before = [snapshot(rows, i) for i in (0, 1)]
    more = [new_row(i, [i], [i + 1], presence_penalty=1.0) for i in range(2, 9)]
    batch = run(rows, step((0, 2, 1, True), (8, 0, 1, True), added=more))
    assert [snapshot(rows, i) for i in (0, 1)] == before
    assert batch.input_ids.tolist() == [70, 8]


def test_removing_an_unknown_request_is_harmless():
    rows = make_rows()
    rows.apply(step(removed=[12345]))
    assert rows.index == {}


def test_adding_a_request_twice_is_a_bug():
    rows = make_rows()
    rows.apply(step(added=[new_row(0, [1], [1])]))
    with pytest.raises(AssertionError, match="already has a row"):
        rows.apply(step(added=[new_row(0, [1], [1])]))


def test_only_rows_that_sample_are_in_the_sampling_inputs():
    rows = make_rows()
    added = [
        new_row(0, [1, 2, 3], [1], temperature=1.0, seed=1, logprobs=1),
        new_row(1, [4, 5], [2], temperature=0.5, seed=2, top_p=0.9),
        new_row(2, [6], [3], temperature=0.7, seed=3),
    ]
    batch = run(rows, step((0, 0, 2, False), (1, 0, 2, True), (2, 0, 1, True), added=added))
    sampling = batch.sampling
    assert sampling.num_rows == 2
    assert sampling.temperature.flatten().tolist() == pytest.approx([0.5, 0.7])
    assert sampling.filtered.tolist() == [0]
    assert sampling.unfiltered.tolist() == [1]
    assert sampling.top_k.tolist() == [[VOCAB]]
    assert sampling.logprobs == []
    assert batch.sampled == [1, 2]
    assert batch.logits_indices.tolist() == [3, 4]


def by_value(thing: object) -> object:
    if isinstance(thing, torch.Tensor | np.ndarray):
        return str(thing.dtype), thing.tolist()
    if dataclasses.is_dataclass(thing):
        return {field.name: by_value(getattr(thing, field.name)) for field in dataclasses.fields(thing)}
    if isinstance(thing, list | tuple):
        return [by_value(part) for part in thing]
    return thing


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "seed": 5, "top_p": 0.9},
        {"frequency_penalty": 0.5, "logprobs": 2},
        {"min_tokens": 4, "eos_token_ids": (7,), "logit_bias": ((3, 1.5),)},
    ],
    ids=lambda sampling: " ".join(sampling) or "greedy",
)
def test_a_batch_made_in_place_of_the_last_one_is_the_one_gathered_anew(sampling):
    """One row is given its blocks as they are needed, one has them all; then one pauses, comes back, and leaves."""
    added = [new_row(0, [1, 2, 3], [1], **sampling), new_row(1, [4, 5, 6, 7, 8], [2, 3, 4, 5])]
    plans = [step((0, 0, 3, True), (1, 0, 5, True), added=added)]
    plans += [
        step((0, 3 + n, 1, True), (1, 5 + n, 1, True), new_blocks={0: [6 + n]} if (3 + n) % 4 == 0 else {})
        for n in range(7)
    ]
    plans += [step((1, 12, 1, True)), step((1, 13, 1, True))]
    plans += [step((0, 10, 1, True), (1, 14, 1, True)), step((0, 11, 1, True), (1, 15, 1, True))]
    plans += [step((0, 12, 1, True), new_blocks={0: [20]}, removed=[1]), step((0, 13, 1, True))]
    rows, anew = make_rows(), make_rows()
    batches = []
    for number, plan in enumerate(plans):
        tokens = [10 + number + index for index in range(len(plan.request_ids))]
        anew._decoding = None
        expected = by_value(run(anew, plan, *tokens))
        batch = run(rows, plan, *tokens)
        assert by_value(batch) == expected
        batches.append(batch)
    in_place = [after is before for before, after in itertools.pairwise(batches)]
    assert in_place == [False, *[True] * 6, False, True, False, True, False, True]
    assert rows.last_token.tolist() == anew.last_token.tolist()
