"""An engine without a model: a fake executor whose next token is a hash of the prefix that it can really read.

SymbolicRunner keeps a "KV cache" that remembers, for each slot, which (position, token) was written there. A wrong block
table, slot, chunk, resume or prefix hit makes it read something else, so the next token differs from the oracle's,
which computes one request alone from nothing but its tokens. No torch, microseconds per step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ropeway.engine.core import EngineCore
from ropeway.engine.kv_cache import KVCacheManager
from ropeway.engine.policy import POLICIES
from ropeway.engine.request import RequestStatus
from ropeway.engine.scheduler import Scheduler
from ropeway.engine.step import KVCapacity, ModelRunnerOutput, SchedulerOutput
from ropeway.protocol import AddRequest, FinishReason, PromptLogprobs, SamplingParams, StepOutputs

VOCAB = 40  # small, so that stop tokens turn up


def next_token(prefix: list[int], seed: int) -> int:
    digest = blake2b(bytes(f"{seed}:{prefix}", "ascii"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def oracle(request: AddRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the request must produce, whoever else is in the batch."""
    sampling = request.sampling
    tokens = list(request.prompt_token_ids)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else sampling.eos_token_ids)}
    limit = min(len(tokens) + sampling.max_tokens, max_model_len)
    output: list[int] = []
    if sampling.max_tokens == 0:
        return output, FinishReason.STOP if sampling.pooling else FinishReason.LENGTH
    while True:
        token = next_token(tokens, sampling.seed)
        tokens.append(token)
        output.append(token)
        if token in stops:
            return output, FinishReason.STOP
        if len(tokens) >= limit:
            return output, FinishReason.LENGTH


def oracle_scores(prompt: list[int]) -> list[int]:
    """The ranks of the prompt's tokens after the first, each a hash of the tokens before it."""
    return [next_token(prompt[:end], 0) for end in range(1, len(prompt))]


@dataclass
class Row:
    epoch: int
    tokens: list[int]
    table: list[int]
    sampling: SamplingParams
    num_prompt: int
    num_scored: int
    num_pooled: int = 0  # prompt tokens that this row computed itself


class SymbolicRunner:
    """An Executor. ``lazy`` runs a step only when its result is asked for, as late as a real device might."""

    def __init__(self, capacity: KVCapacity, *, lazy: bool = False) -> None:
        self.capacity = capacity
        self.lazy = lazy
        self.kv: dict[int, tuple[int, int]] = {}  # slot -> (position, token)
        self.rows: dict[int, Row] = {}
        self.num_copies = 0
        self.is_published: Callable[[int], bool] = lambda block: False
        self.fail_rows: Callable[[SchedulerOutput], dict[int, str]] = lambda plan: {}
        self._queue: deque[tuple[SchedulerOutput, Pending]] = deque()

    def start(self) -> KVCapacity:
        return self.capacity

    def submit(self, plan: SchedulerOutput) -> Pending:
        handle = Pending(self)
        self._queue.append((plan, handle))
        if not self.lazy:
            self.drain(handle)
        return handle

    def drain(self, until: Pending) -> None:
        while until.output is None:
            plan, handle = self._queue.popleft()
            handle.output = self.execute(plan)

    def close(self) -> None:
        self._queue.clear()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        size = self.capacity.block_size
        num_rows = len(plan.request_ids)
        assert num_rows == len(set(plan.request_ids)) > 0
        for column in (plan.epochs, plan.start_positions, plan.num_tokens, plan.samples):
            assert len(column) == num_rows
        for request_id in plan.removed:
            del self.rows[request_id]
        for new in plan.added:
            assert new.request_id not in self.rows
            self.rows[new.request_id] = Row(
                new.epoch,
                list(new.token_ids),
                list(new.block_ids),
                new.sampling,
                new.num_prompt_tokens,
                new.num_scored,
            )
        for request_id, blocks in plan.new_blocks.items():
            self.rows[request_id].table += blocks
        for source, target in plan.block_copies:
            self.copy_block(source, target)
        targets = [target for _, target in plan.block_copies]
        assert len(set(targets)) == len(targets), "a block is the target of two copies"
        assert not set(targets) & {source for source, _ in plan.block_copies}
        holders = Counter(block for row in self.rows.values() for block in row.table)
        assert all(holders[target] == 1 for target in targets), "a copy overwrites another's block"
        written: set[int] = set()
        for request_id, epoch, start, count in zip(
            plan.request_ids, plan.epochs, plan.start_positions, plan.num_tokens, strict=True
        ):
            row = self.rows[request_id]
            assert row.epoch == epoch
            assert count > 0, "a scheduled row computes at least one token"
            assert start + count <= len(row.tokens), "a position is computed before its token is known"
            for position in range(start, start + count):
                block = row.table[position // size]
                slot = block * size + position % size
                assert block != 0, "the null block belongs to nobody"
                assert slot not in written, f"slot {slot} is written twice in a step"
                assert not self.is_published(block), f"block {block} is published and must not change"
                assert holders[block] == 1, f"block {block} is shared and must not change"
                written.add(slot)
                self.kv[slot] = (position, row.tokens[position])
        errors = self.fail_rows(plan)
        output = ModelRunnerOutput(plan.step_id, [], errors=errors)
        sampled = output.token_ids
        for index, request_id in enumerate(plan.request_ids):
            row = self.rows[request_id]
            start = plan.start_positions[index]
            end = start + plan.num_tokens[index]
            self.read_prompt(index, row, start, end, output)
            if not plan.samples[index] or index in errors:
                sampled.append([])
                continue
            assert end == len(row.tokens), "a row samples exactly when all its tokens are computed"
            row.tokens.append(next_token(self.read(row, end), row.sampling.seed))
            sampled.append([row.tokens[-1]])
        return output

    def copy_block(self, source: int, target: int) -> None:
        size = self.capacity.block_size
        assert not self.is_published(target), f"block {target} is published and must not change"
        for offset in range(size):
            self.kv.pop(target * size + offset, None)
            if (held := self.kv.get(source * size + offset)) is not None:
                self.kv[target * size + offset] = held
        self.num_copies += 1

    def read(self, row: Row, end: int) -> list[int]:
        """The first tokens of a row, out of its blocks."""
        size = self.capacity.block_size
        prefix = []
        for position in range(end):
            held_position, token = self.kv[row.table[position // size] * size + position % size]
            assert held_position == position
            prefix.append(token)
        return prefix

    def read_prompt(self, index: int, row: Row, start: int, end: int, output: ModelRunnerOutput) -> None:
        """What the row wants of its prompt's tokens."""
        end = min(end, row.num_prompt)
        if row.sampling.prompt_logprobs is not None:
            scores = PromptLogprobs(0)
            for position in range(max(start, row.num_scored), min(end, row.num_prompt - 1)):
                scores.logprobs.append(0.0)
                scores.ranks.append(next_token(self.read(row, position + 1), 0))
            if scores:
                output.prompt_logprobs[index] = scores
        row.num_pooled += max(0, end - start)
        if row.sampling.pooling and start < end == row.num_prompt:
            first = row.num_prompt - row.num_pooled  # of the tokens that this row has computed itself
            pooled = self.read(row, end)[first:] if row.sampling.pooling == "mean" else self.read(row, end)
            output.embeddings[index] = [float(token) for token in pooled]


class Pending:
    def __init__(self, runner: SymbolicRunner) -> None:
        self._runner = runner
        self.output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        self._runner.drain(self)
        assert self.output is not None
        return self.output


@dataclass
class Setup:
    block_size: int = 4
    num_blocks: int = 64  # the null block included
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    max_chunk: int = 0
    prefix_caching: bool = True
    overlap: bool = False
    lazy: bool = False
    policy: str = "fcfs"


@dataclass
class Record:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    scores: list[int] | None = None
    embedding: list[float] | None = None


class SymbolicEngine:
    """EngineCore over a SymbolicRunner, with every invariant checked after every step."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        limit = min(setup.max_model_len, (setup.num_blocks - 1) * setup.block_size)
        capacity = KVCapacity(setup.num_blocks, setup.block_size, limit, VOCAB, "none", "none", "symbolic")
        self.runner = SymbolicRunner(capacity, lazy=setup.lazy)
        self.kv = KVCacheManager(setup.num_blocks, setup.block_size, setup.prefix_caching)
        self.runner.is_published = lambda block: self.kv.pool.hash_of[block] is not None
        self.now = 0.0
        self.scheduler = Scheduler(
            self.kv,
            POLICIES[setup.policy](),
            self.clock,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=limit,
            long_prefill_token_threshold=setup.max_chunk,
        )
        self.core = EngineCore(self.scheduler, self.runner, self.clock, overlap=setup.overlap)
        self.sent: dict[int, AddRequest] = {}
        self.aborted: set[int] = set()
        self.records: dict[int, Record] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_hits = 0
        self.steps_without_progress = 0

    def clock(self) -> float:
        self.now += 1e-3
        return self.now

    @property
    def max_model_len(self) -> int:
        return self.runner.capacity.max_model_len

    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        cache_salt: str = "",
        output: list[int] | None = None,
        **more: Any,
    ) -> int:
        """more: further fields of AddRequest."""
        request_id = len(self.sent)
        request = AddRequest(
            request_id, prompt, sampling, self.now, output_token_ids=output or [], cache_salt=cache_salt, **more
        )
        self.sent[request_id] = request
        self.records[request_id] = Record()
        self.core.handle(request)
        return request_id

    def step(self) -> StepOutputs | None:
        computed_before = {r.request_id: r.num_computed_tokens for r in self.scheduler.running}
        outputs = self.core.step()
        self.num_steps += 1
        self.check_invariants()
        computed_after = {r.request_id: r.num_computed_tokens for r in self.scheduler.running}
        if outputs is not None:
            self.take(outputs)
        progress = computed_after != computed_before or (outputs is not None and outputs.request_ids)
        self.steps_without_progress = 0 if progress else self.steps_without_progress + 1
        if self.scheduler.has_unfinished:
            assert self.steps_without_progress <= 2, "the engine turns without progress"
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if self.core.idle:
                return
            self.step()
        raise AssertionError("the engine did not come to rest")

    def take(self, outputs: StepOutputs) -> None:
        assert len(outputs.request_ids) == len(set(outputs.request_ids)) == len(outputs.token_counts)
        assert sum(outputs.token_counts) == len(outputs.token_ids)
        offset = 0
        for request_id, count in zip(outputs.request_ids, outputs.token_counts, strict=True):
            record = self.records[request_id]
            assert record.finish is None, "a finished request spoke again"
            record.tokens += outputs.token_ids[offset : offset + count]
            offset += count
            assert (record.cached_tokens is None) or request_id not in outputs.cached_tokens
            if record.cached_tokens is None and request_id in outputs.cached_tokens:
                record.cached_tokens = outputs.cached_tokens[request_id]
                assert outputs.first_scheduled[request_id] > 0
        for request_id, scores in outputs.prompt_logprobs.items():
            assert self.records[request_id].scores is None
            self.records[request_id].scores = list(scores.ranks)
        for request_id, embedding in outputs.embeddings.items():
            self.records[request_id].embedding = embedding
        for request_id, reason in outputs.finished.items():
            assert request_id in outputs.request_ids
            self.records[request_id].finish = reason
        self.num_preemptions += outputs.stats.num_new_preemptions
        self.num_hits += outputs.stats.num_new_prefix_hits

    def check_invariants(self) -> None:
        scheduler, kv, pool = self.scheduler, self.kv, self.kv.pool
        # Every request is in exactly one place and only running ones hold blocks.
        running = {request.request_id for request in scheduler.running}
        waiting = {request.request_id for request in scheduler.waiting}
        forks = {request.request_id for request in scheduler.forks}
        assert len(running) + len(waiting) + len(forks) == len(scheduler.requests)
        assert running | waiting | forks == set(scheduler.requests)
        assert {request.parent.request_id for request in scheduler.forks} <= set(scheduler.requests)
        assert set(kv.tables) == running
        assert len(scheduler.running) == len(running) <= self.setup.max_num_seqs
        assert len(scheduler.waiting) == len(waiting)
        for request in scheduler.requests.values():
            is_running = request.request_id in running
            assert request.status is (RequestStatus.RUNNING if is_running else RequestStatus.WAITING)
            assert 0 <= request.num_computed_tokens <= request.num_tokens < request.max_num_tokens
            assert len(request.token_ids) <= request.num_tokens + 1
            if is_running:
                assert len(kv.tables[request.request_id]) == kv.blocks_for(request.num_computed_tokens)
            else:
                assert request.num_computed_tokens == 0
        # Blocks are conserved: references are table memberships, everything else is free exactly once.
        members = [0] * len(pool.ref_cnt)
        for table in kv.tables.values():
            assert len(table) == len(set(table))
            for block in table:
                members[block] += 1
        assert members == pool.ref_cnt
        assert members[0] == 0
        free = [*pool._empty, *pool._cached]
        assert len(free) == len(set(free)) == pool.num_free
        assert {b for b in range(1, len(members)) if members[b] == 0} == set(free)
        assert pool.num_used + pool.num_free == pool.num_usable
        # The hash index and the blocks agree; cached means published and unreferenced.
        assert {h: b for b, h in enumerate(pool.hash_of) if h is not None} == pool.block_of
        assert set(pool._cached) == {b for b in pool.block_of.values() if members[b] == 0}
        if not self.setup.prefix_caching:
            assert not pool.block_of
        live = sum(request.num_computed_tokens for request in scheduler.running)
        assert scheduler._num_live_tokens == live

    def check_end(self) -> None:
        """Everything is finished, every text is the oracle's, nothing leaked."""
        assert self.core.idle
        assert self.kv.pool.num_used == 0
        assert not self.scheduler._in_flight
        assert not self.scheduler._unreported
        assert set(self.runner.rows) <= set(self.scheduler._removed)
        for request_id, request in self.sent.items():
            record = self.records[request_id]
            expected, reason = oracle(request, self.max_model_len)
            if record.finish in (FinishReason.DEADLINE, FinishReason.QUEUE_TIMEOUT):
                limit = request.deadline if record.finish is FinishReason.DEADLINE else request.queue_deadline
                assert limit is not None
                assert limit <= self.now
                assert record.tokens == expected[: len(record.tokens)]
                assert record.finish is FinishReason.DEADLINE or record.cached_tokens is None
            elif record.finish is FinishReason.ABORT:
                assert request_id in self.aborted
                assert record.tokens == expected[: len(record.tokens)]
            else:
                assert [*request.output_token_ids, *record.tokens] == expected
                assert record.finish is reason
                assert record.cached_tokens is not None or not record.tokens
                self.check_prompt_results(request, record)

    @staticmethod
    def check_prompt_results(request: AddRequest, record: Record) -> None:
        if request.sampling.prompt_logprobs is None:
            assert record.scores is None
        else:
            assert record.scores == oracle_scores(request.prompt_token_ids)
        assert record.embedding == (request.prompt_token_ids if request.sampling.pooling else None)
