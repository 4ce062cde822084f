"""GET /v1/requests/{id} and POST /v1/requests/{id}/cancel: the caller's own requests, while they run.

Owns: the wording of both. Must not know: how requests run. Called by: routes.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ropeway.server.call import Call, RequestInfo
from ropeway.server.service import Service


def get_request(service: Service, request: Request, id: str) -> dict[str, Any]:
    """How far it is. Raises RequestError(404)."""
    return _status(service.calls.find(id, RequestInfo.of(request).key_name))


async def cancel_request(service: Service, request: Request, id: str) -> dict[str, Any]:
    """End every choice where it is: the answer, or its stream, ends with the text so far and finish_reason "abort".
    Raises RequestError(404), so also when it is over already."""
    call = service.calls.find(id, RequestInfo.of(request).key_name)
    for sequence in call.sequences:
        await service.client.abort(sequence.request.request_id)
    return {**_status(call), "status": "cancelled"}


def _status(call: Call) -> dict[str, Any]:
    began = any(sequence.stream.first_token_time is not None for sequence in call.sequences)
    return {
        "id": call.id,
        "object": "request",
        "created": call.created,
        "model": call.model,
        "status": "generating" if began else "queued",  # or reading its prompt: the engine tells only of tokens
        "choices": len(call.sequences),
        "usage": call.usage(),
    }
