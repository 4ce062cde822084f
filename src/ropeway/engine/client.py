"""The server's view of the engine: generate, abort, health. Nothing else crosses.

Owns: the EngineClient protocol and its value types; the implementations are in engine.process_client.
Must not know: text, HTTP, torch. Called by: server, cli.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ropeway.protocol import AddRequest, EngineReady, FinishReason, PromptLogprobs, StepOutputs, TokenLogprobs


@dataclass(slots=True)
class TokenDelta:
    """What one step added to one request. Deltas, never cumulative."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the client's stop token id that ended it
    logprobs: list[TokenLogprobs] | None = None  # one per token, if asked for
    num_cached_tokens: int | None = None  # on the first delta
    first_scheduled: float | None = None  # time.monotonic(), on the first delta
    error: str | None = None  # with FinishReason.ERROR
    prompt_logprobs: PromptLogprobs | None = (
        None  # on the first delta, if asked for: of every prompt token but the first
    )
    embedding: list[float] | None = None  # with the finish of a pooling request


class EngineState(Enum):
    STARTING = "starting"
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(slots=True)
class EngineHealth:
    state: EngineState
    step_counter: int = 0
    heartbeat_age: float = 0.0  # seconds since the engine last reported, or 0 while it is legitimately idle
    num_restarts: int = 0
    reason: str = ""  # why it is dead


class EngineClient(Protocol):
    async def start(self) -> EngineReady:
        """Returns when the engine can serve. Raises ConfigError if it cannot start as configured."""
        ...

    def generate(self, request: AddRequest) -> AsyncIterator[TokenDelta]:
        """Yields deltas; the last has a finish_reason. Raises EngineDeadError if the engine dies meanwhile. Closing
        the iterator early aborts the request."""
        ...

    async def abort(self, request_id: int) -> None:
        """Idempotent; unknown ids are ignored. The request's iterator then ends with FinishReason.ABORT."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    @property
    def health(self) -> EngineHealth: ...

    async def close(self) -> None: ...


StatsListener = Callable[[StepOutputs], None]
"""Called in the event loop once per step message, for metrics."""

__all__ = [
    "EngineClient",
    "EngineHealth",
    "EngineState",
    "StatsListener",
    "TokenDelta",
]
