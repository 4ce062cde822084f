"""The OpenAPI document: FastAPI's, with the bodies, answers and errors that the endpoints read and write themselves.

Owns: which body, answer and example belong to which route. Must not know: how requests run. Called by: app.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ropeway.server.anthropic.messages import CountTokensRequest, MessagesRequest
from ropeway.server.openai.responses import ResponsesRequest
from ropeway.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

Json = dict[str, Any]
VALIDATION: Literal["validation"] = "validation"
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/completions/render": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def _object(required: str, **properties: Any) -> Json:
    """An object schema. required: names, separated by blanks; properties: their types' names, or schemas."""
    named = {name: {"type": kind} if isinstance(kind, str) else kind for name, kind in properties.items()}
    return {"type": "object", "required": required.split(), "properties": named}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _nullable(kind: str) -> Json:
    return {"anyOf": [{"type": kind}, {"type": "null"}]}


_ERROR = _object(
    "error",
    error=_object(
        "message type param code",
        message="string",
        type="string",
        param=_nullable("string"),
        code=_nullable("string"),
    ),
)
_USAGE = _object(
    "prompt_tokens completion_tokens total_tokens prompt_tokens_details",
    prompt_tokens="integer",
    completion_tokens="integer",
    total_tokens="integer",
    prompt_tokens_details=_object("cached_tokens", cached_tokens="integer"),
)
_RENDERED = _object(
    "request_id token_ids sampling_params model prompt",
    request_id="string",
    token_ids=_list({"type": "integer"}),
    sampling_params="object",
    model="string",
    prompt="string",
)


def _completion(kind: str, text: str, of_type: str) -> Json:
    """A completion whose choices hold ``text``."""
    return _object(
        "id object created model choices usage",
        id="string",
        object={"const": kind},
        created="integer",
        model="string",
        choices=_list(
            _object(f"index {text} finish_reason", index="integer", finish_reason="string", **{text: of_type})
        ),
        usage=_USAGE,
    )


_MODEL = _object("id object created owned_by", id="string", object="string", created="integer", owned_by="string")
_RUNNING = _object("id status usage", id="string", object="string", status="string", choices="integer", usage=_USAGE)
ANSWERS: dict[tuple[str, str], Json] = {
    ("post", "/v1/chat/completions"): _completion("chat.completion", "message", "object"),
    ("post", "/v1/completions"): _completion("text_completion", "text", "string"),
    ("post", "/v1/chat/completions/render"): _RENDERED,
    ("post", "/v1/completions/render"): _list(_RENDERED),
    ("post", "/v1/responses"): _object(
        "id object created_at status model output usage",
        id="string",
        object={"const": "response"},
        created_at="integer",
        status="string",
        model="string",
        output=_list({"type": "object"}),
        usage="object",
    ),
    ("post", "/v1/embeddings"): _object(
        "object data model usage",
        object={"const": "list"},
        data=_list(_object("object index embedding", object="string", index="integer")),
        model="string",
        usage=_object("prompt_tokens total_tokens", prompt_tokens="integer", total_tokens="integer"),
    ),
    ("post", "/v1/messages"): _object(
        "id type role model content stop_reason usage",
        id="string",
        type={"const": "message"},
        role={"const": "assistant"},
        model="string",
        content=_list(_object("type", type="string")),
        stop_reason=_nullable("string"),
        stop_sequence=_nullable("string"),
        usage=_object("input_tokens output_tokens", input_tokens="integer", output_tokens="integer"),
    ),
    ("post", "/v1/messages/count_tokens"): _object("input_tokens", input_tokens="integer"),
    ("post", "/tokenize"): _object(
        "count max_model_len tokens", count="integer", max_model_len="integer", tokens=_list({"type": "integer"})
    ),
    ("post", "/detokenize"): _object("prompt", prompt="string"),
    ("get", "/v1/models"): _object("object data", object={"const": "list"}, data=_list(_MODEL)),
    ("get", "/v1/models/{model_id}"): _MODEL,
    ("get", "/v1/requests/{request_id}"): _RUNNING,
    ("post", "/v1/requests/{request_id}/cancel"): _RUNNING,
}
STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")

_HELLO = [{"role": "user", "content": "What is the capital of France?"}]
_WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
EXAMPLES: dict[str, dict[str, Json]] = {
    "/v1/chat/completions": {
        "A question": {"messages": _HELLO, "max_tokens": 32, "temperature": 0},
        "A stream": {"messages": _HELLO, "stream": True, "stream_options": {"include_usage": True}},
        "A JSON answer": {
            "messages": _HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}},
        },
        "A tool": {
            "messages": _HELLO,
            "tools": [{"type": "function", "function": _WEATHER}],
            "tool_choice": "required",
        },
    },
    "/v1/completions": {
        "A text": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        "Several, each twice": {"prompt": ["One,", "Two,"], "n": 2, "max_tokens": 8, "seed": 1},
    },
    "/v1/chat/completions/render": {"A question": {"messages": _HELLO}},
    "/v1/completions/render": {"A text": {"prompt": "The capital of France is"}},
    "/v1/responses": {
        "A question": {"input": "What is the capital of France?", "max_output_tokens": 32},
        "With a tool": {"input": "How is the weather in Paris?", "tools": [{"type": "function", **_WEATHER}]},
    },
    "/v1/embeddings": {
        "Two texts": {"input": ["Bread", "Butter"]},
        "Short and in base64": {"input": "Bread", "dimensions": 2, "encoding_format": "base64"},
    },
    "/v1/messages": {"A question": {"max_tokens": 32, "messages": _HELLO}},
    "/v1/messages/count_tokens": {"A question": {"messages": _HELLO}},
    "/tokenize": {"A text": {"prompt": "Hello"}, "A chat": {"messages": _HELLO}},
    "/detokenize": {"Ids": {"tokens": [5, 6, 7]}},
}
_PROBLEMS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No API key, or one that is not known here.",
    "404": "There is no such model, request or response.",
    "408": "The request's deadline passed before its first token.",
    "413": "The body is too large.",
    "429": "Too much is in flight already; see Retry-After.",
    "500": "The engine failed, or the server has a bug.",
    "503": "This replica cannot serve now: it is starting, draining or restarting its engine.",
}


def document(app: FastAPI) -> Json:
    """Made once per app."""
    if app.openapi_schema is None:
        app.openapi_schema = _make(app)
    return app.openapi_schema


def _make(app: FastAPI) -> Json:
    document = get_openapi(
        title=app.title,
        version=app.version,
        routes=app.routes,
        description="OpenAI-compatible inference. Errors have one shape everywhere; a stream's errors come as an event.",
    )
    refs, definitions = models_json_schema(
        [(schema, VALIDATION) for schema in dict.fromkeys(BODIES.values())],
        ref_template="#/components/schemas/{model}",
    )
    components = document.setdefault("components", {})
    schemas = {**components.get("schemas", {}), **definitions["$defs"], "Error": _ERROR}
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own; nothing here answers like that
        schemas.pop(unused, None)
    components["schemas"] = schemas
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]  # a key is needed where the server was started with some
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _describe(operation, method, path)
            if method == "post" and path in BODIES:
                examples = {name: {"value": value} for name, value in EXAMPLES.get(path, {}).items()}
                content = {"schema": refs[(BODIES[path], VALIDATION)], "examples": examples}
                operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    return document


def _describe(operation: Json, method: str, path: str) -> None:
    """What the operation answers."""
    success: Json = {"description": "Success"}
    if path == "/metrics":
        success["content"] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        success["content"] = {"application/json": {"schema": ANSWERS.get((method, path), {"type": "object"})}}
    if method == "post" and path in STREAMING:
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation["responses"] = {"200": success}
    if path in ("/live", "/ready", "/health"):
        operation["responses"]["503"] = {
            "description": "No.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
        return
    for status, description in _PROBLEMS.items():
        operation["responses"][status] = {"description": description, "content": error}
