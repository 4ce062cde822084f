"""The scheduler: what the next step computes, and what the last step's result means.

Owns: requests, the running list, the token and row budgets. Must not know: devices, processes, text, the clock's source.
Called by: engine.core, alternating ``schedule()`` and ``update()``; ``update`` may lag one step behind (overlap).

There are no phases. Each running request gets ``num_tokens - num_computed_tokens`` tokens of the step, as far as the
budget lasts: one for a request that decodes, a chunk for one whose prompt is being read or read again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from ropeway.engine.forks import Forks, may_fork, prompt_holder
from ropeway.engine.kv_cache import KVCacheManager
from ropeway.engine.policy import SchedulingPolicy
from ropeway.engine.request import Request, RequestStatus
from ropeway.engine.step import ModelRunnerOutput, NewRow, SchedulerOutput
from ropeway.protocol import AddRequest, FinishReason, StepOutputs


class _InFlight:
    """What the scheduler remembers of a plan until its result comes."""

    __slots__ = ("ends", "fills", "rows")

    def __init__(self) -> None:
        self.rows: list[Request] = []
        self.fills: list[tuple[Request, int, int]] = []  # (request, epoch, tokens computed) where a block may be full
        self.ends: list[tuple[Request, int]] = []  # (request, epoch) that generate nothing and end with this step


class Scheduler:
    def __init__(
        self,
        kv: KVCacheManager,
        policy: SchedulingPolicy,
        clock: Callable[[], float],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.kv = kv
        self.waiting = policy
        self.running: list[Request] = []  # in order of admission
        self.forks = Forks()  # neither waiting nor running
        self.requests: dict[int, Request] = {}  # all of them
        self._clock = clock
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_chunk = long_prefill_token_threshold or max_num_batched_tokens
        self._step_id = 0
        self._in_flight: dict[int, _InFlight] = {}  # by step id
        self._removed: list[int] = []  # rows that the runner can free with the next plan
        self._unreported: dict[int, Request] = {}  # running, but no output row yet carried its first facts
        self._outputs = StepOutputs()  # what happened since the last message up
        self._changed = False  # there is something to tell even without a step
        self._num_live_tokens = 0
        self._timers: list[tuple[float, int, FinishReason]] = []  # a heap of (time.monotonic(), request id, what then)

    # Requests in and out

    def add(self, message: AddRequest, problem: str = "") -> None:
        """Queue a request. One that could never run, or that has a problem already, ends at once with an error; the
        server refuses such requests earlier."""
        if message.request_id in self.requests:
            raise ValueError(f"request id {message.request_id} is in use")
        request = Request(message, self._max_model_len)
        parent = None if message.fork_of is None else self.requests.get(message.fork_of)
        self.requests[request.request_id] = request
        if parent is not None and may_fork(request, parent):
            self.forks.add(request, parent)
        else:
            self.waiting.add(request)
        self._changed = True
        self._set_timers(request)
        problem = problem or self._impossible(request)
        if problem:
            self._end_without_token(request, FinishReason.ERROR, problem)
        elif request.num_tokens >= request.max_num_tokens:  # resumed after its last token had been made
            self._end_without_token(request, FinishReason.LENGTH)

    def abort(self, request_id: int) -> None:
        """Stop a request in any state. Unknown and finished ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end_without_token(request, FinishReason.ABORT)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def changed(self) -> bool:
        """flush() has something to tell."""
        return self._changed

    # The step

    def schedule(self) -> SchedulerOutput:
        """Plan one step: running requests first, then waiting ones while tokens, rows and blocks last.

        Its tokens count as computed from here on, so that the next plan can be made before this one's result.
        """
        if self._timers:
            self._expire()
        if len(self.forks):
            self._queue_forks(self.forks.pop_ready())
        plan = SchedulerOutput(self._step_id)
        step = _InFlight()
        rows = step.rows
        budget, preempted = self._schedule_running(plan, step)
        if budget > 0 and not preempted and len(self.waiting):
            budget = self._schedule_waiting(plan, step, budget)
        if rows:
            plan.request_ids = [request.request_id for request in rows]
            plan.epochs = [request.epoch for request in rows]
            plan.total_tokens = self._max_num_batched_tokens - budget
            plan.removed, self._removed = self._removed, []
            self._num_live_tokens += plan.total_tokens
            self._in_flight[self._step_id] = step
            self._step_id += 1
        return plan

    def _schedule_running(self, plan: SchedulerOutput, step: _InFlight) -> tuple[int, bool]:
        """Give every running request its tokens. Returns the budget left and whether anyone was preempted.

        This loop and update()'s are the whole cost of steady decoding, so they are written flat.
        """
        budget = self._max_num_batched_tokens
        preempted = False
        block_size = self.kv.block_size
        rows, starts, counts, samples = step.rows, plan.start_positions, plan.num_tokens, plan.samples
        for request in self.running:  # preemption removes only from behind
            start, num_tokens = request.num_computed_tokens, request.num_tokens
            count = num_tokens - start
            if count != 1:
                count = min(count, self._max_chunk, budget)
                if count == 0:  # its last token is in flight, or the budget is spent
                    continue
                self._outputs.stats.num_new_prefill_tokens += count
            elif budget == 0:
                continue
            end = start + count
            room = -start % block_size  # tokens that the last block has room for
            if count >= room:
                if count > room:
                    blocks = self.kv.allocate(request, end)
                    while blocks is None:
                        preempted = True
                        victim = self.waiting.victim(self.running[self.running.index(request) :])
                        self._preempt(victim)
                        if victim is request:
                            return budget, preempted
                        blocks = self.kv.allocate(request, end)
                    plan.new_blocks[request.request_id] = blocks
                if room or count >= block_size:
                    step.fills.append((request, request.epoch, end))
            rows.append(request)
            starts.append(start)
            counts.append(count)
            budget -= count
            request.num_computed_tokens = end
            if end < num_tokens:
                samples.append(False)
            elif end + 1 < request.max_num_tokens:
                if request.runs_ahead:
                    request.num_tokens = end + 1
                samples.append(True)
            else:
                samples.append(self._last_of(request, step))
        return budget, preempted

    def _schedule_waiting(self, plan: SchedulerOutput, step: _InFlight, budget: int) -> int:
        """Admit by policy. A request enters only if the pool can hold all its known tokens and still give each
        running request one more block: admitting more would only preempt someone in the next few steps."""
        while budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting.peek()
            if request is None:
                break
            parent = prompt_holder(request)
            hit = self.kv.lookup(request) if parent is None else self.kv.fork(parent)
            if not self.kv.can_hold(request.num_tokens, hit, reserve=len(self.running)):
                break
            start = hit.num_tokens
            count = min(request.num_tokens - start, self._max_chunk, budget)
            end = start + count
            if self.kv.allocate(request, end, hit) is None:
                raise AssertionError("the pool promised to hold the whole request")
            if hit.tail is not None:
                plan.block_copies.append((hit.tail, self.kv.tables[request.request_id][len(hit.block_ids)]))
            self.waiting.remove(request)
            self._admit(request, start)
            plan.added.append(
                NewRow(
                    request_id=request.request_id,
                    epoch=request.epoch,
                    token_ids=list(request.token_ids),
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_computed_tokens=start,
                    block_ids=list(self.kv.tables[request.request_id]),
                    sampling=request.sampling,
                    num_scored=request.num_scored,
                )
            )
            step.rows.append(request)
            step.fills.append((request, request.epoch, end))
            plan.start_positions.append(start)
            plan.num_tokens.append(count)
            budget -= count
            request.num_computed_tokens = end
            if end < request.num_tokens:
                plan.samples.append(False)
            elif end + 1 < request.max_num_tokens:
                if request.runs_ahead:
                    request.num_tokens = end + 1
                plan.samples.append(True)
            else:
                plan.samples.append(self._last_of(request, step))
            self._outputs.stats.num_new_prefill_tokens += count
        return budget

    @staticmethod
    def _last_of(request: Request, step: _InFlight) -> bool:
        """Whether the last row of ``step``, after which nothing of the request is left to compute, samples. (The KV of
        the last generated token is never needed.)"""
        if request.sampling.max_tokens > 0:
            return True
        step.ends.append((request, request.epoch))
        return False

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> StepOutputs:
        """Take in one step's result: append tokens, publish full blocks, finish what is finished."""
        step = self._in_flight.pop(plan.step_id)
        rows, outputs = step.rows, self._outputs
        for index, logprobs in result.logprobs.items():
            if rows[index].epoch == plan.epochs[index]:
                outputs.logprobs[rows[index].request_id] = logprobs
        for index, error in result.errors.items():
            if rows[index].epoch == plan.epochs[index]:
                self._end_without_token(rows[index], FinishReason.ERROR, error)
        for request, epoch, end in step.fills:
            if request.epoch == epoch:
                self.kv.commit(request, end)
        for index, scores in result.prompt_logprobs.items():
            if rows[index].epoch == plan.epochs[index]:
                rows[index].add_prompt_logprobs(scores)
        for index, embedding in result.embeddings.items():
            if rows[index].epoch == plan.epochs[index]:
                outputs.embeddings[rows[index].request_id] = embedding
        for request, epoch in step.ends:
            if request.epoch == epoch:
                self._end_without_token(request, FinishReason.STOP if request.sampling.pooling else FinishReason.LENGTH)
        request_ids, token_ids = outputs.request_ids, outputs.token_ids
        num_before = len(token_ids)
        complete = result.complete
        for index, (request, epoch, tokens) in enumerate(zip(rows, plan.epochs, result.token_ids, strict=True)):
            # Another epoch: aborted, preempted or failed meanwhile; nobody waits for this row.
            if request.epoch != epoch or not tokens:
                continue
            (token,) = tokens
            known = request.token_ids
            known.append(token)
            request_ids.append(request.request_id)
            token_ids.append(token)
            if token in request.stop_ids:
                if token in request.sampling.stop_token_ids:
                    outputs.stop_reasons[request.request_id] = token
                self._finish(request, FinishReason.STOP)
            elif complete and index in complete:
                self._finish(request, FinishReason.STOP)
            elif len(known) >= request.max_num_tokens:
                self._finish(request, FinishReason.LENGTH)
            elif not request.runs_ahead:
                request.num_tokens = len(known)
        outputs.token_counts += [1] * (len(token_ids) - num_before)
        outputs.stats.num_new_decode_tokens += len(token_ids) - num_before
        outputs.stats.execute_seconds = result.execute_seconds
        return self._take_outputs()

    def flush(self) -> StepOutputs | None:
        """What there is to tell though no step ended: aborts, refusals, changed gauges."""
        return self._take_outputs() if self._changed else None

    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()
        self._changed = True

    # Changes of a request's state

    def _admit(self, request: Request, num_cached_tokens: int) -> None:
        self.running.insert(self.waiting.place(request, self.running), request)
        request.status = RequestStatus.RUNNING
        request.parent = None
        request.num_computed_tokens = num_cached_tokens
        self._num_live_tokens += num_cached_tokens
        if request.first_scheduled is None:
            request.first_scheduled = self._clock()
            request.num_cached_tokens = num_cached_tokens
            self._unreported[request.request_id] = request
            self._outputs.stats.num_new_prefix_queries += request.num_tokens
            self._outputs.stats.num_new_prefix_hits += num_cached_tokens

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks away. It comes back before newer ones and is computed again, except for full
        blocks that are still in the prefix cache then."""
        stats = self._outputs.stats
        stats.num_new_preemptions += 1
        stats.num_new_recomputed_tokens += request.num_computed_tokens
        self._leave_running(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        request.num_tokens = len(request.token_ids)
        self.waiting.requeue(request)

    def _end_without_token(self, request: Request, reason: FinishReason, error: str = "") -> None:
        self._outputs.request_ids.append(request.request_id)
        self._outputs.token_counts.append(0)
        if error:
            self._outputs.errors[request.request_id] = error
        self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Leave for good; the caller has put a row into the outputs."""
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        elif not self.forks.remove(request):
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        self._queue_forks(self.forks.pop_orphans(request))
        self._outputs.finished[request.request_id] = reason
        self._changed = True

    def _queue_forks(self, children: list[Request]) -> None:
        """They came with their parent, and so before whoever waits now."""
        for child in reversed(children):
            self.waiting.requeue(child)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        request.epoch += 1
        self._num_live_tokens -= request.num_computed_tokens
        self.kv.release(request)
        self._removed.append(request.request_id)

    def _set_timers(self, request: Request) -> None:
        if len(self._timers) > 2 * len(self.requests) + 64:  # most belong to requests that are gone
            self._timers = [timer for timer in self._timers if timer[1] in self.requests]
            heapq.heapify(self._timers)
        if request.queue_deadline is not None:
            heapq.heappush(self._timers, (request.queue_deadline, request.request_id, FinishReason.QUEUE_TIMEOUT))
        if request.deadline is not None:
            heapq.heappush(self._timers, (request.deadline, request.request_id, FinishReason.DEADLINE))

    def _expire(self) -> None:
        """End whatever has run out of its time. Tokens in flight for it are dropped."""
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            _, request_id, reason = heapq.heappop(self._timers)
            request = self.requests.get(request_id)
            if request is not None and (reason is FinishReason.DEADLINE or request.first_scheduled is None):
                self._end_without_token(request, reason)

    def _impossible(self, request: Request) -> str:
        """Why this request could never run; empty if it can."""
        if request.num_prompt_tokens == 0:
            return "the prompt is empty"
        if request.num_prompt_tokens + min(1, request.sampling.max_tokens) > self._max_model_len:
            return f"a prompt of {request.num_prompt_tokens} tokens leaves no room within {self._max_model_len}"
        if self.kv.blocks_for(request.max_num_tokens - 1) > self.kv.pool.num_usable:
            return f"{request.max_num_tokens} tokens do not fit into {self.kv.pool.num_usable} KV blocks"
        return ""

    def _take_outputs(self) -> StepOutputs:
        outputs, self._outputs = self._outputs, StepOutputs()
        self._changed = False
        if self._unreported:
            for request_id in outputs.request_ids:
                request = self._unreported.pop(request_id, None)
                if request is not None and request.first_scheduled is not None:
                    outputs.first_scheduled[request_id] = request.first_scheduled
                    outputs.cached_tokens[request_id] = request.num_cached_tokens
                    if request.prompt_logprobs is not None:
                        outputs.prompt_logprobs[request_id] = request.prompt_logprobs
                        request.prompt_logprobs = None
        stats = outputs.stats
        pool = self.kv.pool
        stats.num_running = len(self.running)
        stats.num_waiting = len(self.waiting) + len(self.forks)
        stats.num_blocks = pool.num_usable
        stats.num_used_blocks = pool.num_used
        stats.num_cached_blocks = pool.num_cached
        stats.num_live_tokens = self._num_live_tokens
        stats.step_id = self._step_id
        return outputs
