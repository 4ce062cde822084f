"""Random traces through the real engine over the symbolic runner: no invariant breaks and no text ever differs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropeway.protocol import AbortRequests, ResetPrefixCache, SamplingParams
from symbolic import VOCAB, Setup, SymbolicEngine

Pick = Callable[[int, int], int]  # an integer between both ends, from whoever drives the trace


def draw_setup(pick: Pick) -> Setup:
    max_num_seqs = pick(1, 6)
    return Setup(
        block_size=(1, 2, 3, 4, 8, 16)[pick(0, 5)],
        num_blocks=pick(2, 40),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, pick(1, 40)),
        max_model_len=pick(4, 80),
        max_chunk=pick(0, 1) * pick(1, 12),
        prefix_caching=pick(0, 3) > 0,
        overlap=pick(0, 1) == 1,
        lazy=pick(0, 1) == 1,
        policy=("fcfs", "priority")[pick(0, 1)],
    )


def draw_prompt(pick: Pick, limit: int) -> list[int]:
    """Prompts begin with one of a few stems, so that prefixes are shared often."""
    which = pick(0, 1)
    stem = [(which * 7 + 3 * index) % VOCAB for index in range(pick(0, 30))]
    tail = [pick(0, 3) for _ in range(pick(0, 12))]
    return [*stem, *tail][:limit] or [1]


def draw_sampling(pick: Pick) -> SamplingParams:
    kind = pick(0, 19)
    if kind < 2:
        return SamplingParams(max_tokens=0, pooling=("mean", "last")[kind])
    return SamplingParams(
        max_tokens=pick(0, 40) if kind == 2 else pick(1, 40),
        prompt_logprobs=1 if kind < 5 else None,
        seed=pick(0, 2),
        eos_token_ids=(pick(0, VOCAB - 1),),
        stop_token_ids=(pick(0, VOCAB - 1),) if pick(0, 2) == 0 else (),
        ignore_eos=pick(0, 3) == 0,
    )


def run_trace(pick: Pick) -> SymbolicEngine:
    engine = SymbolicEngine(draw_setup(pick))
    for _ in range(pick(1, 25)):
        action = pick(0, 9)
        if action < 5:
            if engine.max_model_len >= 2:
                prompt, salt = draw_prompt(pick, engine.max_model_len - 1), ("", "a")[pick(0, 4) == 4]
                parent = pick(0, len(engine.sent)) if pick(0, 3) == 0 else None
                if parent in engine.sent and pick(0, 9):  # not always the same prompt, which must do no harm
                    prompt, salt = engine.sent[parent].prompt_token_ids, engine.sent[parent].cache_salt
                engine.add(
                    prompt,
                    draw_sampling(pick),
                    cache_salt=salt,
                    fork_of=parent,
                    priority=pick(-1, 1),
                    # The clock moves by a few milliseconds per step.
                    deadline=engine.now + 0.01 * pick(0, 10) if pick(0, 9) == 0 else None,
                    queue_deadline=engine.now + 0.01 * pick(0, 5) if pick(0, 9) == 0 else None,
                )
        elif action < 8:
            for _ in range(pick(1, 12)):
                engine.step()
        elif action == 8 and engine.sent:
            request_id = pick(0, len(engine.sent))  # one past the end is an id that nobody knows
            if engine.records.get(request_id) is not None and engine.records[request_id].finish is None:
                engine.aborted.add(request_id)
            engine.core.handle(AbortRequests([request_id, request_id]))
            engine.check_invariants()
        elif action == 9 and pick(0, 4) == 0:
            engine.core.handle(ResetPrefixCache())
            engine.check_invariants()
    engine.run()
    engine.check_end()
    return engine


@pytest.mark.parametrize("chunk", range(10))
def test_random_traces(chunk: int) -> None:
    preemptions = hits = aborts = copies = steps = 0
    for seed in range(chunk * 300, (chunk + 1) * 300):
        source = random.Random(seed)
        try:
            engine = run_trace(source.randint)
        except BaseException as error:
            error.add_note(f"trace seed {seed}")
            raise
        preemptions += engine.num_preemptions
        hits += engine.num_hits
        aborts += len(engine.aborted)
        copies += engine.runner.num_copies
        steps += engine.num_steps
    # The traces are only worth something if they reach the hard places.
    assert preemptions > 50
    assert hits > 500
    assert aborts > 20
    assert copies > 20
    assert steps > 5000


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_traces_that_hypothesis_can_shrink(data: st.DataObject) -> None:
    run_trace(lambda low, high: data.draw(st.integers(low, high)))
