"""Which URL is answered by what.

Owns: the routes, the probes, and what routers and gateways ask besides. Must not know: how requests are parsed or run.
Called by: app.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ropeway.server.anthropic.messages import count_tokens, create_message
from ropeway.server.openai.chat import create_chat_completion
from ropeway.server.openai.completions import create_completion
from ropeway.server.openai.embeddings import create_embeddings
from ropeway.server.openai.errors import json_response
from ropeway.server.openai.models import describe_model, describe_server, get_model, list_models
from ropeway.server.openai.render import render_chat, render_completion
from ropeway.server.openai.requests import cancel_request, get_request
from ropeway.server.openai.response_store import ResponseStore
from ropeway.server.openai.responses import create_response, delete_response, get_response
from ropeway.server.openai.tokenize import detokenize, tokenize
from ropeway.server.service import Service


def add_routes(app: FastAPI, service: Service) -> None:
    store = ResponseStore()

    @app.post("/v1/chat/completions", summary="Chat completion", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(service, request)

    @app.post("/v1/completions", summary="Text completion", response_model=None)
    async def completions(request: Request) -> Response:
        return await create_completion(service, request)

    @app.post("/v1/embeddings", summary="Embeddings of texts", response_model=None)
    async def embeddings(request: Request) -> Response:
        return await create_embeddings(service, request)

    @app.post("/v1/chat/completions/render", summary="The prompt of a chat completion, rendered only")
    async def chat_render(request: Request) -> Response:
        return json_response(await render_chat(service, request))

    @app.post("/v1/completions/render", summary="The prompts of a text completion, rendered only")
    async def completions_render(request: Request) -> Response:
        return json_response(await render_completion(service, request))

    @app.post("/v1/responses", summary="A model response", response_model=None)
    async def responses(request: Request) -> Response:
        return await create_response(service, store, request)

    @app.get("/v1/responses/{response_id}", summary="A stored response")
    async def one_response(request: Request, response_id: str) -> dict[str, Any]:
        return get_response(store, request, response_id)

    @app.delete("/v1/responses/{response_id}", summary="Forget a stored response")
    async def no_response(request: Request, response_id: str) -> dict[str, Any]:
        return delete_response(store, request, response_id)

    @app.post("/v1/messages", summary="A message, as Anthropic's clients ask for it", response_model=None)
    async def messages(request: Request) -> Response:
        return await create_message(service, request)

    @app.post("/v1/messages/count_tokens", summary="The tokens of a message's prompt", response_model=None)
    async def messages_count(request: Request) -> Response:
        return await count_tokens(service, request)

    @app.get("/v1/models", summary="Models served")
    async def models() -> dict[str, Any]:
        return list_models(service)

    @app.get("/v1/models/{model_id:path}", summary="One model")
    async def model(model_id: str) -> dict[str, Any]:
        return get_model(service, model_id)

    @app.post("/tokenize", summary="Token ids of a text or of messages", response_model=None)
    async def tokenize_route(request: Request) -> Response:
        return json_response(await tokenize(service, request))

    @app.post("/detokenize", summary="Text of token ids", response_model=None)
    async def detokenize_route(request: Request) -> Response:
        return json_response(await detokenize(service, request))

    @app.get("/v1/requests/{request_id}", summary="One of the caller's running requests")
    async def one_request(request: Request, request_id: str) -> dict[str, Any]:
        return get_request(service, request, request_id)

    @app.post("/v1/requests/{request_id}/cancel", summary="End a running request with what it has")
    async def cancel(request: Request, request_id: str) -> dict[str, Any]:
        return await cancel_request(service, request, request_id)

    @app.post("/drain", summary="Take no new requests; running ones go on")
    async def drain() -> dict[str, Any]:
        service.lifecycle.begin_drain()
        return {"status": service.lifecycle.phase.value, "requests_in_flight": service.lifecycle.in_flight}

    @app.post("/undrain", summary="Take new requests again")
    async def undrain() -> dict[str, Any]:
        service.lifecycle.undrain()
        return {"status": service.lifecycle.phase.value, "requests_in_flight": service.lifecycle.in_flight}

    @app.post("/flush_cache", summary="The same as /reset_prefix_cache")
    @app.post("/reset_prefix_cache", summary="Forget cached prefixes that no request is using")
    async def reset_prefix_cache() -> dict[str, Any]:
        service.admission.check()
        await service.client.reset_prefix_cache()
        return {"status": "ok"}


def add_probes(app: FastAPI, service: Service) -> None:
    def answer(problem: str | None) -> Response:
        if problem is None:
            return json_response({"status": "ok"})
        return json_response({"status": "unavailable", "reason": problem}, status=503)

    @app.head("/live", include_in_schema=False)
    @app.get("/live", summary="Should the process be restarted?", response_model=None)
    async def live() -> Response:
        return answer(service.lifecycle.live_problem(service.client.health))

    @app.head("/ready", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/ready", summary="Should new requests be sent here?", response_model=None)
    @app.get("/health", summary="The same as /ready", response_model=None)
    async def ready() -> Response:
        return answer(service.lifecycle.ready_problem(service.client.health))

    @app.get("/version", summary="Version of the server")
    async def get_version() -> dict[str, Any]:
        return {"version": version("ropeway")}

    @app.get("/load", summary="Client requests being served")
    async def load() -> dict[str, Any]:
        return {"server_load": service.lifecycle.in_flight}

    @app.get("/get_load", summary="The same as /load, as some routers ask for it")
    async def get_load() -> dict[str, Any]:
        return {"load": service.lifecycle.in_flight}

    @app.get("/get_server_info", include_in_schema=False)
    @app.get("/server_info", summary="The configuration, without secrets")
    async def server_info() -> dict[str, Any]:
        return describe_server(service)

    @app.get("/model_info", summary="The model and its limits")
    async def model_info() -> dict[str, Any]:
        return describe_model(service)

    @app.get("/kv_event_sources", summary="Where KV-cache events are published: nowhere yet")
    async def kv_event_sources() -> dict[str, Any]:
        return {"sources": []}

    @app.get("/metrics", summary="Prometheus metrics", response_model=None)
    async def get_metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)
