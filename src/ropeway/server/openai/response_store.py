"""Responses that were kept for a next turn: bounded, expiring, each for its own caller.

Owns: the store. Must not know: how responses come about. Called by: responses.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from ropeway.errors import RequestError

MAX_BYTES = 64 * 2**20  # of JSON; the oldest go first
LIFE_SECONDS = 3600.0

Json = dict[str, Any]


@dataclass(slots=True)
class _Entry:
    response: Json
    items: list[Json]  # the whole conversation up to and with the response's output
    key_name: str
    added: float
    size: int


class ResponseStore:
    """In memory, of one replica: behind a balancer, a conversation must come back to the same one (or use store false
    and send its items)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_bytes: int = MAX_BYTES) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # oldest first
        self._clock = clock
        self._max_bytes = max_bytes
        self._size = 0

    def add(self, response: Json, items: list[Json], key_name: str) -> None:
        """Keep it unless it is larger than all there is room for."""
        size = len(orjson.dumps(items)) + len(orjson.dumps(response))
        self._drop(response["id"])
        if size <= self._max_bytes:
            self._entries[response["id"]] = _Entry(response, items, key_name, self._clock(), size)
            self._size += size
        while self._size > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def get(self, id: str, key_name: str) -> Json:
        """Raises RequestError(404)."""
        return self._find(id, key_name).response

    def items_of(self, id: str, key_name: str) -> list[Json]:
        """Raises RequestError(404)."""
        return self._find(id, key_name, "previous_response_id").items

    def delete(self, id: str, key_name: str) -> None:
        """Raises RequestError(404)."""
        self._find(id, key_name)
        self._drop(id)

    def _find(self, id: str, key_name: str, param: str | None = None) -> _Entry:
        self._expire()
        entry = self._entries.get(id)
        if entry is None or entry.key_name != key_name:
            raise RequestError(
                f"No response '{id[:200]}' is stored here (they are kept for an hour, as long as there is room).",
                status=404,
                param=param,
                code="response_not_found",
            )
        return entry

    def _expire(self) -> None:
        now = self._clock()
        while self._entries and now - next(iter(self._entries.values())).added > LIFE_SECONDS:
            self._drop(next(iter(self._entries)))

    def _drop(self, id: str) -> None:
        if (entry := self._entries.pop(id, None)) is not None:
            self._size -= entry.size
