"""How /v1/responses words an answer: a list of items, and a stream of typed events about them.

Owns: ResponseView. Must not know: how requests are read, how a model writes tool calls. Called by: responses.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from ropeway.errors import RequestError
from ropeway.server.call import Sequence, View
from ropeway.server.openai.chat import ChatCall
from ropeway.server.openai.logprobs import chat_entries
from ropeway.server.sse import named_event
from ropeway.server.stream import TextDelta
from ropeway.server.tokenizer import Tokenizer

Json = dict[str, Any]


class ResponseView(View):
    """The stream's events and the whole answer come from one state machine: at any time at most one item is open."""

    def __init__(self, chat: ChatCall, tokenizer: Tokenizer, *, settings: Json, include_logprobs: bool) -> None:
        """settings: fields of the request that the response repeats."""
        self.on_end: Callable[[Json], None] | None = None  # called with the finished response, in either mode
        self._chat = chat
        self._tokenizer = tokenizer
        self._parser = chat.parser(0)
        self._settings = settings
        self._include_logprobs = include_logprobs
        self._output: list[Json] = []
        self._open: Json | None = None  # the last of _output, while it grows
        self._call_index = -1  # of the tool call that is open or was last
        self._finish_reason: str | None = None
        self._frames: list[bytes] = []
        self._num_events = 0

    # The View protocol

    def chunk(self, sequence: Sequence, delta: TextDelta) -> bytes:
        if not self._num_events:
            self._say("response.created", response=self._response(None))
            self._say("response.in_progress", response=self._response(None))
        self._advance(delta)
        return self._take()

    def closing(self, usage: Json) -> bytes:
        response = self._end()
        self._say(
            "response.completed" if response["status"] == "completed" else "response.incomplete", response=response
        )
        return self._take()

    def failure(self, error: RequestError) -> bytes:
        self._open = None
        response = self._response(None) | {
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
        }
        self._say("response.failed", response=response)
        return self._take()

    def response(self, results: list[tuple[Sequence, TextDelta]], usage: Json) -> Json:
        for _, whole in results:
            self._advance(whole)
        self._frames.clear()
        return self._end()

    # Items

    def _advance(self, delta: TextDelta) -> None:
        message = self._parser.feed(delta)
        self._finish_reason = message.finish_reason or self._finish_reason
        if message.reasoning:
            self._grow_text("reasoning", message.reasoning, [])
        entries = chat_entries(self._tokenizer, delta) if self._include_logprobs else []
        if message.content or (entries and self._kind() == "message"):
            self._grow_text("message", message.content, entries)
        for call in message.tool_calls:
            if call.index != self._call_index:
                self._call_index = call.index
                item = {"id": _new_id("fc_"), "type": "function_call", "status": "in_progress"}
                self._begin({**item, "call_id": call.id, "name": call.name, "arguments": ""})
            if call.arguments:
                assert self._open is not None
                self._open["arguments"] += call.arguments
                self._say_of_item("response.function_call_arguments.delta", delta=call.arguments)

    def _kind(self) -> str:
        return "" if self._open is None else self._open["type"]

    def _grow_text(self, kind: str, text: str, logprobs: list[Json]) -> None:
        is_message = kind == "message"
        if self._kind() != kind:
            if is_message:
                part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                self._begin({"id": _new_id("msg_"), "type": kind, "status": "in_progress", "role": "assistant"}, part)
            else:
                part = {"type": "reasoning_text", "text": ""}
                self._begin({"id": _new_id("rs_"), "type": kind, "status": "in_progress", "summary": []}, part)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if is_message:
            part["logprobs"] += logprobs
            self._say_of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        else:
            self._say_of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _begin(self, item: Json, part: Json | None = None) -> None:
        self._close("completed")
        self._open = item
        self._output.append(item)
        if part is not None:
            item["content"] = []
        self._say("response.output_item.added", output_index=len(self._output) - 1, item=item)
        if part is not None:
            item["content"].append(part)
            self._say_of_item("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> None:
        if (item := self._open) is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            self._say_of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if item["type"] == "message":
                said = {"text": part["text"], "logprobs": part["logprobs"]}
                self._say_of_item("response.output_text.done", content_index=0, **said)
            else:
                self._say_of_item("response.reasoning_text.done", content_index=0, text=part["text"])
            self._say_of_item("response.content_part.done", content_index=0, part=part)
        self._say("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self._open = None

    def _end(self) -> Json:
        complete = self._finish_reason in ("stop", "tool_calls")
        self._close("completed" if complete else "incomplete")
        response = self._response(self._chat.usage())
        if self.on_end is not None:
            self.on_end(response)
        return response

    # Words

    def _response(self, usage: Json | None) -> Json:
        status, details = "in_progress", None
        if usage is not None:
            status = {"length": "incomplete", "abort": "cancelled"}.get(self._finish_reason or "", "completed")
            details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._chat.call.id,
            "object": "response",
            "created_at": self._chat.call.created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "model": self._chat.call.model,
            "output": list(self._output),
            "usage": None if usage is None else _usage(usage),
            **self._settings,
        }

    def _say(self, type: str, **fields: Any) -> None:
        self._frames.append(named_event(type, {"type": type, "sequence_number": self._num_events, **fields}))
        self._num_events += 1

    def _say_of_item(self, type: str, **fields: Any) -> None:
        assert self._open is not None
        self._say(type, item_id=self._open["id"], output_index=len(self._output) - 1, **fields)

    def _take(self) -> bytes:
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
        "total_tokens": usage["total_tokens"],
    }


def _new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex
