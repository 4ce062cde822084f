"""A model's thoughts, apart from its answer.

Owns: ReasoningReader, and the marks of each kind of thought. Must not know: tool calls, HTTP. Called by: message.

A thought is at the beginning of the answer or nowhere: the same marks further on are text. White space at its edges is
left out. An answer that ends inside its thought is all thought.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.server.output.cursor import SPACE, Cursor, Malformed, Steps, TrailingSpace, num_undecided
from ropeway.server.output.events import MessageDelta


@dataclass(frozen=True, slots=True)
class Thought:
    start: str
    end: str


_THINK = Thought("<think>", "</think>")
THOUGHTS = {
    "deepseek_r1": _THINK,
    "glm45": _THINK,
    "qwen3": _THINK,
    "mistral": Thought("[THINK]", "[/THINK]"),
    "seed_oss": Thought("<seed:think>", "</seed:think>"),
}


def detect_thought(template: str) -> Thought | None:
    """Of the text of a chat template."""
    return next((thought for thought in THOUGHTS.values() if thought.end in template), None)


class ReasoningReader:
    def __init__(self, thought: Thought, *, is_open: bool) -> None:
        """is_open: the prompt has already begun the thought."""
        self._cursor = Cursor()
        self._delta = MessageDelta()
        self._rest = ""
        self._is_open = is_open
        self._steps = self._run(thought)
        self.has_ended = False  # nothing more is thought
        self.is_over = False  # and all further text is handed on as it is
        self.num_bytes = 0  # of the thought with its marks, as far as it has come

    def feed(self, text: str, delta: MessageDelta, last: bool) -> str:
        """Write the thought into ``delta``; returns what of the text comes after it."""
        if self.is_over:
            return text
        if not (text or last):
            return ""
        self._delta = delta
        self._cursor.add(text, last)
        if next(self._steps, self) is self:
            self.is_over = True
        rest, self._rest = self._rest, ""
        return rest

    def _run(self, thought: Thought) -> Steps[None]:
        cursor = self._cursor
        if not self._is_open:
            try:
                yield from cursor.skip_space()
                yield from cursor.expect(thought.start)
            except Malformed:
                self._rest = cursor.text[cursor.mark :]
                self.has_ended = True
                return
            self._settle()
        yield from self._skip_space()
        if (yield from self._inside(thought.end)):
            yield from self._skip_space()
            self._rest = cursor.text[cursor.mark :]

    def _inside(self, end: str) -> Steps[bool]:
        """Give out the thought; false if the text ends before it does."""
        cursor = self._cursor
        space = TrailingSpace()
        while (at := cursor.text.find(end, cursor.pos)) < 0:
            held = 0 if cursor.ended else num_undecided(cursor.text[cursor.pos :], (end,))
            cursor.pos = len(cursor.text) - held
            self._delta.reasoning += space.push(cursor.held)
            self._settle()
            if cursor.ended:
                return False
            yield
        cursor.pos = at
        self._delta.reasoning += space.push(cursor.held)
        cursor.pos = at + len(end)
        self._settle()
        self.has_ended = True
        return True

    def _skip_space(self) -> Steps[None]:
        cursor = self._cursor
        while (letter := (yield from cursor.peek())) and letter in SPACE:
            cursor.pos += 1
            self._settle()

    def _settle(self) -> None:
        if not self.has_ended:
            self.num_bytes += len(self._cursor.held.encode())
        self._cursor.settle()
