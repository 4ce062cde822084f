"""One sequence's text deltas to message deltas.

Owns: MessageParser. Must not know: HTTP, the engine. Called by: the views of the endpoints, through ChatCall.

The same code reads streams and whole answers: a whole answer is one large delta, and however a text is cut into deltas,
the pieces add up to the same message.
"""

from __future__ import annotations

from collections.abc import Callable

from ropeway.server.output.calls import CallReader
from ropeway.server.output.events import MessageDelta
from ropeway.server.output.reasoning import ReasoningReader
from ropeway.server.stream import TextDelta


class MessageParser:
    """Feed it each TextDelta of one sequence in order, the last one has a finish_reason."""

    def __init__(
        self,
        thought: ReasoningReader | None = None,
        calls: CallReader | None = None,
        num_token_bytes: Callable[[int], int] = lambda token_id: 0,
    ) -> None:
        """Without readers, all text is content. num_token_bytes: of UTF-8 that a token adds to the text."""
        self._thought = thought
        self._calls = calls
        self._num_token_bytes = num_token_bytes
        self._token_ids: list[int] = []  # while they may belong to the thought
        self.num_reasoning_tokens = 0  # as of now; the marks count

    @property
    def is_full(self) -> bool:
        """The message has all the calls it may have: no further text can change it."""
        return self._calls is not None and self._calls.is_full

    def feed(self, delta: TextDelta) -> MessageDelta:
        """What is certain now."""
        last = delta.finish_reason is not None
        message = MessageDelta(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        text = delta.text if self._thought is None else self._think(self._thought, delta, message, last)
        if self._calls is None:
            message.content += text
            return message
        self._calls.feed(text, message, last)
        if self._calls.num_calls and delta.finish_reason in ("stop", "length"):
            message.finish_reason = "tool_calls"
        return message

    def _think(self, thought: ReasoningReader, delta: TextDelta, message: MessageDelta, last: bool) -> str:
        if thought.is_over:
            return delta.text
        rest = thought.feed(delta.text, message, last)
        self._token_ids += delta.token_ids
        if thought.has_ended:
            self.num_reasoning_tokens = self._num_tokens(thought.num_bytes)
        elif thought.num_bytes:
            self.num_reasoning_tokens = len(self._token_ids)
        return rest

    def _num_tokens(self, num_bytes: int) -> int:
        """That the first so many bytes of the text are made of."""
        count = 0
        for token_id in self._token_ids:
            if num_bytes <= 0:
                break
            num_bytes -= self._num_token_bytes(token_id)
            count += 1
        return count
