"""Who is next, and who gives way when blocks run out.

Owns: the waiting queue's order and the choice of a victim. Must not know: blocks, budgets, steps.
Called by: the scheduler. A new policy is a new class here and a name in POLICIES.
"""

from __future__ import annotations

import bisect
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

    def place(self, request: Request, running: Sequence[Request]) -> int:
        """Where in the list of running requests an admitted one stands: those behind it give way to it."""
        ...

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Which of these running requests, in the order of their places and at least one, gives way."""
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

    def place(self, request: Request, running: Sequence[Request]) -> int:
        return len(running)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return candidates[-1]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())


class PriorityWithAging:
    """The lowest priority number first, and of equals the oldest. Waiting for AGING_SECONDS is worth one level, so nothing
    waits for ever. As that holds for everybody alike, a request's place among the others never changes."""

    AGING_SECONDS = 30.0

    def __init__(self) -> None:
        self._queue: list[Request] = []  # in order

    def add(self, request: Request) -> None:
        bisect.insort(self._queue, request, key=self._rank)

    def requeue(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request | None:
        return self._queue[0] if self._queue else None

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._queue, self._rank(request), key=self._rank)
        assert self._queue[index] is request
        del self._queue[index]

    def place(self, request: Request, running: Sequence[Request]) -> int:
        return bisect.bisect(running, self._rank(request), key=self._rank)

    def victim(self, candidates: Sequence[Request]) -> Request:
        return candidates[-1]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    @classmethod
    def _rank(cls, request: Request) -> tuple[float, int]:
        return request.priority + request.arrival_time / cls.AGING_SECONDS, request.request_id


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {"fcfs": FirstComeFirstServed, "priority": PriorityWithAging}
