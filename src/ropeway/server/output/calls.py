"""The one state machine for tool calls: text until a mark, then a call, then text again.

Owns: CallReader. Must not know: how a family writes calls (its reader does). Called by: message.

Text that may become a mark is held back, and so is a call until its name and the beginning of its arguments are known.
What turns out not to be a call is content, all of it, marks included. A call that breaks off after that point, because
the answer was cut off or its brackets do not match, stays a call with the arguments as far as they came; what follows
is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ropeway.server.output.cursor import Cursor, Malformed, Steps, num_undecided
from ropeway.server.output.events import MessageDelta
from ropeway.server.output.writer import Full, MessageWriter

Signatures = Mapping[str, Mapping[str, Any]]
"""The tools of a request: name to the JSON schema of the parameters."""
ReadCalls = Callable[[Cursor, MessageWriter, Signatures], Steps[None]]
"""Reads from a mark to the end of the calls that belong to it. Raises Malformed, having passed one letter at least."""


class CallReader:
    def __init__(
        self,
        marks: tuple[str, ...],
        read: ReadCalls,
        signatures: Signatures,
        *,
        make_id: Callable[[], str],
        max_calls: int | None = None,
    ) -> None:
        """max_calls: after so many, the rest of the text is dropped and ``is_full``."""
        self._marks = marks
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._cursor = Cursor()
        self._out = MessageWriter(self._cursor, make_id, max_calls)
        self._steps = self._run(read, signatures)
        self.is_full = False

    @property
    def num_calls(self) -> int:
        """That were begun."""
        return self._out.num_calls

    def feed(self, text: str, delta: MessageDelta, last: bool) -> None:
        """Write into ``delta`` what is certain now."""
        if self.is_full or not (text or last):
            return
        self._cursor.add(text, last)
        if next(self._steps, self) is self and not last:
            self.is_full = True
        self._out.give_out(delta)

    def _run(self, read: ReadCalls, signatures: Signatures) -> Steps[None]:
        cursor, out = self._cursor, self._out
        try:
            while (yield from self._text()):
                try:
                    yield from read(cursor, out, signatures)
                except Malformed:
                    if out.is_open:
                        out.end()
                    out.content(cursor.held)
                cursor.settle()
        except Full:
            return
        out.close()

    def _text(self) -> Steps[bool]:
        """Give out what is content before the next mark; false at the end."""
        cursor = self._cursor
        while (match := self._pattern.search(cursor.text, cursor.pos)) is None:
            held = 0 if cursor.ended else num_undecided(cursor.text[cursor.pos :], self._marks)
            cursor.pos = len(cursor.text) - held
            self._out.content(cursor.held)
            cursor.settle()
            if cursor.ended:
                return False
            yield
        cursor.pos = match.start()
        self._out.content(cursor.held)
        cursor.settle()
        return True
