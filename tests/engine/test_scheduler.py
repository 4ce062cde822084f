"""Single decisions of the scheduler, each told by the plan it makes."""

from __future__ import annotations

import pytest

from ropeway.engine.policy import PriorityWithAging
from ropeway.engine.step import SchedulerOutput
from ropeway.protocol import AbortRequests, FinishReason, SamplingParams
from symbolic import Setup, SymbolicEngine, oracle


def plans_of(engine: SymbolicEngine) -> list[SchedulerOutput]:
    plans: list[SchedulerOutput] = []
    execute = engine.runner.execute

    def record(plan: SchedulerOutput):  # type: ignore[no-untyped-def]
        plans.append(plan)
        return execute(plan)

    engine.runner.execute = record  # type: ignore[method-assign]
    return plans


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def test_a_long_prompt_is_read_in_chunks_beside_decoding_rows() -> None:
    engine = SymbolicEngine(Setup(max_num_batched_tokens=10, max_model_len=100))
    plans = plans_of(engine)
    engine.add([1, 2, 3], greedy(20))
    engine.step()
    engine.add(list(range(25)), greedy(2))
    engine.run()
    engine.check_end()
    assert [plan.num_tokens for plan in plans[:5]] == [[3], [1, 9], [1, 9], [1, 7], [1, 1]]
    assert [plan.samples for plan in plans[1:4]] == [[True, False], [True, False], [True, True]]


def test_a_chunk_bound_leaves_budget_for_others() -> None:
    engine = SymbolicEngine(Setup(max_num_batched_tokens=20, max_chunk=8, max_model_len=100))
    plans = plans_of(engine)
    engine.add(list(range(18)), greedy(1))
    engine.add([5] * 6, greedy(1))
    engine.run()
    assert [plan.num_tokens for plan in plans] == [[8, 6], [8], [2]]


def test_rows_are_bounded_and_the_next_steps_on_when_one_steps_off() -> None:
    engine = SymbolicEngine(Setup(max_num_seqs=2))
    plans = plans_of(engine)
    for length in (1, 5, 1):
        engine.add([length] * 3, greedy(length))
    engine.run()
    assert [plan.request_ids for plan in plans[:2]] == [[0, 1], [1, 2]]


def test_the_latest_gives_way_and_comes_back_before_newer_ones() -> None:
    engine = SymbolicEngine(Setup(num_blocks=7, block_size=4, max_num_seqs=3, max_num_batched_tokens=32))
    for start in (0, 10, 20):
        engine.add(list(range(start, start + 7)), greedy(12))
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == [0, 1]  # the third would leave no block to grow into
    while engine.num_preemptions == 0:
        engine.step()
    assert [r.request_id for r in engine.scheduler.running] == [0]
    assert [r.request_id for r in engine.scheduler.waiting] == [1, 2]
    engine.run()
    engine.check_end()


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    engine = SymbolicEngine(Setup(num_blocks=7, block_size=4, max_num_seqs=4, max_num_batched_tokens=32))
    plans = plans_of(engine)
    for start in (0, 10, 20):
        engine.add(list(range(start, start + 7)), greedy(12))
    while engine.num_preemptions == 0:
        engine.step()
    assert plans[-1].removed == [1]
    assert plans[-1].added == []
    engine.run()
    engine.check_end()


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_keeps_every_token_and_counts_what_it_threw_away(overlap: bool) -> None:
    engine = SymbolicEngine(
        Setup(num_blocks=12, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=40, overlap=overlap)
    )
    for start in range(8):
        engine.add([start] * (5 + start % 3), SamplingParams(max_tokens=20, ignore_eos=True))
    engine.run()
    engine.check_end()
    assert engine.num_preemptions > 0
    assert all(len(record.tokens) == 20 for record in engine.records.values())


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 15, 16, 17])
def test_a_repeated_prompt_is_found_but_for_its_last_block(length: int) -> None:
    engine = SymbolicEngine(Setup(block_size=4))
    for _ in range(3):
        engine.add(list(range(length)), greedy(3))
        engine.run()
    engine.check_end()
    assert [engine.records[i].cached_tokens for i in range(3)] == [0, *[(length - 1) // 4 * 4] * 2]


def test_the_next_turn_of_a_chat_finds_the_answer_too() -> None:
    engine = SymbolicEngine(Setup(block_size=4, num_blocks=100, max_model_len=200))
    turn = engine.add(list(range(10)), SamplingParams(max_tokens=11, ignore_eos=True))
    engine.run()
    history = [*range(10), *engine.records[turn].tokens]
    following = engine.add([*history, 1], greedy(2))
    engine.run()
    assert engine.records[following].cached_tokens == 20  # 21 tokens, the last of which was never computed


@pytest.mark.parametrize("new", [*range(1, 20), 63, 64, 65])
@pytest.mark.parametrize("caching", [True, False])
def test_chunks_after_a_hit_are_never_empty(new: int, caching: bool) -> None:
    setup = Setup(block_size=16, num_blocks=100, max_num_batched_tokens=64, max_model_len=400, prefix_caching=caching)
    engine = SymbolicEngine(setup)
    prompt = [3] * 50
    for _ in range(3):
        engine.add(prompt, greedy(4))
        engine.run()
        prompt = [*prompt, *[7] * new]
    engine.check_end()


@pytest.mark.parametrize("length", [144, 159])
@pytest.mark.parametrize("caching", [True, False])
def test_a_lone_request_uses_the_whole_pool_without_preempting_itself(length: int, caching: bool) -> None:
    setup = Setup(
        block_size=16,
        num_blocks=11,
        max_num_batched_tokens=64,
        max_model_len=1000,
        max_num_seqs=3,
        prefix_caching=caching,
    )
    engine = SymbolicEngine(setup)
    assert engine.max_model_len == 160
    for _ in range(3):
        engine.add([5] * length, SamplingParams(max_tokens=500, ignore_eos=True))
    engine.run(max_steps=3 * (3 * 4 + 3 * (160 - length)))
    engine.check_end()
    assert all(record.finish is FinishReason.LENGTH for record in engine.records.values())


def test_three_requests_that_each_want_the_pool_make_bounded_progress() -> None:
    setup = Setup(block_size=16, num_blocks=11, max_num_batched_tokens=64, max_model_len=1000, max_num_seqs=3)
    engine = SymbolicEngine(setup)
    for start in range(3):
        engine.add([start] * 60, SamplingParams(max_tokens=100, ignore_eos=True))
    engine.run(max_steps=3 * (300 + 3 * 2))
    engine.check_end()
    assert engine.num_preemptions <= 6


def test_requests_that_could_never_run_end_at_once_with_a_reason() -> None:
    engine = SymbolicEngine(Setup(max_model_len=20))
    engine.add([], greedy(1))
    engine.add([1] * 20, greedy(1))
    outputs = engine.step()
    assert outputs is not None
    assert outputs.finished == {0: FinishReason.ERROR, 1: FinishReason.ERROR}
    assert outputs.token_counts == [0, 0]
    assert "empty" in outputs.errors[0]
    assert "no room" in outputs.errors[1]
    assert engine.core.idle


def test_a_failing_row_ends_alone() -> None:
    engine = SymbolicEngine(Setup())
    engine.add([1, 2], greedy(6))
    engine.add([3, 4], greedy(6))
    engine.runner.fail_rows = lambda plan: {1: "logits were NaN"} if len(plan.request_ids) == 2 else {}
    outputs = engine.step()
    assert outputs is not None
    assert outputs.errors == {1: "logits were NaN"}
    assert engine.records[1].finish is FinishReason.ERROR
    engine.run()
    assert engine.records[0].tokens == oracle(engine.sent[0], engine.max_model_len)[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", ["waiting", "running", "in flight", "preempted", "finished", "unknown"])
def test_abort_in_every_state_is_idempotent_and_frees_in_the_same_step(when: str, overlap: bool) -> None:
    engine = SymbolicEngine(
        Setup(num_blocks=7, block_size=4, max_num_seqs=2, max_num_batched_tokens=32, overlap=overlap, lazy=True)
    )
    target = 1
    engine.add([1] * 7, SamplingParams(max_tokens=12, ignore_eos=True))
    if when == "unknown":
        target = 99
    else:
        engine.add([2] * 7, SamplingParams(max_tokens=12, ignore_eos=True))
    if when in ("running", "in flight"):
        engine.step()
        if when == "running" and overlap:
            engine.step()
    if when == "preempted":
        while not engine.num_preemptions:
            engine.step()
    if when == "finished":
        engine.run()
    if when not in ("finished", "unknown"):
        engine.aborted.add(target)
    for _ in range(2):
        engine.core.handle(AbortRequests([target]))
        engine.check_invariants()
        assert target not in engine.kv.tables
    engine.run()
    engine.check_end()
    if target in engine.aborted:
        assert engine.records[target].finish is FinishReason.ABORT


def test_aborts_while_idle_still_report_the_gauges() -> None:
    engine = SymbolicEngine(Setup())
    for _ in range(3):
        engine.add([1, 2, 3], greedy(30))
    engine.step()
    engine.aborted |= {0, 1, 2}
    engine.core.handle(AbortRequests([0, 1, 2]))
    assert not engine.core.idle
    outputs = engine.step()
    assert outputs is not None
    assert (outputs.stats.num_running, outputs.stats.num_waiting, outputs.stats.num_used_blocks) == (0, 0, 0)
    assert outputs.stats.num_live_tokens == 0
    assert engine.core.idle
    assert engine.step() is None


def test_a_resumed_request_continues_as_if_it_had_never_stopped() -> None:
    whole = SymbolicEngine(Setup())
    sampling = SamplingParams(max_tokens=10, ignore_eos=True, seed=3)
    whole.add([4, 5, 6], sampling)
    whole.run()
    tokens = whole.records[0].tokens
    for cut in range(1, 11):
        resumed = SymbolicEngine(Setup())
        resumed.add([4, 5, 6], sampling, output=tokens[:cut])
        resumed.run()
        assert resumed.records[0].tokens == tokens[cut:]
        assert resumed.records[0].finish is FinishReason.LENGTH


def test_stop_reason_names_only_the_clients_own_tokens() -> None:
    first = SymbolicEngine(Setup())
    first.add([9], SamplingParams(max_tokens=5, ignore_eos=True))
    first.run()
    token = first.records[0].tokens[0]
    for sampling, reason in (
        (SamplingParams(max_tokens=5, eos_token_ids=(token,)), {}),
        (SamplingParams(max_tokens=5, stop_token_ids=(token,)), {0: token}),
        (SamplingParams(max_tokens=5, eos_token_ids=(token,), ignore_eos=True, stop_token_ids=(token,)), {0: token}),
    ):
        engine = SymbolicEngine(Setup())
        engine.add([9], sampling)
        outputs = engine.step()
        assert outputs is not None
        assert outputs.stop_reasons == reason
        assert outputs.finished == {0: FinishReason.STOP}


def test_statistics_add_up() -> None:
    engine = SymbolicEngine(Setup(max_num_batched_tokens=8, max_model_len=100, num_blocks=100))
    totals = {"prefill": 0, "decode": 0, "queries": 0, "hits": 0}
    for prompt in ([1] * 21, [1] * 21, [2] * 5):
        engine.add(prompt, SamplingParams(max_tokens=6, ignore_eos=True))
        while not engine.core.idle:
            outputs = engine.step()
            if outputs is not None:
                totals["prefill"] += outputs.stats.num_new_prefill_tokens
                totals["decode"] += outputs.stats.num_new_decode_tokens
                totals["queries"] += outputs.stats.num_new_prefix_queries
                totals["hits"] += outputs.stats.num_new_prefix_hits
    assert totals == {"prefill": 21 + 1 + 5, "decode": 18, "queries": 47, "hits": 20}


# Priorities


def priority_engine(max_num_seqs: int, num_blocks: int = 64) -> SymbolicEngine:
    return SymbolicEngine(Setup(policy="priority", max_num_seqs=max_num_seqs, num_blocks=num_blocks))


def test_the_lowest_priority_number_is_next_and_equals_keep_their_order() -> None:
    engine = priority_engine(1)
    plans = plans_of(engine)
    for priority in (0, 5, 5, -1):
        engine.add([1, 2], greedy(2), priority=priority)
    engine.run()
    engine.check_end()
    order = [plan.request_ids[0] for plan in plans if plan.added]
    assert order == [3, 0, 1, 2]


def test_waiting_is_worth_a_level_after_a_while() -> None:
    engine = priority_engine(1)
    plans = plans_of(engine)
    engine.add([1, 2], greedy(2), priority=1)
    engine.now += PriorityWithAging.AGING_SECONDS * 0.9
    engine.add([1, 2], greedy(2), priority=0)  # younger, but not by a level
    engine.now += PriorityWithAging.AGING_SECONDS * 0.2
    engine.add([1, 2], greedy(2), priority=0)  # younger by more than that
    engine.run()
    assert [plan.request_ids[0] for plan in plans if plan.added] == [1, 0, 2]


def test_the_least_urgent_gives_way_though_it_came_first() -> None:
    engine = SymbolicEngine(
        Setup(policy="priority", num_blocks=7, block_size=4, max_num_seqs=2, max_num_batched_tokens=32)
    )
    engine.add(list(range(7)), greedy(12), priority=3)
    engine.step()
    engine.add(list(range(10, 17)), greedy(12), priority=0)
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == [1, 0]
    while engine.num_preemptions == 0:
        engine.step()
    assert [r.request_id for r in engine.scheduler.running] == [1]
    engine.run()
    engine.check_end()


# Limits of time


@pytest.mark.parametrize("overlap", [False, True])
def test_a_deadline_ends_a_running_request_and_keeps_its_tokens(overlap: bool) -> None:
    engine = SymbolicEngine(Setup(overlap=overlap))
    late = engine.add([1, 2, 3], greedy(40), deadline=0.05)
    other = engine.add([4, 5], greedy(40), deadline=1e9, queue_deadline=0.03)  # it begins to run in time
    engine.step()
    engine.step()
    engine.now = 0.06
    engine.run()
    engine.check_end()
    assert engine.records[late].finish is FinishReason.DEADLINE
    assert 1 <= len(engine.records[late].tokens) < 5
    assert engine.records[other].finish is not FinishReason.QUEUE_TIMEOUT


def test_a_queue_deadline_ends_only_who_never_ran() -> None:
    engine = SymbolicEngine(Setup(max_num_seqs=1))
    engine.add([1, 2, 3], greedy(30))
    waiting = engine.add([4, 5], greedy(3), queue_deadline=0.02)
    patient = engine.add([6, 7], greedy(3), queue_deadline=50.0)
    engine.step()
    engine.now = 0.03
    engine.run()
    engine.check_end()
    assert engine.records[waiting].finish is FinishReason.QUEUE_TIMEOUT
    assert engine.records[patient].finish is not FinishReason.QUEUE_TIMEOUT


def test_timers_of_requests_that_are_gone_do_not_pile_up() -> None:
    engine = SymbolicEngine(Setup())
    for _ in range(500):
        engine.add([1], greedy(1), deadline=1e9, queue_deadline=1e9)
        engine.run()
    assert len(engine.scheduler._timers) <= 2 * 2 + 64
