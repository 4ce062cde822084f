"""POST /v1/embeddings.

Owns: inputs to embedding calls, and the wording of the answer. Must not know: how sequences run, how a hidden state is
computed. Called by: routes.

An embedding is made of the hidden states behind the last layer's norm. By default it is their mean: the last state of a
model that was trained to predict says what comes next, not what the text is about. A model that was trained to embed
with its last token (Qwen3-Embedding, E5-Mistral, ...) wants ``"pooling": "last"``.
"""

from __future__ import annotations

import base64
import math
import struct
import time

from starlette.requests import Request
from starlette.responses import Response

from ropeway.errors import RequestError
from ropeway.protocol import AddRequest, SamplingParams
from ropeway.server.call import Call, RequestInfo, Sequence
from ropeway.server.openai.errors import json_response
from ropeway.server.openai.params import check_prompt_ids, truncated
from ropeway.server.openai.prompts import split_prompts
from ropeway.server.openai.schema import EmbeddingRequest
from ropeway.server.service import Service
from ropeway.server.stream import RequestStream


async def create_embeddings(service: Service, request: Request) -> Response:
    """Raises RequestError, ClientGone."""
    body = await service.read(request, EmbeddingRequest)
    inputs = split_prompts(body.input, "input")
    service.admission.check(len(inputs), param="input")
    hidden_size = service.limits.hidden_size
    if body.dimensions is not None and body.dimensions > hidden_size:
        raise RequestError(
            f"Invalid value for 'dimensions': this model's embeddings have {hidden_size}.",
            param="dimensions",
            code="invalid_value",
        )
    encode = service.tokenizer.encode_async
    prompts = [await encode(text, body.add_special_tokens) if isinstance(text, str) else text for text in inputs]
    call = _make_call(service, request, body, prompts)
    await service.run_whole(request, call)
    data = []
    for sequence in call.sequences:
        embedding = sequence.stream.embedding
        if embedding is None:
            raise RequestError(
                "The request was ended before its embeddings were computed.",
                status=503,
                type="service_unavailable_error",
                code="aborted",
            )
        vector = normalised(embedding[: body.dimensions])
        data.append({"object": "embedding", "index": sequence.index, "embedding": _encoded(vector, body)})
    usage = call.usage()
    del usage["completion_tokens"]
    return json_response({"object": "list", "data": data, "model": call.model, "usage": usage})


def _make_call(service: Service, request: Request, body: EmbeddingRequest, prompts: list[list[int]]) -> Call:
    info, limits = RequestInfo.of(request), service.limits
    sampling = SamplingParams(max_tokens=0, pooling=body.pooling)
    sequences = []
    for index, prompt in enumerate(prompts):
        ids = truncated(prompt, body.truncate_prompt_tokens, 0, limits)
        check_prompt_ids(ids, limits, "input")
        if len(ids) > limits.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {limits.max_model_len} tokens. However, input {index} has "
                f"{len(ids)} tokens. Please reduce its length.",
                param="input",
                code="context_length_exceeded",
            )
        add = AddRequest(
            service.new_request_id(),
            ids,
            sampling,
            info.arrival_time,
            tenant=info.key_name or body.user or "",
            cache_salt=body.cache_salt or "",
        )
        stream = RequestStream(service.tokenizer, prompt_token_ids=ids)
        sequences.append(Sequence(index, add, stream, prompt=index))
    info.call = Call(
        id="embd-" + info.request_id,
        model=service.names[0],
        created=int(time.time()),
        sequences=sequences,
        n=1,
        best_of=1,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        return_token_ids=False,
    )
    return info.call


def normalised(vector: list[float]) -> list[float]:
    """To length 1, as OpenAI's are; one without a direction stays as it is."""
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length for value in vector] if 0 < length < math.inf else vector


def _encoded(vector: list[float], body: EmbeddingRequest) -> list[float] | str:
    if not all(map(math.isfinite, vector)):
        raise RequestError(
            "The model's hidden states are not numbers for this input.",
            status=500,
            type="server_error",
            code="generation_failed",
        )
    if body.encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector
