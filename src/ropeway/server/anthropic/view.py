"""How /v1/messages words an answer: content blocks, a stream of typed events about them, and errors.

Owns: MessageView, anthropic_error. Must not know: how requests are read, how a model writes tool calls.
Called by: messages.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ropeway.errors import RequestError
from ropeway.server.call import RequestInfo, Sequence, View
from ropeway.server.openai.chat import ChatCall
from ropeway.server.openai.errors import error_body, json_response
from ropeway.server.service import Service
from ropeway.server.sse import named_event
from ropeway.server.stream import TextDelta

Json = dict[str, Any]

ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 408: "timeout_error",
}  # fmt: skip
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessageView(View):
    """The stream's events and the whole answer come from one state machine: at any time at most one block is open."""

    def __init__(self, chat: ChatCall, stop_sequences: list[str]) -> None:
        self._chat = chat
        self._parser = chat.parser(0)
        self._stop_sequences = stop_sequences
        self._blocks: list[Json] = []
        self._is_open = False  # the last of _blocks
        self._call_index = -1  # of the tool call that is open or was last
        self._arguments = ""  # of the tool call that is open, as JSON text
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._began = False
        self._frames: list[bytes] = []

    # The View protocol

    def chunk(self, sequence: Sequence, delta: TextDelta) -> bytes:
        if not self._began:
            self._began = True
            self._say("message_start", message=self._message({**_usage(self._chat.call.usage()), "output_tokens": 0}))
        self._advance(delta)
        return self._take()

    def closing(self, usage: Json) -> bytes:
        self._close()
        ending = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        self._say("message_delta", delta=ending, usage=_usage(usage))
        self._say("message_stop")
        return self._take()

    def failure(self, error: RequestError) -> bytes:
        return named_event("error", _error_body(error))

    def response(self, results: list[tuple[Sequence, TextDelta]], usage: Json) -> Json:
        for _, whole in results:
            self._advance(whole)
        self._close()
        self._frames.clear()
        return self._message(_usage(usage))

    # Blocks

    def _advance(self, delta: TextDelta) -> None:
        message = self._parser.feed(delta)
        if message.reasoning:
            self._grow("thinking", message.reasoning)
        if message.content:
            self._grow("text", message.content)
        for call in message.tool_calls:
            if call.index != self._call_index:
                self._call_index = call.index
                self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                self._arguments += call.arguments
                self._say_delta({"type": "input_json_delta", "partial_json": call.arguments})
        if message.finish_reason is not None:
            self._stop_reason = STOP_REASONS.get(message.finish_reason, "end_turn")
            if message.finish_reason == "stop" and delta.stop_reason in self._stop_sequences:
                self._stop_reason, self._stop_sequence = "stop_sequence", str(delta.stop_reason)

    def _grow(self, kind: str, text: str) -> None:
        if not self._is_open or self._blocks[-1]["type"] != kind:
            self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][kind] += text
        self._say_delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Json) -> None:
        self._close()
        self._blocks.append(block)
        self._is_open = True
        self._arguments = ""
        self._say("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _parsed(self._arguments)
        elif block["type"] == "thinking":
            self._say_delta({"type": "signature_delta", "signature": ""})
        self._say("content_block_stop", index=len(self._blocks) - 1)

    # Words

    def _message(self, usage: Json) -> Json:
        return {
            "id": self._chat.call.id,
            "type": "message",
            "role": "assistant",
            "model": self._chat.call.model,
            "content": self._blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": usage,
        }

    def _say(self, type: str, **fields: Any) -> None:
        self._frames.append(named_event(type, {"type": type, **fields}))

    def _say_delta(self, delta: Json) -> None:
        self._say("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _take(self) -> bytes:
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames


def _parsed(arguments: str) -> Json:
    """Of a call that the length limit cut, what there is cannot be an object; an empty one stands for it."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: Json) -> Json:
    """input_tokens leaves out those that came from the cache, as in Anthropic's own answers."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def anthropic_error(service: Service, request: Request, error: RequestError) -> Response:
    service.metrics.refused(error.status, error.code or error.type)
    body = {**_error_body(error), "request_id": RequestInfo.of(request).request_id}
    return json_response(body, status=error.status, headers=error.headers)


def _error_body(error: RequestError) -> Json:
    """Anthropic's shape around the fields of every error of this server."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {**error_body(error)["error"], "type": kind}}
