"""Reading text that comes in pieces, as if it were all there.

Owns: Cursor, the place in a text of which more may come. Must not know: what is read. Called by: reasoning, calls, and
the families' readers.

A reader is a generator that gives control back (``yield``) where it needs text that has not come. It is written like a
parser of a whole string, and because each letter is looked at in the same order whenever it comes, how a text was cut
cannot change what was read.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader with a result of type T."""

SPACE = " \t\r\n"
MAX_HELD = 2**16  # letters that are held back to see what they come to; no reader goes further without dropping some


class Malformed(Exception):  # noqa: N818  (an outcome, not an error of the program)
    """The text is not what the reader expected; the cursor is at the letter that says so, or at the text's end."""


class Cursor:
    def __init__(self) -> None:
        self.text = ""  # what is there from the mark on
        self.pos = 0  # of the next letter
        self.ended = False  # no more will come
        self.num_dropped = 0  # letters before the mark

    def add(self, text: str, last: bool) -> None:
        self.text += text
        self.ended = last

    def drop(self) -> None:
        """What was read is settled: the mark is here."""
        self.num_dropped += self.pos
        self.text = self.text[self.pos :]
        self.pos = 0

    def peek(self) -> Steps[str]:
        """The next letter; empty at the end. Raises Malformed if too much is held back."""
        if self.pos > MAX_HELD:
            raise Malformed
        while self.pos >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def skip_space(self) -> Steps[None]:
        while (letter := (yield from self.peek())) and letter in SPACE:
            self.pos += 1

    def expect(self, literal: str) -> Steps[None]:
        for letter in literal:
            if (yield from self.peek()) != letter:
                raise Malformed
            self.pos += 1

    def word(self, ends: str, limit: int) -> Steps[str]:
        """The text, not empty, before the next of the letters in ``ends``, which stays."""
        start = self.pos
        while (letter := (yield from self.peek())) not in ends:
            self.pos += 1
            if self.pos - start > limit:
                raise Malformed
        if not letter or self.pos == start:
            raise Malformed
        return self.text[start : self.pos]

    def until(self, literal: str) -> Steps[str]:
        """The text before ``literal``, which is taken, too."""
        start = self.pos
        while (at := self.text.find(literal, self.pos, MAX_HELD)) < 0:
            if self.ended or len(self.text) > MAX_HELD:
                self.pos = min(len(self.text), MAX_HELD + 1)
                raise Malformed
            self.pos = max(self.pos, len(self.text) - len(literal) + 1)
            yield
        self.pos = at + len(literal)
        return self.text[start:at]

    def closing(self, literal: str) -> Steps[None]:
        """White space and ``literal``, of which the end of the text may have cut off a part. Raises Malformed."""
        yield from self.skip_space()
        for letter in literal:
            found = yield from self.peek()
            if not found:
                break
            if found != letter:
                raise Malformed
            self.pos += 1
        self.drop()


def num_undecided(text: str, literals: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that begins one of the literals without being all of it."""
    for length in range(min(len(text), max(map(len, literals)) - 1), 0, -1):
        tail = text[-length:]
        if any(literal.startswith(tail) for literal in literals if len(literal) > length):
            return length
    return 0
