"""Stand-ins for whole rooms, shared by the tests of their neighbours.

FakeEngineClient: an engine whose tokens are scripted, for the tests of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ropeway.engine.client import EngineHealth, EngineState, StatsListener, TokenDelta
from ropeway.errors import EngineDeadError
from ropeway.protocol import (
    AddRequest,
    EngineReady,
    EngineStats,
    FinishReason,
    PromptLogprobs,
    StepOutputs,
    TokenLogprobs,
)


@dataclass
class Script:
    """What the engine does with one sequence."""

    tokens: Sequence[int]  # over and over again, until max_tokens or an end token
    waits: Mapping[int, asyncio.Event] = field(default_factory=dict)  # output position -> set it to let the token out
    logprobs: Callable[[int, int], TokenLogprobs] | None = None  # of (token, how many alternatives)
    tokens_per_delta: int = 1
    num_cached_tokens: int = 0
    error_after: int | None = None  # after so many tokens the sequence fails alone
    embedding: Sequence[float] = ()
    complete_after: int | None = None  # with so many tokens its grammar is complete


class FakeEngineClient:
    """Follows the EngineClient protocol and the end-of-sequence rules of the engine; no model, no scheduler."""

    def __init__(
        self, script: Callable[[AddRequest], Script], *, ready: EngineReady, on_step: StatsListener | None = None
    ) -> None:
        self.script = script
        self.ready = ready
        self.on_step = on_step
        self.added: list[AddRequest] = []
        self.ended: list[int] = []  # in order, whatever the reason
        self.aborted: list[int] = []  # those that ended before the engine had finished them
        self.live: set[int] = set()
        self.num_prefix_resets = 0
        self._state = EngineState.ALIVE
        self._reason = ""
        self._num_restarts = 0
        self.heartbeat_age = 0.0
        self._abort_wanted: set[int] = set()
        self._wake: dict[int, asyncio.Event] = {}
        self._iterators: list[AsyncIterator[TokenDelta]] = []  # kept, so that none is ended by garbage collection

    async def start(self) -> EngineReady:
        return self.ready

    def generate(self, request: AddRequest) -> AsyncIterator[TokenDelta]:
        self._iterators.append(self._generate(request))
        return self._iterators[-1]

    async def _generate(self, request: AddRequest) -> AsyncIterator[TokenDelta]:
        self._check_alive()
        assert all(request.request_id != other.request_id for other in self.added), "a request id was used twice"
        script = self.script(request)
        self.added.append(request)
        self.live.add(request.request_id)
        self._wake[request.request_id] = asyncio.Event()
        finished = False
        self._report(0)
        try:
            position = 0
            while not finished:
                await self._wait(request.request_id, script.waits.get(position))
                self._check_alive()
                if request.request_id in self._abort_wanted:
                    delta = TokenDelta([], FinishReason.ABORT)
                elif script.error_after == position:
                    delta = TokenDelta([], FinishReason.ERROR, error="the logits were not numbers")
                else:
                    delta = self._next(request, script, position)
                if position == 0:
                    delta.num_cached_tokens = script.num_cached_tokens
                    delta.first_scheduled = request.arrival_time + 0.001
                    delta.prompt_logprobs = self._prompt_logprobs(request, script)
                position += len(delta.token_ids)
                finished = delta.finish_reason is not None
                if finished:
                    self.live.discard(request.request_id)
                self._report(len(delta.token_ids))
                yield delta
        finally:
            if not finished:
                self.aborted.append(request.request_id)
            self.ended.append(request.request_id)
            self.live.discard(request.request_id)
            self._wake.pop(request.request_id, None)
            self._report(0)

    def _next(self, request: AddRequest, script: Script, position: int) -> TokenDelta:
        sampling = request.sampling
        delta = TokenDelta([], logprobs=[] if sampling.logprobs is not None else None)
        if sampling.max_tokens == 0:
            delta.finish_reason = FinishReason.STOP if sampling.pooling else FinishReason.LENGTH
            delta.embedding = list(script.embedding) if sampling.pooling else None
            return delta
        for number in range(position + 1, position + 1 + script.tokens_per_delta):
            token = script.tokens[(number - 1) % len(script.tokens)]
            delta.token_ids.append(token)
            if delta.logprobs is not None and sampling.logprobs is not None:
                assert script.logprobs is not None, "the script has no logprobs"
                delta.logprobs.append(script.logprobs(token, sampling.logprobs))
            if number >= sampling.min_tokens and token in sampling.stop_token_ids:
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, token
            elif number == script.complete_after or (
                number >= sampling.min_tokens and token in sampling.eos_token_ids and not sampling.ignore_eos
            ):
                delta.finish_reason = FinishReason.STOP
            elif number == sampling.max_tokens:
                delta.finish_reason = FinishReason.LENGTH
            if delta.finish_reason is not None:
                break
        return delta

    @staticmethod
    def _prompt_logprobs(request: AddRequest, script: Script) -> PromptLogprobs | None:
        count = request.sampling.prompt_logprobs
        if count is None:
            return None
        assert script.logprobs is not None, "the script has no logprobs"
        found = PromptLogprobs(count)
        for token in request.prompt_token_ids[1:]:
            value = script.logprobs(token, count)
            found.logprobs.append(value.logprob)
            found.ranks.append(value.rank)
            found.top_ids.extend(value.top_ids)
            found.top_logprobs.extend(value.top_logprobs)
        return found

    async def _wait(self, request_id: int, gate: asyncio.Event | None) -> None:
        """For the gate, an abort or the engine's death."""
        await asyncio.sleep(0)
        if gate is None or request_id in self._abort_wanted:
            return
        waits = [asyncio.create_task(event.wait()) for event in (gate, self._wake[request_id])]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _check_alive(self) -> None:
        if self._state is not EngineState.ALIVE:
            raise EngineDeadError(self._reason)

    def _report(self, num_tokens: int) -> None:
        """A step message: one used block of ten per live sequence."""
        if self.on_step is not None:
            stats = EngineStats(
                num_running=len(self.live),
                num_blocks=10,
                num_used_blocks=len(self.live),
                num_live_tokens=16 * len(self.live),
                num_new_decode_tokens=num_tokens,
                execute_seconds=0.5 if num_tokens else 0.0,
            )
            self.on_step(StepOutputs(token_ids=[0] * num_tokens, stats=stats))

    async def abort(self, request_id: int) -> None:
        if request_id in self.live:
            self._abort_wanted.add(request_id)
            self._wake[request_id].set()

    async def abort_all(self) -> None:
        for request_id in list(self.live):
            await self.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        self._check_alive()
        self.num_prefix_resets += 1

    def die(self, reason: str = "killed by SIGKILL") -> None:
        self._state, self._reason = EngineState.DEAD, reason
        for event in self._wake.values():
            event.set()

    def restart(self) -> None:
        self._state, self._reason = EngineState.ALIVE, ""
        self._num_restarts += 1

    @property
    def health(self) -> EngineHealth:
        return EngineHealth(self._state, 0, self.heartbeat_age, self._num_restarts, self._reason)

    async def close(self) -> None:
        self.die("closed")
