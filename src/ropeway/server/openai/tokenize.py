"""POST /tokenize and /detokenize: what the server would make of a prompt, without generating.

Owns: the wording of both. Must not know: the engine. Called by: routes.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ropeway.errors import RequestError
from ropeway.server.openai.messages import render_chat
from ropeway.server.openai.schema import DetokenizeRequest, TokenizeRequest
from ropeway.server.service import Service


async def tokenize(service: Service, request: Request) -> dict[str, Any]:
    """The ids that generation would start from, of a text or of messages. Raises RequestError."""
    body = await service.read(request, TokenizeRequest)
    if body.prompt is not None and body.messages is None:
        ids = await service.tokenizer.encode_async(body.prompt, body.add_special_tokens is not False)
    elif body.messages is not None and body.prompt is None:
        text = await render_chat(service, body.messages, body, body.tools)
        ids = await service.tokenizer.encode_async(text, bool(body.add_special_tokens))
    else:
        raise RequestError("Give either 'prompt' or 'messages'.", param="prompt", code="invalid_value")
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.limits.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.tokenizer.token_text(token_id) for token_id in ids]
    return answer


async def detokenize(service: Service, request: Request) -> dict[str, Any]:
    """The text of the ids, special tokens included. Raises RequestError."""
    body = await service.read(request, DetokenizeRequest)
    vocab_size = service.limits.vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab_size:
        raise RequestError(
            f"Invalid value for 'tokens': token ids must be at least 0 and below {vocab_size}, the vocabulary size.",
            param="tokens",
            code="invalid_value",
        )
    return {"prompt": await service.tokenizer.decode_async(body.tokens, skip_special_tokens=False)}
