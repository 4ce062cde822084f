"""The engine's loop body: schedule, submit, update.

Owns: the order of a step and how many steps are in flight. Must not know: processes, devices, text.
Called by: engine.process (in a loop), tests, benchmarks and the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ropeway.config import Config
from ropeway.engine.kv_cache import KVCacheManager
from ropeway.engine.policy import POLICIES
from ropeway.engine.scheduler import Scheduler
from ropeway.engine.step import Executor, Handle, SchedulerOutput
from ropeway.protocol import (
    AbortRequests,
    AddRequest,
    EngineInput,
    EngineReady,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
)


@dataclass(slots=True)
class GrammarReady:
    """From the executor by way of the inbox: a request's grammar is compiled, or cannot be."""

    request_id: int
    problem: str


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        *,
        overlap: bool = False,
        post: Callable[[GrammarReady], None] | None = None,
    ) -> None:
        """overlap: plan step N + 1 while N runs. It hides the engine's own time where the device runs by itself.
        post: brings a message to `handle` between steps, from any thread; without it, an executor must compile at once.
        """
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._depth = 1 if overlap else 0
        self._in_flight: deque[tuple[SchedulerOutput, Handle, float]] = deque()
        self._post = post or self.handle
        self._compiling: dict[int, AddRequest] = {}  # requests whose grammar the executor gets ready, by id

    def handle(self, message: EngineInput | GrammarReady) -> None:
        """Take in one message from the API process, between steps."""
        match message:
            case AddRequest():
                self._add(message)
            case GrammarReady(request_id, problem):
                if (waiting := self._compiling.pop(request_id, None)) is not None:  # not aborted meanwhile
                    self.scheduler.add(waiting, problem)
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    if (waiting := self._compiling.pop(request_id, None)) is not None:
                        self.scheduler.add(waiting)
                    self.scheduler.abort(request_id)
            case ResetPrefixCache():
                self.scheduler.reset_prefix_cache()
            case Shutdown():
                pass  # the process leaves its loop; requests in flight are the API's to end

    def _add(self, message: AddRequest) -> None:
        """A request with a grammar waits outside the scheduler until its rows can begin without compiling anything."""
        request_id, grammar = message.request_id, message.sampling.grammar
        if not grammar:
            self.scheduler.add(message)
            return
        self._compiling[request_id] = message
        self._executor.compile(grammar, lambda problem: self._post(GrammarReady(request_id, problem)))

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, is in flight or is left to tell. (What compiles comes back as a message.)"""
        return not (self.scheduler.has_unfinished or self._in_flight or self.scheduler.changed)

    def step(self) -> StepOutputs | None:
        """One iteration. Returns what there is to tell, which with overlap is the previous step's outcome. Whatever
        the executor raises passes through: the engine's state is then unknown and it must be rebuilt."""
        began = self._clock()
        plan = self.scheduler.schedule()
        schedule_seconds = self._clock() - began
        if plan.request_ids:
            self._in_flight.append((plan, self._executor.submit(plan), schedule_seconds))
        if not self._in_flight or (plan.request_ids and len(self._in_flight) <= self._depth):
            return self.scheduler.flush()
        done, handle, schedule_seconds = self._in_flight.popleft()
        result = handle.result()
        began = self._clock()
        outputs = self.scheduler.update(done, result)
        outputs.stats.schedule_seconds = schedule_seconds
        outputs.stats.update_seconds = self._clock() - began
        return outputs

    def close(self) -> None:
        self._executor.close()


def build_core(
    config: Config,
    executor: Executor,
    clock: Callable[[], float],
    *,
    post: Callable[[GrammarReady], None] | None = None,
) -> tuple[EngineCore, EngineReady]:
    """Start the executor and put the engine together around the memory it found. post: as for EngineCore. Raises
    ConfigError."""
    capacity = executor.start()
    kv = KVCacheManager(capacity.num_blocks, capacity.block_size, config.cache.enable_prefix_caching)
    max_num_seqs, budget = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    scheduler = Scheduler(
        kv,
        POLICIES[config.scheduler.scheduling_policy](),
        clock,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if budget > 0 else max(max_num_seqs, capacity.step_tokens),
        max_model_len=capacity.max_model_len,
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
    )
    overlap = capacity.overlap if config.scheduler.overlap == "auto" else config.scheduler.overlap == "on"
    ready = EngineReady(
        max_model_len=capacity.max_model_len,
        vocab_size=capacity.vocab_size,
        num_blocks=kv.pool.num_usable,
        block_size=capacity.block_size,
        dtype=capacity.dtype,
        device=capacity.device,
        architecture=capacity.architecture,
        hidden_size=capacity.hidden_size,
        startup_seconds=capacity.startup_seconds,
    )
    return EngineCore(scheduler, executor, clock, overlap=overlap, post=post), ready
