"""The message as its readers write it.

Owns: MessageWriter: which call is open, ids, and what becomes of white space around calls. Must not know: what the text
looked like. Called by: calls and the families' readers.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from ropeway.server.output.cursor import SPACE, Cursor, TrailingSpace
from ropeway.server.output.events import MessageDelta, ToolCallDelta

_ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Mistral's templates refuse any other kind."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class Full(Exception):  # noqa: N818  (an outcome)
    """The message has all the calls it may have."""


class MessageWriter:
    """White space between a call and an end of the message is left out; between two texts it stays."""

    def __init__(self, cursor: Cursor, make_id: Callable[[], str], max_calls: int | None) -> None:
        # What was written since the last give_out(), in pieces: a whole answer may have very many.
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []  # of the last call, not in _calls yet
        self.num_calls = 0
        self.is_open = False  # a call is being written
        self._cursor = cursor
        self._make_id = make_id
        self._max_calls = max_calls
        self._space = TrailingSpace()
        self._has_content = False

    def content(self, text: str) -> None:
        text = self._space.push(text)
        if not text:
            return
        if self.num_calls and not self._has_content:
            text = text.lstrip(SPACE)
        self._has_content = True
        self._content.append(text)

    def start(self, name: str) -> None:
        """From here on, what was read cannot become content any more."""
        self._take_arguments()
        self._calls.append(ToolCallDelta(self.num_calls, self._make_id(), name))
        self.num_calls += 1
        self.is_open = True
        self._cursor.settle()

    def arguments(self, text: str) -> None:
        self._arguments.append(text)
        self._cursor.settle()

    def end(self) -> None:
        """Raises Full."""
        self.is_open = False
        self._cursor.settle()
        if self.num_calls == self._max_calls:
            raise Full

    def close(self) -> None:
        space = self._space.take()
        if not self.num_calls:
            self._content.append(space)

    def give_out(self, delta: MessageDelta) -> None:
        self._take_arguments()
        delta.content += "".join(self._content)
        delta.tool_calls += self._calls
        self._content.clear()
        self._calls.clear()

    def _take_arguments(self) -> None:
        if text := "".join(self._arguments):
            self._calls.append(ToolCallDelta(self.num_calls - 1, arguments=text))
        self._arguments.clear()
