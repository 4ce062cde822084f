"""The path that all generating endpoints share: read a body, check it, admit it, run its sequences, answer.

Owns: Service (what the endpoints need, in one place), Call and Sequence (one client request and its parts), request ids.
Must not know: how an endpoint words its answers (a View does). Called by: app (builds it), server.openai.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from ropeway.config import Config
from ropeway.engine.client import EngineClient, TokenDelta
from ropeway.errors import EngineDeadError, RequestError
from ropeway.metrics import Metrics
from ropeway.protocol import AddRequest, EngineReady
from ropeway.server.admission import Admission
from ropeway.server.grammar import GrammarError
from ropeway.server.grammar_check import GrammarChecker
from ropeway.server.health import Lifecycle
from ropeway.server.openai.errors import error_body, internal_error, json_response, parse_object, refused_grammar
from ropeway.server.openai.params import (
    ModelLimits,
    build_sampling,
    check_prompt_ids,
    split_bad_words,
    stop_strings,
    truncated,
)
from ropeway.server.openai.prompt_report import PromptReport
from ropeway.server.openai.schema import Body, GenerationBody, outside_fields, validate
from ropeway.server.output.format import OutputFormat
from ropeway.server.sse import DONE, EventStream, Write, event, unless_gone
from ropeway.server.stream import RequestStream, TextDelta
from ropeway.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
Emit = Callable[["Sequence", TextDelta], Awaitable[None] | None]
"""Takes a delta; what it returns, if anything, has to be awaited before the next one."""


@dataclass(slots=True)
class RequestInfo:
    """What is known of one HTTP request outside its body; made by the outermost layer, in the ASGI scope."""

    request_id: str
    id_is_given: bool  # by the client's X-Request-Id
    arrival_time: float  # time.monotonic()
    send: Send  # straight to the HTTP server: for the rest of a response whose headers have gone through all layers
    key_name: str = ""
    headers: dict[str, str] = field(default_factory=dict)  # to add to the response
    call: Call | None = None

    @staticmethod
    def of(request: Request) -> RequestInfo:
        return cast(RequestInfo, request.scope["ropeway"])


@dataclass(slots=True)
class Sequence:
    index: int  # of the choice in the answer
    request: AddRequest
    stream: RequestStream
    is_complete: Callable[[TextDelta], bool] | None = None  # is asked with each delta: does the answer need no more?
    prompt: int = 0  # of the call's prompts, the number of its own


@dataclass(slots=True)
class Call:
    """One client request, checked and tokenised: best_of sequences for each prompt, in the order of their choices."""

    id: str
    model: str
    created: int  # Unix time
    sequences: list[Sequence]
    n: int  # choices of each prompt in the answer
    best_of: int  # sequences of each prompt, of which the n best are the choices; n, as a rule
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    prompt_report: PromptReport | None = None  # where something is told of the prompts' tokens

    @property
    def firsts(self) -> list[Sequence]:
        """The first sequence of each prompt, which computes it."""
        return self.sequences[:: self.best_of]

    async def prompt_ready(self, sequence: Sequence) -> None:
        """Until all is worded that is told of the sequence's prompt: by its first choice, once that has heard of it."""
        assert self.prompt_report is not None
        request = sequence.request
        if request.fork_of is None:
            await self.prompt_report.fill(sequence.prompt, request.prompt_token_ids, sequence.stream.prompt_logprobs)
        else:
            await self.prompt_report.wait(sequence.prompt)

    def best(self, results: list[tuple[Sequence, TextDelta]]) -> list[tuple[Sequence, TextDelta]]:
        """Of each prompt's results the n with the greatest mean log-probability, best first, numbered as choices."""
        chosen = []
        for begin in range(0, len(results), self.best_of):
            ranked = sorted(results[begin : begin + self.best_of], key=lambda result: -result[0].stream.mean_logprob)
            chosen += ranked[: self.n]
        return [(replace(sequence, index=index), whole) for index, (sequence, whole) in enumerate(chosen)]

    def usage(self) -> dict[str, Any]:
        """As of now. A prompt counts once, however many choices it has; sequences that were not the best count."""
        firsts = self.firsts
        prompt = sum(sequence.stream.num_prompt_tokens for sequence in firsts)
        completion = sum(sequence.stream.num_output_tokens for sequence in self.sequences)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(s.stream.num_cached_tokens for s in firsts)},
        }


class LiveCalls:
    """The calls that run now, found by the answer's id or by the request's; each by its own caller only."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[Call, RequestInfo]] = {}  # by the answer's id

    def add(self, call: Call, info: RequestInfo) -> None:
        self._calls[call.id] = call, info

    def remove(self, call: Call) -> None:
        if (entry := self._calls.get(call.id)) is not None and entry[0] is call:  # two calls may share a given id
            del self._calls[call.id]

    def find(self, id: str, key_name: str) -> Call:
        """The newest of that id. Raises RequestError(404), also for a call of another key."""
        entry = self._calls.get(id)
        if entry is None:
            entry = next((found for found in reversed(self._calls.values()) if found[1].request_id == id), None)
        if entry is None or entry[1].key_name != key_name:
            raise RequestError(f"No request '{id[:200]}' is running.", status=404, code="request_not_found")
        return entry[0]


class View(Protocol):
    """How one endpoint words the answer to one call."""

    def chunk(self, sequence: Sequence, delta: TextDelta) -> bytes:
        """Events for a delta; empty when it has nothing to say."""
        ...

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The last events of a stream in which every sequence has ended."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """The last event of a stream that fails after its status was sent."""
        ...

    def response(self, results: list[tuple[Sequence, TextDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer; each sequence comes with the sum of its deltas."""
        ...


class ChunkView(View, ABC):
    """What the two completions endpoints have in common."""

    call: Call

    @abstractmethod
    def usage_chunk(self, usage: dict[str, Any]) -> bytes: ...

    def closing(self, usage: dict[str, Any]) -> bytes:
        return (self.usage_chunk(usage) if self.call.include_usage else b"") + DONE

    def failure(self, error: RequestError) -> bytes:
        return event(error_body(error))  # and no [DONE]


class Service:
    """Everything an endpoint needs. One per app."""

    def __init__(
        self,
        config: Config,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        lifecycle: Lifecycle,
        *,
        names: tuple[str, ...],
        sampling_defaults: dict[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.lifecycle = lifecycle
        self.names = names
        self.clock = clock
        self.created = int(time.time())
        self.admission = Admission(config.server, lifecycle, lambda: client.health)
        self.calls = LiveCalls()
        self._grammars = GrammarChecker(tokenizer.vocabulary, metrics)
        self.output = OutputFormat.find(
            tokenizer.chat_template_text, config.model.tool_call_parser, config.model.reasoning_parser
        )
        self._sampling_defaults = sampling_defaults
        self._limits: ModelLimits | None = None
        self._request_ids = itertools.count(1)

    def close(self) -> None:
        """Stop what runs beside the event loop."""
        self._grammars.close()

    def mark_ready(self, ready: EngineReady) -> None:
        """The engine has started: requests are accepted from now on."""
        self._limits = ModelLimits(
            # A request that could not fit even alone would be preempted for ever.
            max_model_len=min(ready.max_model_len, ready.kv_capacity_tokens),
            vocab_size=ready.vocab_size,
            max_logprobs=self.config.server.max_logprobs,
            eos_token_ids=self.tokenizer.eos_token_ids,
            hidden_size=ready.hidden_size,
            defaults=self._sampling_defaults,
        )
        self.metrics.mark_ready(ready)
        self.lifecycle.mark_ready()

    @property
    def limits(self) -> ModelLimits:
        """Raises RequestError(503) while the engine has not started."""
        if self._limits is None:
            self.admission.check()
            raise AssertionError("accepting requests without an engine")
        return self._limits

    def new_request_id(self) -> int:
        """Of one sequence in the engine."""
        return next(self._request_ids)

    # Reading

    async def read(self, request: Request, schema: type[B]) -> B:
        """The checked body. Raises RequestError."""
        values = parse_object(await read_body(request, self.config.server.max_request_bytes))
        body = validate(schema, values)
        ignored = outside_fields(body, self.config.server.unknown_fields)
        if body.model is not None and body.model not in self.names:
            raise RequestError(
                f"The model '{body.model[:200]}' does not exist.", status=404, param="model", code="model_not_found"
            )
        if ignored:
            safe = [re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) for name in ignored[:32]]
            RequestInfo.of(request).headers["X-Ropeway-Ignored-Fields"] = ", ".join(safe)
        return body

    async def make_call(
        self,
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
        info, limits = RequestInfo.of(request), self.limits
        stops = stop_strings(body)
        options = body.stream_options
        if options is not None and not body.stream and (options.include_usage or options.continuous_usage_stats):
            raise RequestError("'stream_options' needs 'stream': true.", param="stream_options", code="invalid_value")
        if body.request_id is not None and not info.id_is_given:
            info.request_id = body.request_id
        if body.priority and self.config.scheduler.scheduling_policy != "priority":
            raise RequestError(
                "'priority' needs a server that runs with --scheduling-policy priority.",
                param="priority",
                code="unsupported_parameter",
            )
        deadline = time_limit(body, info, request.headers, "deadline")
        queue_deadline = time_limit(body, info, request.headers, "queue_timeout")
        if deadline is not None and deadline <= self.clock():
            self.metrics.missed("deadline")
            raise deadline_exceeded()
        bad_words = split_bad_words(body.bad_words or [], self.tokenizer.encode)
        if grammar:
            try:
                grammar = await self._grammars.check(grammar)
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
                    self.new_request_id(),
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
                    self.tokenizer,
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
            model=self.names[0],
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

    # Running

    async def respond(self, request: Request, call: Call, view: View) -> Response:
        """Admit and run. Raises RequestError, ClientGone; once a stream has begun, errors go into the stream."""
        if not call.stream:
            return json_response(view.response(await self.run_whole(request, call), call.usage()))
        return EventStream(
            lambda write: self._stream(call, view, write),
            keepalive_interval=self.config.server.keepalive_interval,
            on_close=self._enter(request, call),
            headers={},
            send=RequestInfo.of(request).send,
        )

    async def run_whole(self, request: Request, call: Call) -> list[tuple[Sequence, TextDelta]]:
        """Admit and run to the end: the choices, each with the sum of its deltas. Raises RequestError, ClientGone."""
        leave = self._enter(request, call)
        try:
            results = await unless_gone(request.receive, self._collect(call))
        finally:
            leave()
        if self.config.server.timing_headers:
            RequestInfo.of(request).headers.update(_timing_headers(call))
        return call.best(results) if call.best_of > call.n else results

    def _enter(self, request: Request, call: Call) -> Callable[[], None]:
        """Admit; returns what has to be called when the call has ended. Raises RequestError."""
        num_prompt_tokens = sum(sequence.stream.num_prompt_tokens for sequence in call.firsts)
        permit = self.admission.admit(len(call.sequences), num_prompt_tokens)
        self.calls.add(call, RequestInfo.of(request))

        def leave() -> None:
            self.calls.remove(call)
            permit.release()

        return leave

    async def _stream(self, call: Call, view: View, write: Write) -> None:
        def emit(sequence: Sequence, delta: TextDelta) -> Awaitable[None] | None:
            return write(frames) if (frames := view.chunk(sequence, delta)) else None

        try:
            await self._run(call, emit)
        except RequestError as error:
            await write(view.failure(error))
        except Exception:
            logger.exception("request %s failed", call.id)
            await write(view.failure(internal_error()))
        else:
            await write(view.closing(call.usage()))

    async def _collect(self, call: Call) -> list[tuple[Sequence, TextDelta]]:
        deltas: list[list[TextDelta]] = [[] for _ in call.sequences]

        def keep(sequence: Sequence, delta: TextDelta) -> None:
            deltas[sequence.index].append(delta)

        await self._run(call, keep)
        return [(sequence, _sum(parts)) for sequence, parts in zip(call.sequences, deltas, strict=True)]

    def _run(self, call: Call, emit: Emit) -> Awaitable[None]:
        """All sequences at once. The first that fails, or a cancellation, ends them all."""
        if len(call.sequences) == 1:
            return self._run_sequence(call, call.sequences[0], emit)
        return self._run_sequences(call, emit)

    async def _run_sequences(self, call: Call, emit: Emit) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for sequence in call.sequences:
                    group.create_task(self._run_sequence(call, sequence, emit))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_sequence(self, call: Call, sequence: Sequence, emit: Emit) -> None:
        """Raises RequestError(500) if the engine cannot finish the sequence."""
        stream, request = sequence.stream, sequence.request
        report = call.prompt_report
        if request.sampling.wants_nothing:  # but the prompt back
            if report is not None:
                await call.prompt_ready(sequence)
            if (sending := emit(sequence, TextDelta(finish_reason="length"))) is not None:
                await sending
            return
        clock, feed, inter_token = self.clock, stream.feed, self.metrics.inter_token
        is_complete = sequence.is_complete
        last_time: float | None = None
        final = TextDelta(finish_reason="abort")  # what the metrics say if the client leaves
        try:
            # Closing the generator, for whatever reason, is what aborts the request in the engine.
            deltas = cast("AsyncGenerator[TokenDelta, None]", self.client.generate(request))
            try:
                async for raw in deltas:
                    now = clock()
                    delta = feed(raw, now)
                    if report is not None:
                        await call.prompt_ready(sequence)
                    if raw.token_ids:
                        if last_time is None:
                            self.metrics.first_token(now - request.arrival_time, stream.num_prompt_tokens)
                        else:
                            inter_token(now - last_time, len(raw.token_ids))
                        last_time = now
                    if is_complete is not None and delta.finish_reason is None and is_complete(delta):
                        delta.finish_reason = "stop"
                    if delta.finish_reason is not None:
                        final = delta
                        break
                    if (sending := emit(sequence, delta)) is not None:
                        await sending
                else:
                    raise EngineDeadError("the engine ended a request without a reason")
            finally:
                await deltas.aclose()
            if final.finish_reason in ("queue_timeout", "deadline"):
                self.metrics.missed(final.finish_reason)
            if (error := self._failure(stream, final)) is not None:
                raise error
            if (sending := emit(sequence, final)) is not None:
                await sending
        except EngineDeadError:
            final = TextDelta(finish_reason="error")
            raise RequestError(
                "The engine ended while this request was running. It is safe to send it again.",
                status=500,
                type="server_error",
                code="engine_dead",
            ) from None
        finally:
            self.metrics.request_finished(stream, request.arrival_time, final.finish_reason or "abort")

    def _failure(self, stream: RequestStream, final: TextDelta) -> RequestError | None:
        """Why a sequence that ended like this has no answer. One that its deadline cut has, as far as it came: to the
        client that is a limit of length."""
        match final.finish_reason:
            case "error":
                return RequestError(
                    f"Generation failed: {final.error}", status=500, type="server_error", code="generation_failed"
                )
            case "queue_timeout":
                return RequestError(
                    "The request waited for its turn longer than its queue_timeout_ms.",
                    status=429,
                    type="rate_limit_error",
                    code="queue_timeout",
                    headers={"Retry-After": str(self.admission.retry_after())},
                )
            case "deadline" if stream.num_output_tokens == 0:
                return deadline_exceeded()
            case "deadline":
                final.finish_reason, final.stop_reason = "length", "deadline"
        return None


def deadline_exceeded() -> RequestError:
    """Not a 5xx: a balancer takes those for a replica's fault, and this is the client's own limit."""
    return RequestError(
        "The request's deadline_ms passed before its first token.",
        status=408,
        type="timeout_error",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},  # OpenAI's and Anthropic's clients would
    )


def time_limit(body: GenerationBody, info: RequestInfo, headers: Headers, name: str) -> float | None:
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


async def read_body(request: Request, limit: int) -> bytes:
    """Raises RequestError(413) as soon as more than ``limit`` bytes were announced or have come."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"The request body is larger than {limit} bytes.",
        status=413,
        code="request_too_large",
        headers={"Connection": "close"},  # the rest of the body is not read
    )


def _sum(parts: list[TextDelta]) -> TextDelta:
    last = parts[-1]
    return TextDelta(
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[entry for part in parts for entry in part.logprobs or ()],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        token_texts=[text for part in parts for text in part.token_texts],
    )


def _timing_headers(call: Call) -> dict[str, str]:
    """Seconds until the first sequence was scheduled, until its first token, and until the last token of all."""
    stream, arrival = call.sequences[0].stream, call.sequences[0].request.arrival_time
    scheduled, first = stream.first_scheduled, stream.first_token_time
    if scheduled is None or first is None:
        return {}
    last = max(sequence.stream.last_token_time or first for sequence in call.sequences)
    spans = {"Queue": scheduled - arrival, "Prefill": first - scheduled, "Decode": last - first}
    return {f"X-Ropeway-{name}-Seconds": f"{seconds:.6f}" for name, seconds in spans.items()}
