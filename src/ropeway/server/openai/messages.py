"""Chat messages to a prompt.

Owns: what a chat template is given: roles, contents, tools, flags. Must not know: how an answer is generated or worded.
Called by: chat, tokenize.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ropeway.errors import RequestError
from ropeway.server.openai.schema import ChatMessage, FunctionTool, TemplateFields
from ropeway.server.service import Service

# For chat templates that know no tools.
INSTRUCTIONS = """\
You can call these functions:

{functions}

To call one, answer with a JSON object like this and nothing else: {{"name": "function name", "arguments": {{...}}}}
To call several, write one such object after the other. If no function is needed, answer as usual."""


async def render_chat(
    service: Service,
    messages: Sequence[ChatMessage],
    body: TemplateFields,
    tools: Sequence[FunctionTool] | None,
    kwargs: dict[str, Any] | None = None,
) -> str:
    """The prompt's text. tools: to be shown to the model. kwargs: for the template; chat_template_kwargs go before them.

    A template that knows no tools gets INSTRUCTIONS in front of the system text, and earlier calls as JSON in the text
    of their turns. Raises RequestError(400), also with the template's own words.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            param="continue_final_message",
            code="invalid_value",
        )
    values = template_messages(messages)
    if not service.output.shows_calls:
        values = [_with_calls_told(value) for value in values]
    shown = [tool.model_dump(exclude_unset=True) for tool in tools or ()]
    if shown and not service.output.shows_tools:
        values, shown = _with_tools_told(values, shown), []
    return await service.tokenizer.render_chat_async(
        values,
        tools=shown or None,
        add_generation_prompt=(
            not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
        ),
        continue_final_message=body.continue_final_message,
        kwargs={**(kwargs or {}), **(body.chat_template_kwargs or {})},
    )


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


def _with_tools_told(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = INSTRUCTIONS.format(functions=functions)
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{text}\n\n{messages[0]['content']}".rstrip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_calls_told(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.pop("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict):
            name, arguments = json.dumps(function.get("name"), ensure_ascii=False), function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(f'{{"name": {name}, "arguments": {text or "{}"}}}')
    return {**message, "content": "\n".join([*filter(None, [message["content"]]), *calls])}
