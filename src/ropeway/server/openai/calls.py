"""From a checked body and its prompts to a call that is ready to run.

Owns: make_call, and the checks that need the model, the tokenizer or the request's headers. Must not know: how a call
runs, how its answer is worded. Called by: chat, completions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request

from ropeway.errors import RequestError
from ropeway.protocol import AddRequest
from ropeway.server.call import Call, RequestInfo, Sequence
from ropeway.server.grammar import GrammarError
from ropeway.server.openai.errors import deadline_exceeded, refused_grammar
from ropeway.server.openai.params import build_sampling, check_prompt_ids, split_bad_words, stop_strings, truncated
from ropeway.server.openai.schema import GenerationBody
from ropeway.server.service import Service
from ropeway.server.stream import RequestStream


async def make_call(
    service: Service,
    request: Request,
    body: GenerationBody,
    prompts: Iterable[list[int]],
    *,
    prefix: str,
    param: str,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    shown_special_ids: frozenset[int] = frozenset(),
    best_of: int | None = None,
    grammar: str = "",
    grammar_param: str = "response_format",
) -> Call:
    """Check everything that is left to check and build the sequences. Raises RequestError.

    prefix: of the answer's id. param: the field that holds the prompt. max_tokens: None takes all there is room
    for. logprobs: None, or how many alternatives per token. prompt_logprobs: the same of the prompts' tokens.
    shown_special_ids: tokens that the text shows in spite of skip_special_tokens. best_of: see
    Call; None is body.n. grammar: of server.grammar.grammar(), to be tried first; grammar_param: the field to blame
    if it is refused.
    """
    info, limits = RequestInfo.of(request), service.limits
    stops = stop_strings(body)
    options = body.stream_options
    if options is not None and not body.stream and (options.include_usage or options.continuous_usage_stats):
        raise RequestError("'stream_options' needs 'stream': true.", param="stream_options", code="invalid_value")
    if body.request_id is not None and not info.id_is_given:
        info.request_id = body.request_id
    if body.priority and service.config.scheduler.scheduling_policy != "priority":
        raise RequestError(
            "'priority' needs a server that runs with --scheduling-policy priority.",
            param="priority",
            code="unsupported_parameter",
        )
    deadline = _time_limit(body, info, request.headers, "deadline")
    queue_deadline = _time_limit(body, info, request.headers, "queue_timeout")
    if deadline is not None and deadline <= service.clock():
        service.metrics.missed("deadline")
        raise deadline_exceeded()
    bad_words = split_bad_words(body.bad_words or [], service.tokenizer.encode)
    if grammar:
        try:
            grammar = await service.grammars.check(grammar)
        except GrammarError as error:
            raise refused_grammar(error, grammar_param) from None
    sequences: list[Sequence] = []
    per_prompt = body.n if best_of is None else best_of
    if per_prompt > body.n and logprobs is None:
        logprobs = 0  # to be ranked by
    for number, prompt in enumerate(prompts):
        ids = truncated(prompt, body.truncate_prompt_tokens, max_tokens, limits)
        check_prompt_ids(ids, limits, param)
        first_id: int | None = None
        for choice in range(per_prompt):
            sampling = build_sampling(
                body,
                limits,
                num_prompt_tokens=len(ids),
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs if choice == 0 else None,
                choice=choice,
                param=param,
                bad_words=bad_words,
                grammar=grammar,
            )
            add = AddRequest(
                service.new_request_id(),
                ids,
                sampling,
                info.arrival_time,
                priority=body.priority,
                deadline=deadline,
                queue_deadline=queue_deadline,
                tenant=info.key_name or body.user or "",
                cache_salt=body.cache_salt or "",
                fork_of=first_id,
            )
            first_id = add.request_id if first_id is None else first_id
            stream = RequestStream(
                service.tokenizer,
                prompt_token_ids=ids,
                stop=stops,
                include_stop_str_in_output=body.include_stop_str_in_output,
                min_tokens=body.min_tokens,
                skip_special_tokens=body.skip_special_tokens,
                spaces_between_special_tokens=body.spaces_between_special_tokens,
                eos_token_ids=limits.eos_token_ids,
                shown_special_ids=shown_special_ids,
            )
            sequences.append(Sequence(len(sequences), add, stream, prompt=number))
    info.call = Call(
        id=prefix + (body.request_id or info.request_id),
        model=service.names[0],
        created=int(time.time()),
        sequences=sequences,
        n=body.n,
        best_of=per_prompt,
        stream=body.stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=body.return_token_ids,
    )
    return info.call


def _time_limit(body: GenerationBody, info: RequestInfo, headers: Headers, name: str) -> float | None:
    """time.monotonic() at the end of the body's ``<name>_ms``, or else of the header ``X-<Name>-Ms``, counted from the
    request's arrival. Raises RequestError(400)."""
    milliseconds: float | None = getattr(body, f"{name}_ms")
    if milliseconds is None:
        header = f"x-{name.replace('_', '-')}-ms"
        if (text := headers.get(header)) is None:
            return None
        if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text):
            raise RequestError(f"The header {header} must be a number of milliseconds.", code="invalid_value")
        milliseconds = float(text)
    return info.arrival_time + milliseconds / 1000
