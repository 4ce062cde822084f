"""Who is next, and who gives way when blocks run out.

Owns: the waiting queue's order and the choice of a victim. Must not know: blocks, budgets, steps.
Called by: the scheduler. A new policy is a new class here and a name in POLICIES.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ropeway.engine.request import Request


class SchedulingPolicy(Protocol):
    def add(self, request: Request) -> None:
        """A new request."""
        ...

    def requeue(self, request: Request) -> None:
        """A preempted request, which comes back before newer ones."""
        ...

    def peek(self) -> Request | None:
        """Who is next, if anyone."""
        ...

    def remove(self, request: Request) -> None:
        """Admitted or aborted."""
        ...

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Which of these running requests, in order of admission and at least one, gives way."""
        ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class FirstComeFirstServed:
    """Arrival order; the latest admitted gives way, so the oldest running request always makes progress."""

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._queue[request.request_id] = request

    def requeue(self, request: Request) -> None:
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def peek(self) -> Request | None:
        return next(iter(self._queue.values()), None)

    def remove(self, request: Request) -> None:
        del self._queue[request.request_id]

    def victim(self, candidates: Sequence[Request]) -> Request:
        return candidates[-1]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {"fcfs": FirstComeFirstServed}
