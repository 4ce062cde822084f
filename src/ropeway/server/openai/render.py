"""POST /v1/chat/completions/render and /v1/completions/render: what would be generated from, and nothing generated.

Owns: the wording of both. Must not know: how sequences run. Called by: routes. A router asks this of every replica before
each request, so nothing here waits for the engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request

from ropeway.server.call import Call, RequestInfo
from ropeway.server.openai.chat import prepare_chat
from ropeway.server.openai.completions import prepare_completion
from ropeway.server.openai.schema import ChatRequest, CompletionRequest
from ropeway.server.service import Service

Json = dict[str, Any]


async def render_chat(service: Service, request: Request) -> Json:
    """Raises RequestError as the chat endpoint would."""
    body = await service.read(request, ChatRequest)
    chat = await prepare_chat(service, request, body, prefix="chatcmpl-", generates=False)
    return _rendered(service, request, chat.call)[0]


async def render_completion(service: Service, request: Request) -> list[Json]:
    """One per prompt. Raises RequestError as the completions endpoint would."""
    body = await service.read(request, CompletionRequest)
    call = await prepare_completion(service, request, body, generates=False)
    return _rendered(service, request, call)


def _rendered(service: Service, request: Request, call: Call) -> list[Json]:
    """token_ids are those that generation starts from; prompt is their text, special tokens included."""
    result = []
    for sequence in call.firsts:
        ids = sequence.request.prompt_token_ids
        result.append(
            {
                "request_id": RequestInfo.of(request).request_id,
                "model": call.model,
                "prompt": service.tokenizer.decode(ids, skip_special_tokens=False),
                "token_ids": ids,
                "sampling_params": dataclasses.asdict(sequence.request.sampling),
            }
        )
    return result
