"""The wording of chat completions, streamed and whole.

Owns: ChatView. Must not know: how the request was checked, how sequences run. Called by: chat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropeway.server.call import ChunkView, Sequence
from ropeway.server.openai.logprobs import chat_entries
from ropeway.server.output.events import MessageDelta, ToolCallDelta
from ropeway.server.service import Service
from ropeway.server.sse import TextFrame, event
from ropeway.server.stream import TextDelta

if TYPE_CHECKING:
    from ropeway.server.openai.chat import ChatCall


class ChatView(ChunkView):
    def __init__(self, service: Service, chat: ChatCall) -> None:
        self._tokenizer = service.tokenizer
        self._role = service.config.server.response_role
        self._chat = chat
        self.call = call = chat.call
        self._logprobs = chat.logprobs
        # The token path: the text is the content and nothing else is in the event.
        self._fast = chat.is_plain and not (chat.logprobs or call.return_token_ids or call.continuous_usage)
        self._frames: dict[int, TextFrame] = {}  # by choice; there once its role was sent

    def chunk(self, sequence: Sequence, delta: TextDelta) -> bytes:
        frame = self._frames.get(sequence.index)
        opening = b""
        if frame is None:
            frame = self._frames[sequence.index] = TextFrame(
                lambda text: self._event(self._choice(sequence.index, {"content": text}))
            )
            opening = self._opening(sequence)
        if self._fast and delta.finish_reason is None:
            return opening + frame.render(delta.text) if delta.text else opening
        return opening + self._full_chunks(sequence, delta)

    def _opening(self, sequence: Sequence) -> bytes:
        value = self._event(self._choice(sequence.index, {"role": self._role, "content": ""}))
        if self.call.return_token_ids:
            value["prompt_token_ids"] = sequence.request.prompt_token_ids
        if self.call.prompt_report is not None:
            value["prompt_logprobs"] = self.call.prompt_report.entries(0)
        return event(value)

    def _full_chunks(self, sequence: Sequence, delta: TextDelta) -> bytes:
        """An event for each piece of the message; what belongs to the tokens goes with the first."""
        message = self._chat.parser(sequence.index).feed(delta)
        entries = chat_entries(self._tokenizer, delta) if self._logprobs else []
        parts = _stream_parts(message)
        ended = delta.finish_reason is not None
        if not parts:
            if not (entries or ended or (self.call.return_token_ids and delta.token_ids)):
                return b""
            parts = [{"content": ""} if entries else {}]
        choices = [self._choice(sequence.index, part) for part in parts]
        if entries:
            choices[0]["logprobs"] = {"content": entries, "refusal": None}
        if self.call.return_token_ids:
            choices[0]["token_ids"] = delta.token_ids
        if ended:
            choices[-1]["finish_reason"] = message.finish_reason
            choices[-1]["stop_reason"] = message.stop_reason
        return b"".join(event(self._event(choice)) for choice in choices)

    @staticmethod
    def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _event(self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        call = self.call
        value: dict[str, Any] = {
            "id": call.id,
            "object": "chat.completion.chunk",
            "created": call.created,
            "model": call.model,
            "choices": [] if choice is None else [choice],
        }
        if call.continuous_usage and choice is not None:
            value["usage"] = self._chat.usage()
        elif call.include_usage:
            value["usage"] = usage
        return value

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return event(self._event(None, self._chat.usage()))

    def response(self, results: list[tuple[Sequence, TextDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for sequence, whole in results:
            message = self._chat.parser(sequence.index).feed(whole)
            choice: dict[str, Any] = {
                "index": sequence.index,
                "message": {"role": self._role, **_whole_message(message)},
                "logprobs": None,
                "finish_reason": message.finish_reason,
                "stop_reason": message.stop_reason,
            }
            if self._logprobs:
                choice["logprobs"] = {"content": chat_entries(self._tokenizer, whole), "refusal": None}
            if self.call.return_token_ids:
                choice["token_ids"] = whole.token_ids
            choices.append(choice)
        value: dict[str, Any] = {
            "id": self.call.id,
            "object": "chat.completion",
            "created": self.call.created,
            "model": self.call.model,
            "choices": choices,
            "usage": self._chat.usage(),
        }
        if self.call.return_token_ids:
            value["prompt_token_ids"] = results[0][0].request.prompt_token_ids
        if self.call.prompt_report is not None:
            value["prompt_logprobs"] = self.call.prompt_report.entries(0)
        return value


def _stream_parts(message: MessageDelta) -> list[dict[str, Any]]:
    """The deltas to send. Each has one entry of tool_calls at most: clients add up entries by their place."""
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"reasoning_content": message.reasoning})
    if message.content:
        parts.append({"content": message.content})
    parts += [{"tool_calls": [_stream_call(call)]} for call in message.tool_calls]
    return parts


def _stream_call(call: ToolCallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_message(message: MessageDelta) -> dict[str, Any]:
    """content is null where there are only calls or only a thought, and the keys of what there is not are left out."""
    calls = message.merged_calls()
    only_others = not message.content and bool(calls or message.reasoning)
    value: dict[str, Any] = {"content": None if only_others else message.content, "refusal": None}
    if message.reasoning:
        value["reasoning_content"] = message.reasoning
    if calls:
        value["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return value
