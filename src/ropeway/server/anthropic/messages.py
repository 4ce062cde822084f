"""POST /v1/messages and /v1/messages/count_tokens.

Owns: the request's fields and the way from content blocks to chat messages. Must not know: how sequences run, how a
model writes tool calls. Called by: routes.
"""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ropeway.errors import RequestError
from ropeway.server.anthropic.view import MessageView, anthropic_error
from ropeway.server.openai.chat import ChatCall, prepare_chat
from ropeway.server.openai.errors import json_response
from ropeway.server.openai.schema import Body, ChatRequest, validate
from ropeway.server.service import Service

Json = dict[str, Any]


class MessagesBody(Body):
    messages: Annotated[list[Json], Field(fail_fast=True)]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = Field(None, description="enabled, with budget_tokens; adaptive; or disabled.")


class MessagesRequest(MessagesBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    metadata: Json | None = None
    service_tier: str | None = None


class CountTokensRequest(MessagesBody):
    """The same conversation; nothing is generated."""


async def create_message(service: Service, request: Request) -> Response:
    try:
        body = await service.read(request, MessagesRequest)
        chat = await _prepare(service, request, body)
        return await service.respond(request, chat.call, MessageView(chat, body.stop_sequences or []))
    except RequestError as error:
        return anthropic_error(service, request, error)


async def count_tokens(service: Service, request: Request) -> Response:
    """What the whole prompt takes, the template's own tokens included."""
    try:
        body = await service.read(request, CountTokensRequest)
        chat = await _prepare(service, request, body)
        return json_response({"input_tokens": len(chat.call.sequences[0].request.prompt_token_ids)})
    except RequestError as error:
        return anthropic_error(service, request, error)


async def _prepare(service: Service, request: Request, body: MessagesBody) -> ChatCall:
    try:
        chat_body = validate(ChatRequest, chat_values(body))
        generates = isinstance(body, MessagesRequest)
        return await prepare_chat(service, request, chat_body, prefix="msg_", generates=generates)
    except RequestError as error:
        # The names of the chat endpoint, where they differ from these.
        param = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}.get(error.param or "", error.param)
        message = error.message.replace(f"'{error.param}'", f"'{param}'")
        raise RequestError(
            message, status=error.status, type=error.type, param=param, code=error.code, headers=error.headers
        ) from None


def chat_values(body: MessagesBody) -> Json:
    """The same request in the words of the chat endpoint. Raises RequestError(400)."""
    values: Json = {"messages": to_messages(body.messages, body.system)}
    if isinstance(body, MessagesRequest):
        values |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
        if isinstance(user := (body.metadata or {}).get("user_id"), str):
            values["user"] = user
    if body.tools:
        values["tools"] = [_tool(tool, index) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        values |= _tool_choice(body.tool_choice)
    if body.thinking is not None:
        values |= _thinking(body.thinking)
    return values


def _tool(tool: Json, index: int) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise _invalid(f"tools[{index}].type", "this server has no tools of its own")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Json) -> Json:
    kind = choice.get("type")
    if kind == "tool":
        value: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        value = {"auto": "auto", "any": "required", "none": "none"}[kind]
    else:
        raise _invalid("tool_choice.type", "must be auto, any, tool or none")
    return {"tool_choice": value, "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True}


def _thinking(thinking: Json) -> Json:
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise _invalid("thinking.type", "must be enabled, adaptive or disabled")
    values: Json = {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}
    if kind == "enabled":
        budget = thinking.get("budget_tokens")
        if type(budget) is not int or budget < 1:
            raise _invalid("thinking.budget_tokens", "must be a positive integer")
        values["thinking_token_budget"] = budget
    return values


def to_messages(messages: list[Json], system: str | list[Json] | None) -> list[Json]:
    """Chat messages; tool results, which are blocks of a user's turn here, become messages of their own.

    Raises RequestError(400) that names the block.
    """
    result: list[Json] = []
    if system:
        result.append({"role": "system", "content": _system(system)})
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise _invalid(f"{where}.role", "must be user or assistant")
        if isinstance(content, str):
            result.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise _invalid(f"{where}.content", "must be a text or a list of blocks")
        elif role == "assistant":
            result.append(_assistant(content, f"{where}.content"))
        else:
            result += _user(content, f"{where}.content")
    return result


def _system(system: str | list[Json]) -> str | list[Json]:
    if isinstance(system, str):
        return system
    return [{"type": "text", "text": _text(block, "text", f"system[{i}]")} for i, block in enumerate(system)]


def _assistant(blocks: list[Any], where: str) -> Json:
    message: Json = {"role": "assistant", "content": []}
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            message["content"].append({"type": "text", "text": _text(block, "text", at)})
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _text(block, "thinking", at)
        elif kind == "redacted_thinking":
            pass  # nobody here can read it
        elif kind == "tool_use":
            if not isinstance(arguments := block.get("input"), dict):
                raise _invalid(f"{at}.input", "must be an object")
            function = {"name": _text(block, "name", at), "arguments": orjson.dumps(arguments).decode()}
            call = {"id": _text(block, "id", at), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            raise _invalid(f"{at}.type", f"blocks of type '{str(kind)[:100]}' are not supported here")
    message["content"] = message["content"] or None
    return message


def _user(blocks: list[Any], where: str) -> list[Json]:
    results: list[Json] = []
    parts: list[Json] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": _text(block, "text", at)})
        elif kind == "tool_result":
            results.append(
                {"role": "tool", "tool_call_id": _text(block, "tool_use_id", at), "content": _result(block, at)}
            )
        else:
            raise _invalid(f"{at}.type", f"blocks of type '{str(kind)[:100]}' are not supported here")
    if parts or not results:
        results.append({"role": "user", "content": parts})
    return results


def _result(block: Json, at: str) -> str | list[Json]:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _invalid(f"{at}.content", "must be a text or a list of text blocks")
    return [{"type": "text", "text": _text(part, "text", f"{at}.content[{i}]")} for i, part in enumerate(content)]


def _text(block: Any, name: str, where: str) -> str:
    value = block.get(name) if isinstance(block, dict) else None
    if not isinstance(value, str):
        raise _invalid(f"{where}.{name}", "must be a text")
    return value


def _invalid(param: str, reason: str) -> RequestError:
    return RequestError(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")
