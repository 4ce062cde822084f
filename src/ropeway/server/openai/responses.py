"""POST /v1/responses, and GET and DELETE of stored ones: OpenAI's newer API, over the same chat path.

Owns: the request's fields, the way from input items to chat messages, what is stored. Must not know: how sequences run,
how a model writes tool calls. Called by: routes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from ropeway.errors import RequestError
from ropeway.server.call import RequestInfo
from ropeway.server.openai.chat import ChatCall, prepare_chat
from ropeway.server.openai.response_store import ResponseStore
from ropeway.server.openai.response_view import ResponseView
from ropeway.server.openai.schema import Body, ChatRequest, validate
from ropeway.server.service import Service

Json = dict[str, Any]

_INPUT_SCHEMA = {"title": "Input", "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_LOGPROBS = "message.output_text.logprobs"
_NOTHING_TO_INCLUDE = frozenset({"reasoning.encrypted_content", "code_interpreter_call.outputs"})  # no such items here

# Fields of the chat endpoint that work here as well, under the same names.
_SHARED = frozenset(
    {
        "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "top_k", "min_p", "repetition_penalty",
        "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "allowed_token_ids",
        "banned_token_ids", "bad_words", "skip_special_tokens", "spaces_between_special_tokens", "cache_salt",
        "priority", "queue_timeout_ms", "deadline_ms", "request_id", "chat_template_kwargs", "structured_outputs",
        "thinking_token_budget", "truncate_prompt_tokens",
    }
)  # fmt: skip


class ResponsesRequest(Body):
    """Besides these, the extension fields of the chat endpoint work here, too."""

    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)]  # to_messages checks it: a union's errors are unreadable
    instructions: str | None = Field(None, description="A system message in front; not taken over from earlier turns.")
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    stream_options: Json | None = None
    store: bool = Field(True, description="Keep it for an hour, as long as there is room, for the next turn.")
    previous_response_id: str | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool = True
    reasoning: Json | None = Field(None, description="`effort` goes to the chat template.")
    text: Json | None = Field(None, description="`format`: text, json_object or json_schema.")
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None
    top_logprobs: int | None = Field(None, ge=0)
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: drop the oldest turns that do not fit."
    )
    service_tier: Literal["auto", "default"] = "auto"
    background: Literal[False] = False
    max_tool_calls: int | None = Field(None, ge=1, description="Bounds built-in tools, of which there are none.")


async def create_response(service: Service, store: ResponseStore, request: Request) -> Response:
    body = await service.read(request, ResponsesRequest)
    key_name = RequestInfo.of(request).key_name
    earlier = store.items_of(body.previous_response_id, key_name) if body.previous_response_id else []
    items = earlier + input_items(body.input)
    chat = await _prepare(service, request, body, items)
    view = ResponseView(
        chat, service.tokenizer, settings=_echoed(body), include_logprobs=_LOGPROBS in (body.include or ())
    )
    if body.store:
        view.on_end = lambda response: store.add(response, items + response["output"], key_name)
    return await service.respond(request, chat.call, view)


def get_response(store: ResponseStore, request: Request, id: str) -> Json:
    """Raises RequestError(404)."""
    return store.get(id, RequestInfo.of(request).key_name)


def delete_response(store: ResponseStore, request: Request, id: str) -> Json:
    """Raises RequestError(404)."""
    store.delete(id, RequestInfo.of(request).key_name)
    return {"id": id, "object": "response", "deleted": True}


async def _prepare(service: Service, request: Request, body: ResponsesRequest, items: list[Json]) -> ChatCall:
    """Checked and tokenised. With truncation "auto", the oldest quarter of the turns is dropped until the rest fits."""
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = to_messages(items)
    while True:
        try:
            values = _chat_values(body, head + messages)
            return await prepare_chat(service, request, validate(ChatRequest, values), prefix="resp_")
        except RequestError as error:
            too_long = error.code == "context_length_exceeded" and body.truncation == "auto"
            rest = _drop_oldest(messages) if too_long else []
            if not rest:
                raise _reworded(error) from None
            messages = rest


def _drop_oldest(messages: list[Json]) -> list[Json]:
    """Without the oldest quarter, and beginning with what may begin a conversation; empty if nothing is left."""
    rest = messages[max(1, len(messages) // 4) :]
    while rest and rest[0]["role"] in ("assistant", "tool"):
        rest = rest[1:]
    return rest


def _chat_values(body: ResponsesRequest, messages: list[Json]) -> Json:
    """The same request in the words of the chat endpoint. Raises RequestError(400)."""
    values: Json = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "user": body.user,
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    extra = body.model_extra or {}
    values |= {name: extra[name] for name in _SHARED & extra.keys()}
    if body.tools:
        values["tools"] = [_chat_tool(tool, index) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        values["tool_choice"] = _chat_tool_choice(body.tool_choice)
    if (effort := (body.reasoning or {}).get("effort")) is not None:
        values["reasoning_effort"] = effort
    if (form := (body.text or {}).get("format")) is not None:
        values["response_format"] = _chat_format(form)
    for name in body.include or ():
        if name != _LOGPROBS and name not in _NOTHING_TO_INCLUDE:
            raise _invalid("include", f"'{name[:100]}' cannot be included")
    if _LOGPROBS in (body.include or ()) or body.top_logprobs:
        values |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return values


def _chat_tool(tool: Json, index: int) -> Json:
    if tool.get("type") != "function":
        raise _invalid(f"tools[{index}].type", "this server has no built-in tools; give functions")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _chat_tool_choice(choice: str | Json) -> str | Json:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [
            {"type": "function", "function": {"name": tool.get("name")}} if isinstance(tool, dict) else tool
            for tool in choice["tools"]
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    return choice


def _chat_format(form: Any) -> Any:
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
    return form


def input_items(value: Any) -> list[Json]:
    """The input as a list of items. Raises RequestError(400)."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise _invalid("input", "must be a text or a list of items")
    if not value:
        raise RequestError("'input' must not be empty.", param="input", code="invalid_value")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise _invalid(f"input[{index}]", "an item must be an object")
    return list(value)


def to_messages(items: list[Json]) -> list[Json]:
    """Chat messages: a turn's reasoning, text and calls, which are items of their own here, become one message.

    Raises RequestError(400) that names the item.
    """
    messages: list[Json] = []
    reasoning = ""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            message = {"role": _text(item, "role", where), "content": _content(item.get("content"), where)}
            if message["role"] == "assistant" and reasoning:
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind == "reasoning":
            reasoning = _joined(item.get("content")) or _joined(item.get("summary"))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
                if reasoning:
                    messages[-1]["reasoning_content"], reasoning = reasoning, ""
            function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
            call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})
        else:
            raise _invalid(f"{where}.type", f"items of type '{str(kind)[:100]}' are not supported")
    return messages


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise _invalid(f"{where}.{name}", "must be a text")
    return value


def _content(content: Any, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(where, "needs a text or a list of parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": _text(part, "text", where)})
        elif kind == "refusal":
            parts.append({"type": "text", "text": _text(part, "refusal", where)})
        else:
            raise _invalid(where, "this model takes parts of type 'input_text' only")
    return parts


def _joined(parts: Any) -> str:
    found = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in found if isinstance(text, str))


def _echoed(body: ResponsesRequest) -> Json:
    """The request's settings as every response repeats them."""
    reasoning = body.reasoning or {}
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": body.store,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation,
        "user": body.user,
    }


_NAMES = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "response_format": "text"}


def _reworded(error: RequestError) -> RequestError:
    """An error of the chat path, with the fields' names of this endpoint."""
    param = error.param or ""
    if re.match(r"messages\b", param):
        param = "input"
    param = _NAMES.get(param, param.replace(".function", "") if param.startswith("tools[") else param)
    message = error.message.replace(f"'{error.param}'", f"'{param}'") if error.param else error.message
    return RequestError(
        message, status=error.status, type=error.type, param=param or None, code=error.code, headers=error.headers
    )


def _invalid(param: str, reason: str) -> RequestError:
    return RequestError(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")
