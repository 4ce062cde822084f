"""Whether this replica lives, should get new requests, and may be stopped.

Owns: Lifecycle (starting, ready, draining, stopped; requests in flight) and the answers of the probes. Must not know:
HTTP, tokens. Called by: app (probes, drain), admission (in flight), cli (SIGTERM, waiting for the last request).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum

from ropeway.engine.client import EngineHealth, EngineState

# A step may take many seconds on a slow machine, and a restart of the process loses every stream: be patient.
STALE_AFTER = 120.0  # seconds without a sign of life from an engine that has work
DEAD_AFTER = 60.0  # seconds without a successful restart by the engine's supervisor, which tries every few seconds


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """The drain state machine. Not thread-safe: it lives in the event loop, where signal handlers run too."""

    def __init__(self, drain_notice: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """drain_notice: seconds after begin_drain() in which new requests are still accepted, though not ready."""
        self.phase = Phase.STARTING
        self.in_flight = 0
        self._drain_notice = drain_notice
        self._clock = clock
        self._drain_began = 0.0
        self._dead_since: float | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_draining(self) -> bool:
        return self.phase in (Phase.DRAINING, Phase.STOPPED)

    @property
    def accepting(self) -> bool:
        """Whether a new request may begin now."""
        if self.phase is Phase.DRAINING:
            return self._clock() - self._drain_began < self._drain_notice
        return self.phase is Phase.READY

    def mark_ready(self) -> None:
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    def begin_drain(self) -> None:
        """Idempotent: a second call does not extend the notice."""
        if not self.is_draining:
            self.phase = Phase.DRAINING
            self._drain_began = self._clock()

    def undrain(self) -> None:
        if self.phase is Phase.DRAINING:
            self.phase = Phase.READY

    def stop(self) -> None:
        """For good: nothing is accepted any more, not even within the notice."""
        self.phase = Phase.STOPPED

    def enter(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def wait_idle(self, timeout: float | None = None) -> bool:
        """True when no request is in flight, False when ``timeout`` seconds went by first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def live_problem(self, health: EngineHealth) -> str | None:
        """Why the process should be restarted, or None. A starting, idle or just restarting engine is fine."""
        if health.state is EngineState.ALIVE:
            self._dead_since = None
        elif health.state is EngineState.DEAD:
            if self._dead_since is None:
                self._dead_since = self._clock()
            if self._clock() - self._dead_since >= DEAD_AFTER:
                return f"the engine is dead: {health.reason}"
        if health.heartbeat_age > STALE_AFTER:
            return f"the engine has not reported for {health.heartbeat_age:.0f} s"
        return None

    def ready_problem(self, health: EngineHealth) -> str | None:
        """Why no new requests should be sent here, or None."""
        if self.phase is not Phase.READY:
            return str(self.phase.value)
        if health.state is EngineState.STARTING:
            return "the engine is starting"
        if health.state is EngineState.DEAD:
            return f"the engine is dead: {health.reason}"
        return self.live_problem(health)
