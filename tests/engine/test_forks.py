"""Requests that share another's prompt: what is computed once, what is copied, and what happens when the other goes."""

from __future__ import annotations

import pytest

from ropeway.engine.step import SchedulerOutput
from ropeway.protocol import AbortRequests, FinishReason, SamplingParams
from symbolic import Setup, SymbolicEngine


def sampling(seed: int, max_tokens: int = 6, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **more)


def watched(engine: SymbolicEngine) -> list[SchedulerOutput]:
    """The plans of the steps to come."""
    plans: list[SchedulerOutput] = []
    submit = engine.runner.submit

    def watch(plan: SchedulerOutput):
        plans.append(plan)
        return submit(plan)

    engine.runner.submit = watch  # type: ignore[method-assign]
    return plans


def add_choices(engine: SymbolicEngine, prompt: list[int], n: int, **more) -> list[int]:
    first = engine.add(prompt, sampling(0, **more))
    return [first, *(engine.add(prompt, sampling(seed, **more), fork_of=first) for seed in range(1, n))]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 30])
def test_a_prompt_is_computed_once(length: int, prefix_caching: bool, overlap: bool) -> None:
    engine = SymbolicEngine(
        Setup(block_size=8, prefix_caching=prefix_caching, overlap=overlap, max_num_batched_tokens=16)
    )
    plans = watched(engine)
    prompt = list(range(length))
    choices = add_choices(engine, prompt, 4)
    engine.run()
    engine.check_end()
    computed = [
        (request_id, position)
        for plan in plans
        for request_id, start, count in zip(plan.request_ids, plan.start_positions, plan.num_tokens, strict=True)
        for position in range(start, start + count)
        if position < length
    ]
    assert computed[:length] == [(choices[0], position) for position in range(length)]
    assert sorted(computed[length:]) == [(choice, length - 1) for choice in choices[1:]]
    # A copy is needed only where the block of the last prompt token begins with others.
    assert engine.runner.num_copies == (3 if (length - 1) % 8 else 0)


def test_choices_share_the_full_blocks_of_their_prompt() -> None:
    engine = SymbolicEngine(Setup(block_size=4, prefix_caching=False, max_num_seqs=8))
    choices = add_choices(engine, list(range(14)), 5, max_tokens=20)
    for _ in range(4):
        engine.step()
    tables = [engine.kv.tables[choice] for choice in choices]
    assert len({tuple(table[:3]) for table in tables}) == 1
    assert len({table[3] for table in tables}) == 5
    engine.run()
    engine.check_end()


def test_forks_do_not_hold_up_others_and_come_before_them() -> None:
    engine = SymbolicEngine(Setup(block_size=4, max_num_seqs=3, max_num_batched_tokens=8))
    plans = watched(engine)
    choices = add_choices(engine, list(range(20)), 3)
    others = [engine.add([30, seed, 1, 2], sampling(seed)) for seed in range(2)]
    engine.run()
    engine.check_end()
    admitted = [new.request_id for plan in plans for new in plan.added]
    assert admitted == [choices[0], others[0], *choices[1:], others[1]]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_forks_outlive_the_one_they_waited_for(steps: int, prefix_caching: bool) -> None:
    engine = SymbolicEngine(Setup(block_size=4, max_num_batched_tokens=8, prefix_caching=prefix_caching))
    choices = add_choices(engine, list(range(20)), 3)
    for _ in range(steps):
        engine.step()
    engine.aborted.add(choices[0])
    engine.core.handle(AbortRequests([choices[0]]))
    engine.run()
    engine.check_end()
    assert engine.records[choices[0]].finish is FinishReason.ABORT
    assert [len(engine.records[choice].tokens) for choice in choices[1:]] == [6, 6]


def test_waiting_forks_leave_at_once_when_they_are_aborted() -> None:
    engine = SymbolicEngine(Setup(block_size=4, max_num_batched_tokens=8))
    choices = add_choices(engine, list(range(20)), 4)
    engine.step()
    assert len(engine.scheduler.forks) == 3
    engine.aborted.update(choices)
    engine.core.handle(AbortRequests(choices[1:2]))
    assert [request.request_id for request in engine.scheduler.forks] == choices[2:]
    engine.core.handle(AbortRequests(choices))
    assert len(engine.scheduler.forks) == len(engine.scheduler.requests) == 0
    engine.run()
    engine.check_end()
    assert all(engine.records[choice].finish is FinishReason.ABORT for choice in choices)


def test_forks_wait_on_while_the_first_is_preempted() -> None:
    """And take nothing over in the very step that computes the prompt again."""
    engine = SymbolicEngine(
        Setup(block_size=4, num_blocks=9, max_num_seqs=4, max_num_batched_tokens=8, prefix_caching=False)
    )
    plans = watched(engine)
    engine.add([1, 2], sampling(9, 24))
    for _ in range(12):
        engine.step()
    choices = add_choices(engine, list(range(13)), 3, max_tokens=12)
    engine.run()
    engine.check_end()
    assert engine.num_preemptions > 0
    for plan in plans:
        fresh = {new.request_id for new in plan.added if new.num_computed_tokens == 0}
        assert not (choices[0] in fresh and any(new.num_computed_tokens == 12 for new in plan.added))


@pytest.mark.parametrize(
    "different",
    [
        {"prompt": [0, 1, 2, 9]},
        {"prompt": [0, 1, 2]},
        {"prompt": [0, 1, 2, 3, 4]},
        {"cache_salt": "other"},
        {"fork_of": 77},
    ],
)
def test_what_cannot_be_shared_is_computed(different: dict) -> None:
    engine = SymbolicEngine(Setup(block_size=2))
    first = engine.add([0, 1, 2, 3], sampling(0))
    fork = {"prompt": [0, 1, 2, 3], "fork_of": first, **different}
    engine.add(fork.pop("prompt"), sampling(1), **fork)
    assert len(engine.scheduler.forks) == 0
    engine.run()
    engine.check_end()


def test_a_fork_that_wants_every_prompt_token_reads_them_itself() -> None:
    engine = SymbolicEngine(Setup(block_size=2))
    first = engine.add([0, 1, 2, 3], sampling(0))
    engine.add([0, 1, 2, 3], sampling(1, prompt_logprobs=1), fork_of=first)
    engine.run()
    engine.check_end()  # which compares the log-probabilities
