"""The OpenAPI document: FastAPI's, with the bodies, answers and errors that the endpoints read and write themselves.

Owns: which body belongs to which route, and the examples. Must not know: how requests run. Called by: app.
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


def document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document plus the bodies, which the endpoints read and validate themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        refs, definitions = models_json_schema(
            [(schema, VALIDATION) for schema in BODIES.values()], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path, schema in BODIES.items():
            document["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": refs[(schema, VALIDATION)]}},
            }
        app.openapi_schema = document
    return app.openapi_schema
