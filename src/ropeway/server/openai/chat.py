"""POST /v1/chat/completions.

Owns: messages to prompt, and the chat wording of answers. Must not know: how sequences run. Called by: app, tokenize.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ropeway.errors import RequestError
from ropeway.server.openai.logprobs import chat_entries
from ropeway.server.openai.schema import ChatMessage, ChatRequest, TemplateFields
from ropeway.server.service import Call, ChunkView, Sequence, Service
from ropeway.server.sse import TextFrame, event
from ropeway.server.stream import TextDelta


async def create_chat_completion(service: Service, request: Request) -> Response:
    body = await service.read(request, ChatRequest)
    service.admission.check(body.n)
    _check(body)
    kwargs = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    prompt = await encode_chat(service, body.messages, body, kwargs)
    call = service.make_call(
        request,
        body,
        [prompt],
        prefix="chatcmpl-",
        param="messages",
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return await service.respond(request, call, ChatView(service, call, body.logprobs))


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) == 0:
            raise RequestError(f"Invalid value for '{name}': must be at least 1.", param=name, code="invalid_value")
    # Tools can be shown to the model; reading calls out of its answer comes later.
    if body.tool_choice not in (None, "none", "auto", {}):
        raise _not_yet("tool_choice")
    if body.tools and body.tool_choice != "none":
        raise _not_yet("tools")


def _not_yet(param: str) -> RequestError:
    return RequestError(f"'{param}' is not supported yet.", param=param, code="unsupported_parameter")


async def encode_chat(
    service: Service, messages: Seq[ChatMessage], body: TemplateFields, kwargs: dict[str, Any] | None = None
) -> list[int]:
    """The ids of the rendered messages. Raises RequestError(400), also with the template's own words."""
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            param="continue_final_message",
            code="invalid_value",
        )
    text = await service.tokenizer.render_chat_async(
        template_messages(messages),
        tools=body.tools or None,
        add_generation_prompt=(
            not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
        ),
        continue_final_message=body.continue_final_message,
        kwargs={**(kwargs or {}), **(body.chat_template_kwargs or {})},
    )
    return await service.tokenizer.encode_async(text, bool(body.add_special_tokens))


def template_messages(messages: Seq[ChatMessage]) -> list[dict[str, Any]]:
    """What the chat template gets: content always text, the parts of a list joined by newlines as vLLM does.

    `developer` becomes `system`, its older name, which templates know. Roles are otherwise the template's business.
    Raises RequestError(400) that names the message.
    """
    if not messages:
        raise RequestError("'messages' must not be empty.", param="messages", code="invalid_value")
    result = []
    for index, message in enumerate(messages):
        value = {key: value for key, value in (message.model_extra or {}).items() if value is not None}
        value["role"] = "system" if message.role == "developer" else message.role
        if message.tool_calls:
            value["tool_calls"] = message.tool_calls
        if message.content is None and message.role not in ("assistant", "tool"):
            raise RequestError(
                f"Missing required parameter: 'messages[{index}].content'.",
                param=f"messages[{index}].content",
                code="missing_required_parameter",
            )
        content = message.content or ""
        value["content"] = content if isinstance(content, str) else "\n".join(_text_of(p, index) for p in content)
        result.append(value)
    return result


def _text_of(part: dict[str, Any], index: int) -> str:
    kind = part.get("type")
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        known = kind in ("text", "refusal")
        reason = f"a part of type '{kind}' needs '{kind}'" if known else "this model takes parts of type 'text' only"
        param = f"messages[{index}].content"
        raise RequestError(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")
    return text


class ChatView(ChunkView):
    def __init__(self, service: Service, call: Call, logprobs: bool) -> None:
        self._tokenizer = service.tokenizer
        self._role = service.config.server.response_role
        self.call = call
        self._logprobs = logprobs
        self._fast = not (logprobs or call.return_token_ids or call.continuous_usage)
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
        return opening + self._full_chunk(sequence, delta)

    def _opening(self, sequence: Sequence) -> bytes:
        value = self._event(self._choice(sequence.index, {"role": self._role, "content": ""}))
        if self.call.return_token_ids:
            value["prompt_token_ids"] = sequence.request.prompt_token_ids
        return event(value)

    def _full_chunk(self, sequence: Sequence, delta: TextDelta) -> bytes:
        ended = delta.finish_reason is not None
        entries = chat_entries(self._tokenizer, delta) if self._logprobs else []
        if not (delta.text or entries or ended or (self.call.return_token_ids and delta.token_ids)):
            return b""
        choice = self._choice(sequence.index, {"content": delta.text} if delta.text or entries else {})
        choice["finish_reason"] = delta.finish_reason
        if entries:
            choice["logprobs"] = {"content": entries, "refusal": None}
        if ended:
            choice["stop_reason"] = delta.stop_reason
        if self.call.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return event(self._event(choice))

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
            value["usage"] = call.usage()
        elif call.include_usage:
            value["usage"] = usage
        return value

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return event(self._event(None, usage))

    def response(self, results: list[tuple[Sequence, TextDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for sequence, whole in results:
            choice: dict[str, Any] = {
                "index": sequence.index,
                "message": {"role": self._role, "content": whole.text, "refusal": None},
                "logprobs": None,
                "finish_reason": whole.finish_reason,
                "stop_reason": whole.stop_reason,
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
            "usage": usage,
        }
        if self.call.return_token_ids:
            value["prompt_token_ids"] = results[0][0].request.prompt_token_ids
        return value
