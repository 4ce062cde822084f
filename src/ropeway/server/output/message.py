"""One sequence's text deltas to message deltas.

Owns: MessageParser. Must not know: HTTP, the engine. Called by: the views of the endpoints, through ChatCall.

The same code reads streams and whole answers: a whole answer is one large delta, and however a text is cut into deltas,
the pieces add up to the same message.
"""

from __future__ import annotations

from ropeway.server.output.events import MessageDelta
from ropeway.server.stream import TextDelta


class MessageParser:
    """Feed it each TextDelta of one sequence in order, the last one has a finish_reason."""

    num_reasoning_tokens = 0  # as of now

    def feed(self, delta: TextDelta) -> MessageDelta:
        """What is certain now."""
        return MessageDelta(delta.text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
