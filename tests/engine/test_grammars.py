"""Requests with a grammar: not before it is compiled, not after they were aborted, not past its end."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from stub_executors import Done, PositionExecutor

from ropeway.config import Config, build_config
from ropeway.engine.core import EngineCore, GrammarReady, build_core
from ropeway.engine.process_client import InProcessEngineClient
from ropeway.engine.step import Handle, SchedulerOutput
from ropeway.protocol import AbortRequests, AddRequest, FinishReason, SamplingParams, StepOutputs


@dataclass
class Compiler(PositionExecutor):
    """Grammars are ready when the test says so. A row whose grammar is a number is complete with so many tokens."""

    waiting: dict[str, list[Callable[[str], None]]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # request id -> position of the token that completes it

    def compile(self, grammar: str, done: Callable[[str], None]) -> None:
        self.waiting.setdefault(grammar, []).append(done)

    def answer(self, grammar: str, problem: str = "") -> None:
        for done in self.waiting.pop(grammar):
            done(problem)

    def submit(self, plan: SchedulerOutput) -> Handle:
        for row in plan.added:
            if row.sampling.grammar.isdigit():
                self.lengths[row.request_id] = row.num_prompt_tokens + int(row.sampling.grammar) - 1
        handle = super().submit(plan)
        assert isinstance(handle, Done)
        for index, (request_id, tokens) in enumerate(zip(plan.request_ids, handle.output.token_ids, strict=True)):
            if tokens and tokens[0] == self.lengths.get(request_id):
                handle.output.complete.add(index)
        return handle


class House:
    def __init__(self, **settings: object) -> None:
        self.executor = Compiler()
        self.inbox: queue.SimpleQueue[GrammarReady] = queue.SimpleQueue()
        self.core: EngineCore
        self.core, _ = build_core(build_config(settings), self.executor, time.monotonic, post=self.inbox.put)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}

    def add(self, request_id: int, grammar: str = "", **sampling: object) -> None:
        params = SamplingParams(**{"max_tokens": 50, "grammar": grammar, **sampling})
        self.core.handle(AddRequest(request_id, [1, 2, 3], params, 0.0))

    def run(self) -> None:
        """Until there is nothing to do."""
        while True:
            while not self.inbox.empty():
                self.core.handle(self.inbox.get())
            if self.core.idle:
                return
            self.note(self.core.step())

    def note(self, outputs: StepOutputs | None) -> None:
        if outputs is None:
            return
        begin = 0
        for request_id, count in zip(outputs.request_ids, outputs.token_counts, strict=True):
            self.tokens.setdefault(request_id, []).extend(outputs.token_ids[begin : begin + count])
            begin += count
        for request_id, reason in outputs.finished.items():
            assert request_id not in self.finished
            self.finished[request_id] = reason
        self.errors |= outputs.errors


@pytest.fixture(params=["on", "off"])
def house(request: pytest.FixtureRequest) -> House:
    return House(overlap=request.param)


def test_others_run_while_a_grammar_compiles(house: House) -> None:
    house.add(1, "5")
    house.add(2)
    house.run()
    assert house.core.idle, "the engine sleeps until the grammar is there"
    assert house.finished == {2: FinishReason.LENGTH}
    assert 1 not in house.tokens
    house.executor.answer("5")
    house.run()
    assert house.finished[1] is FinishReason.STOP
    assert house.tokens[1] == [3, 4, 5, 6, 7]


def test_a_grammar_that_does_not_compile_ends_its_request_alone(house: House) -> None:
    house.add(1, "bad")
    house.add(2, "3")
    house.executor.answer("bad", "it is too complex")
    house.executor.answer("3")
    house.run()
    assert house.finished == {1: FinishReason.ERROR, 2: FinishReason.STOP}
    assert house.errors == {1: "it is too complex"}


def test_an_abort_while_compiling_leaks_nothing(house: House) -> None:
    house.add(1, "5")
    house.core.handle(AbortRequests([1]))
    house.core.handle(AbortRequests([1]))
    house.run()
    assert house.finished == {1: FinishReason.ABORT}
    house.executor.answer("5")
    house.run()
    assert house.executor.num_steps == 0
    assert not house.core.scheduler.requests
    assert not house.core._compiling
    house.add(2, "2")
    house.executor.answer("2")
    house.run()
    assert house.finished[2] is FinishReason.STOP


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(4, FinishReason.LENGTH), (5, FinishReason.STOP), (6, FinishReason.STOP)]
)
def test_o28_the_end_of_the_grammar_is_a_stop_whatever_else_was_asked(
    house: House, max_tokens: int, reason: FinishReason
) -> None:
    house.add(1, "5", max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True)
    house.executor.answer("5")
    house.run()
    assert house.finished == {1: reason}
    assert len(house.tokens[1]) == min(5, max_tokens)


def test_a_row_that_must_know_its_tokens_is_never_planned_ahead() -> None:
    house = House(overlap="on")
    seen: list[tuple[int, bool]] = []
    in_flight: set[int] = set()
    submit = house.executor.submit

    def watch(plan: SchedulerOutput) -> Handle:
        seen.extend((request_id, request_id in in_flight) for request_id in plan.request_ids)
        in_flight.update(plan.request_ids)
        handle = submit(plan)
        result = handle.result

        def take():
            in_flight.difference_update(plan.request_ids)
            return result()

        handle.result = take  # type: ignore[method-assign]
        return handle

    house.executor.submit = watch  # type: ignore[method-assign]
    house.add(1, "20")
    house.add(2, bad_words=((1, 2),))
    house.add(3)
    house.executor.answer("20")
    house.run()
    assert house.finished == {1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.LENGTH}
    assert not any(ahead for request_id, ahead in seen if request_id != 3)
    assert any(ahead for request_id, ahead in seen if request_id == 3), "free rows still run ahead"


def test_the_engine_wakes_for_a_grammar_that_a_thread_compiled() -> None:
    """Through the inbox of the real loop, in which it sleeps."""

    class Slow(Compiler):
        def compile(self, grammar: str, done: Callable[[str], None]) -> None:
            threading.Timer(0.05, done, ("",)).start()

    async def test() -> None:
        client = InProcessEngineClient(Config(), Slow, None)
        await client.start()
        try:
            params = SamplingParams(max_tokens=50, grammar="4")
            deltas = [delta async for delta in client.generate(AddRequest(1, [1, 2, 3], params, time.monotonic()))]
        finally:
            await client.close()
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert [token for delta in deltas for token in delta.token_ids] == [3, 4, 5, 6]

    asyncio.run(asyncio.wait_for(test(), 30))
