"""Whether a request may begin: bounds on the work in flight, and the state of the server.

Owns: the bounds, the permits, the measured rate of completion. Must not know: HTTP bodies, text. Called by: service, once
cheaply before tokenising and once with the token count after it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from ropeway.config import ServerConfig
from ropeway.engine.client import EngineHealth, EngineState
from ropeway.errors import RequestError
from ropeway.server.health import Lifecycle, Phase

UNKNOWN_WAIT = 5  # Retry-After while too few requests have finished to measure a rate
LONGEST_WAIT = 60


class Permit:
    """Room for one client request; give it back exactly when its last sequence has ended."""

    __slots__ = ("_admission", "num_prompt_tokens", "num_sequences")

    def __init__(self, admission: Admission, num_sequences: int, num_prompt_tokens: int) -> None:
        self._admission: Admission | None = admission
        self.num_sequences = num_sequences
        self.num_prompt_tokens = num_prompt_tokens

    def release(self) -> None:
        """Idempotent."""
        if self._admission is not None:
            self._admission._release(self)
            self._admission = None


class Admission:
    """Bounds sequences (n choices of m prompts are n * m) and prompt tokens in flight, queued and running together."""

    def __init__(
        self,
        config: ServerConfig,
        lifecycle: Lifecycle,
        health: Callable[[], EngineHealth],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sequences = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens or math.inf
        self._lifecycle = lifecycle
        self._health = health
        self._clock = clock
        self._finish_times: deque[float] = deque(maxlen=256)  # one per sequence finished since _busy_since
        self._busy_since = 0.0
        self.num_sequences = 0
        self.num_prompt_tokens = 0

    def check(self, num_sequences: int = 1, param: str = "n") -> None:
        """Refuse what cannot be served now anyway, before any work is spent on it. param: names what asks for so many
        sequences. Raises RequestError (429, 503)."""
        if not self._lifecycle.accepting:
            starting = self._lifecycle.phase is Phase.STARTING
            raise _unavailable(
                "The server is starting." if starting else "The server is shutting down.",
                "starting" if starting else "draining",
            )
        health = self._health()
        if health.state is not EngineState.ALIVE:
            restarting = health.state is EngineState.STARTING
            raise _unavailable(
                "The engine is restarting." if restarting else "The engine is not running.",
                "engine_starting" if restarting else "engine_dead",
            )
        if num_sequences > self._max_sequences:
            raise RequestError(
                f"This request asks for {num_sequences} sequences (prompts times n); the server takes "
                f"{self._max_sequences}.",
                param=param,
                code="too_many_sequences",
            )
        if self.num_sequences + num_sequences > self._max_sequences:
            raise self._overloaded(f"{self.num_sequences} requests are in flight already.", "queue_full")

    def admit(self, num_sequences: int, num_prompt_tokens: int) -> Permit:
        """Raises RequestError like ``check``. num_prompt_tokens: each prompt once, because choices share its blocks."""
        self.check(num_sequences)
        if num_prompt_tokens > self._max_tokens:
            raise RequestError(
                f"This request has {num_prompt_tokens} prompt tokens; the server takes {self._max_tokens} at a time.",
                code="too_many_prompt_tokens",
            )
        if self.num_prompt_tokens + num_prompt_tokens > self._max_tokens:
            raise self._overloaded(f"{self.num_prompt_tokens} prompt tokens are in flight already.", "token_queue_full")
        if self.num_sequences == 0:  # idle time says nothing about the rate
            self._busy_since = self._clock()
            self._finish_times.clear()
        self.num_sequences += num_sequences
        self.num_prompt_tokens += num_prompt_tokens
        self._lifecycle.enter()
        return Permit(self, num_sequences, num_prompt_tokens)

    def _release(self, permit: Permit) -> None:
        self.num_sequences -= permit.num_sequences
        self.num_prompt_tokens -= permit.num_prompt_tokens
        self._finish_times.extend([self._clock()] * min(permit.num_sequences, 256))
        self._lifecycle.leave()

    def retry_after(self) -> int:
        """Whole seconds until about a tenth of the work in flight has finished, at the rate last measured.

        Not until the first gap: all refused clients would come back for the same one.
        """
        times = self._finish_times
        began = times[0] if len(times) == times.maxlen else self._busy_since
        elapsed = self._clock() - began
        if not times or elapsed <= 0:
            return UNKNOWN_WAIT
        rate = len(times) / elapsed  # sequences per second
        return min(LONGEST_WAIT, max(1, math.ceil(0.1 * self.num_sequences / rate)))

    def _overloaded(self, message: str, code: str) -> RequestError:
        return RequestError(
            f"The server is at its limit: {message} Try again later.",
            status=429,
            type="rate_limit_error",
            code=code,
            headers={"Retry-After": str(self.retry_after())},
        )


def _unavailable(message: str, code: str) -> RequestError:
    """503 means only: this replica cannot serve, take another."""
    return RequestError(
        message,
        status=503,
        type="service_unavailable_error",
        code=code,
        headers={"Retry-After": str(UNKNOWN_WAIT), "Connection": "close"},
    )
