"""POST /v1/completions.

Owns: prompts in their four forms, echo, and the completions wording of answers. Must not know: how sequences run.
Called by: routes, render.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ropeway.errors import RequestError
from ropeway.server.call import Call, ChunkView, Sequence
from ropeway.server.grammar import grammar
from ropeway.server.openai.calls import make_call
from ropeway.server.openai.infill import Infill
from ropeway.server.openai.logprobs import CompletionLogprobs
from ropeway.server.openai.prompt_report import Echo, PromptReport
from ropeway.server.openai.prompts import split_prompts
from ropeway.server.openai.schema import CompletionRequest
from ropeway.server.openai.structured import answer_rule
from ropeway.server.service import Service
from ropeway.server.sse import TextFrame, event
from ropeway.server.stream import TextDelta

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def create_completion(service: Service, request: Request) -> Response:
    body = await service.read(request, CompletionRequest)
    call = await prepare_completion(service, request, body)
    echoes = _echoes(service, body, call)
    if PromptReport.num_top(body.prompt_logprobs, _echo_logprobs(body)) is not None:
        call.prompt_report = PromptReport(
            service.tokenizer,
            echoes,
            prompt_logprobs=body.prompt_logprobs,
            echo_logprobs=_echo_logprobs(body),
        )
    return await service.respond(request, call, CompletionView(service, call, echoes, body.logprobs is not None))


async def prepare_completion(
    service: Service, request: Request, body: CompletionRequest, *, generates: bool = True
) -> Call:
    """Check everything and build the call. generates: as for prepare_chat. Raises RequestError."""
    prompts = split_prompts(body.prompt, "prompt", may_be_empty=bool(body.suffix))
    if generates:
        service.admission.check(len(prompts) * max(body.n, body.best_of or 0))
    if body.best_of is not None:
        if body.best_of < body.n:
            raise _invalid("best_of", f"must not be below n, which is {body.n}")
        if body.best_of > body.n and body.stream:
            raise _invalid("best_of", "above n, results cannot be streamed: which are the best is known at the end")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError(
            "Invalid value for 'max_tokens': must be at least 1, unless 'echo' is true.",
            param="max_tokens",
            code="invalid_value",
        )
    if body.suffix:
        encoded = await _encode_infill(service, body, prompts)
    else:
        encode = service.tokenizer.encode_async
        encoded = [await encode(p, body.add_special_tokens) if isinstance(p, str) else p for p in prompts]
    rule = answer_rule(body) if generates else None
    return await make_call(
        service,
        request,
        body,
        encoded,
        prefix="cmpl-",
        param="prompt",
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=PromptReport.num_top(body.prompt_logprobs, _echo_logprobs(body)),
        best_of=body.best_of,
        grammar=grammar(rule.text) if rule else "",
        grammar_param=rule.param if rule else "",
    )


async def _encode_infill(
    service: Service, body: CompletionRequest, prompts: list[str] | list[list[int]]
) -> list[list[int]]:
    """Prompts that ask for what stands before body.suffix. The model's ends of such an answer become stop tokens."""
    infill = Infill.find(service.tokenizer)
    if infill is None:
        raise RequestError(
            "'suffix': this model's vocabulary has no tokens for filling in the middle.",
            param="suffix",
            code="unsupported_parameter",
        )
    for param in ("echo", "truncate_prompt_tokens"):
        if getattr(body, param):
            raise _invalid(param, "cannot be used together with 'suffix'")
    if not body.ignore_eos:
        body.stop_token_ids = [*(body.stop_token_ids or []), *infill.end_token_ids]
    assert body.suffix is not None
    return [await infill.prompt_ids(prompt, body.suffix, body.add_special_tokens) for prompt in prompts]


def _echo_logprobs(body: CompletionRequest) -> int | None:
    return body.logprobs if body.echo else None


def _echoes(service: Service, body: CompletionRequest, call: Call) -> list[Echo]:
    """What goes before the choices of each prompt: the client's own text, or the text of the tokens."""
    if not body.echo:
        return [Echo()] * len(call.firsts)
    prompts = split_prompts(body.prompt, "prompt")
    echoes = []
    for prompt, sequence in zip(prompts, call.firsts, strict=True):
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            echoes.append(Echo(prompt, shows_special_tokens=True))
        else:
            text = service.tokenizer.decode(sequence.request.prompt_token_ids, body.skip_special_tokens)
            echoes.append(Echo(text, shows_special_tokens=not body.skip_special_tokens))
    return echoes


def _invalid(param: str, reason: str) -> RequestError:
    return RequestError(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")


class CompletionView(ChunkView):
    def __init__(self, service: Service, call: Call, echoes: list[Echo], logprobs: bool) -> None:
        """echoes: text to put before the choices of each prompt."""
        self._tokenizer = service.tokenizer
        self.call = call
        self._echoes = echoes
        self._logprobs: dict[int, CompletionLogprobs] | None = {} if logprobs else None
        self._fast = not (logprobs or call.return_token_ids or call.continuous_usage)
        self._frames: dict[int, TextFrame] = {}  # by choice; there once it has begun

    def chunk(self, sequence: Sequence, delta: TextDelta) -> bytes:
        frame = self._frames.get(sequence.index)
        if frame is None:
            self._frames[sequence.index] = TextFrame(
                lambda text: self._event(self._choice(sequence, text, TextDelta()))
            )
            return self._full_chunk(sequence, delta, first=True)
        if self._fast and delta.finish_reason is None:
            return frame.render(delta.text) if delta.text else b""
        return self._full_chunk(sequence, delta)

    def _full_chunk(self, sequence: Sequence, delta: TextDelta, first: bool = False) -> bytes:
        shows_ids = self.call.return_token_ids
        text = self._echo(sequence) + delta.text if first else delta.text
        tells_prompt = first and self.call.prompt_report is not None
        if not (text or delta.logprobs or delta.finish_reason or (shows_ids and delta.token_ids) or tells_prompt):
            return b""
        choice = self._choice(sequence, text, delta)
        if shows_ids:
            choice["token_ids"] = delta.token_ids
        if first:
            self._add_prompt(choice, sequence)
        return event(self._event(choice))

    def _echo(self, sequence: Sequence) -> str:
        return self._echoes[sequence.prompt].text

    def _choice(self, sequence: Sequence, text: str, delta: TextDelta) -> dict[str, Any]:
        index = sequence.index
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._logprobs is not None and delta.logprobs is not None:
            if index not in self._logprobs:
                self._logprobs[index] = CompletionLogprobs(self._tokenizer, len(self._echo(sequence)))
            choice["logprobs"] = self._logprobs[index].block(delta)
        return choice

    def _add_prompt(self, choice: dict[str, Any], sequence: Sequence) -> None:
        """What is told of the prompt, once per choice."""
        if self.call.return_token_ids:
            choice["prompt_token_ids"] = sequence.request.prompt_token_ids
        if (report := self.call.prompt_report) is None:
            return
        if (entries := report.entries(sequence.prompt)) is not None:
            choice["prompt_logprobs"] = entries
        if (block := report.block(sequence.prompt)) is not None:
            generated = choice["logprobs"] or {}
            choice["logprobs"] = {key: column + generated.get(key, []) for key, column in block.items()}

    def _event(self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        call = self.call
        value: dict[str, Any] = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
            "choices": [] if choice is None else [choice],
        }
        if call.continuous_usage and choice is not None:
            value["usage"] = call.usage()
        elif call.include_usage or not call.stream:
            value["usage"] = usage
        return value

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return event(self._event(None, usage))

    def response(self, results: list[tuple[Sequence, TextDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for sequence, whole in results:
            choice = self._choice(sequence, self._echo(sequence) + whole.text, whole)
            if self.call.return_token_ids:
                choice["token_ids"] = whole.token_ids
            self._add_prompt(choice, sequence)
            choices.append(choice)
        return {**self._event(None, usage), "choices": choices}
