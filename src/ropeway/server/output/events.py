"""What a piece of a model's answer comes to, once it was read.

Owns: MessageDelta and ToolCallDelta. Must not know: how models write calls or thoughts, how an API words them.
Called by: everything in output, and the views of the endpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of one call. The first of a call has id and name and no arguments; the later ones have arguments alone."""

    index: int  # of the call in its message, from 0
    id: str = ""
    name: str = ""
    arguments: str = ""  # the next piece of JSON text


@dataclass(slots=True)
class MessageDelta:
    """A piece of one message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)  # in the order of the text
    finish_reason: str | None = None  # with the last piece: "tool_calls" if there was a call, else as the text ended
    stop_reason: int | str | None = None  # the client's stop token or stop string that ended the text

    def merged_calls(self) -> list[ToolCallDelta]:
        """One entry per call, of all its pieces here. Of a whole message: the calls."""
        calls: dict[int, ToolCallDelta] = {}
        for piece in self.tool_calls:
            call = calls.setdefault(piece.index, ToolCallDelta(piece.index))
            call.id += piece.id
            call.name += piece.name
            call.arguments += piece.arguments
        return list(calls.values())
