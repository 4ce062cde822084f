"""Reading text that comes in pieces, as if it were all there.

Owns: Cursor, the place in a text of which more may come. Must not know: what is read. Called by: reasoning, calls, and
the families' readers.

A reader is a generator that gives control back (``yield``) where it needs text that has not come. It is written like a
parser of a whole string, and because each letter is looked at in the same order whenever it comes, how a text was cut
cannot change what was read.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader with a result of type T."""

SPACE = " \t\r\n"
MAX_HELD = 2**16  # letters that are held back to see what they come to; no reader goes further without settling some
_CUT_AFTER = 4096


class Malformed(Exception):  # noqa: N818  (an outcome, not an error of the program)
    """The text is not what the reader expected; the cursor is at the letter that says so, or at the text's end."""


class Cursor:
    def __init__(self) -> None:
        self.text = ""
        self.pos = 0  # of the next letter
        self.mark = 0  # what is before it is settled
        self.ended = False  # no more will come
        self._num_cut = 0  # letters that were before the text

    def add(self, text: str, last: bool) -> None:
        self.text += text
        self.ended = last

    @property
    def held(self) -> str:
        """What was read and is not settled."""
        return self.text[self.mark : self.pos]

    @property
    def limit(self) -> int:
        """As far as a reader may go without settling something."""
        return self.mark + MAX_HELD + 1

    @property
    def num_read(self) -> int:
        """Letters since the beginning."""
        return self._num_cut + self.pos

    def settle(self) -> None:
        """Move the mark here. Places in the text that a reader remembers are no longer good."""
        if self.pos > _CUT_AFTER:  # not each time: that would copy the rest of a long text again and again
            self.text = self.text[self.pos :]
            self._num_cut += self.pos
            self.pos = 0
        self.mark = self.pos

    def peek(self) -> Steps[str]:
        """The next letter; empty at the end. Raises Malformed if too much is held back."""
        if self.pos >= self.limit:
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
        while (at := self.text.find(literal, self.pos, self.limit)) < 0:
            if self.ended or len(self.text) >= self.limit:
                self.pos = min(len(self.text), self.limit)
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
        self.settle()


class TrailingSpace:
    """Holds back the white space at the end of a text until more of the text comes."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        """The text up to its last other letter, with the space that was held before."""
        solid = text.rstrip(SPACE)
        out = "".join([*self._pieces, solid]) if solid else ""
        if solid:
            self._pieces.clear()
        if len(solid) < len(text):
            self._pieces.append(text[len(solid) :])
        return out

    def take(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text


@lru_cache(maxsize=64)
def _beginnings(literals: tuple[str, ...]) -> frozenset[str]:
    return frozenset(literal[:length] for literal in literals for length in range(1, len(literal)))


def num_undecided(text: str, literals: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that begins one of the literals without being all of it."""
    beginnings = _beginnings(literals)
    for length in range(min(len(text), max(map(len, literals)) - 1), 0, -1):
        if text[-length:] in beginnings:
            return length
    return 0
