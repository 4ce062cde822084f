"""Chat messages to a prompt.

Owns: what a chat template is given: roles, contents, tools, flags. Must not know: how an answer is generated or worded.
Called by: chat, tokenize.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropeway.errors import RequestError
from ropeway.server.openai.schema import ChatMessage, TemplateFields
from ropeway.server.service import Service


async def encode_chat(
    service: Service, messages: Sequence[ChatMessage], body: TemplateFields, kwargs: dict[str, Any] | None = None
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


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
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
