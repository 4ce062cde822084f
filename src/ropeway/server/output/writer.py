"""The message as its readers write it.

Owns: MessageWriter: which call is open, ids, and what becomes of white space around calls. Must not know: what the text
looked like. Called by: calls and the families' readers.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from ropeway.server.output.cursor import SPACE, Cursor
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
        self.delta = MessageDelta()  # takes what is written; replaced by the owner
        self.num_calls = 0
        self.is_open = False  # a call is being written
        self._cursor = cursor
        self._make_id = make_id
        self._max_calls = max_calls
        self._space = ""  # the text's end, held back
        self._has_content = False

    def content(self, text: str) -> None:
        text = self._space + text
        solid = text.rstrip(SPACE)
        self._space = text[len(solid) :]
        if not solid:
            return
        if self.num_calls and not self._has_content:
            solid = solid.lstrip(SPACE)
        self._has_content = True
        self.delta.content += solid

    def start(self, name: str) -> None:
        """From here on, what was read cannot become content any more."""
        self.delta.tool_calls.append(ToolCallDelta(self.num_calls, self._make_id(), name))
        self.num_calls += 1
        self.is_open = True
        self._cursor.drop()

    def arguments(self, text: str) -> None:
        calls = self.delta.tool_calls
        if calls and not calls[-1].name:
            calls[-1].arguments += text
        elif text:
            calls.append(ToolCallDelta(self.num_calls - 1, arguments=text))
        self._cursor.drop()

    def end(self) -> None:
        """Raises Full."""
        self.is_open = False
        self._cursor.drop()
        if self.num_calls == self._max_calls:
            raise Full

    def close(self) -> None:
        if not self.num_calls:
            self.delta.content += self._space
        self._space = ""
