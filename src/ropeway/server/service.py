"""The path that all generating endpoints share: read a body, admit its call, run its sequences, answer.

Owns: Service, which is what the endpoints need, in one place. Must not know: how an endpoint words its answers (a View
does), how a body becomes a call. Called by: app (builds it), the endpoints.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from ropeway.config import Config
from ropeway.engine.client import EngineClient, TokenDelta
from ropeway.errors import EngineDeadError, RequestError
from ropeway.metrics import Metrics
from ropeway.protocol import EngineReady
from ropeway.server.admission import Admission
from ropeway.server.call import Call, LiveCalls, RequestInfo, Sequence, View
from ropeway.server.grammar_check import GrammarChecker
from ropeway.server.health import Lifecycle
from ropeway.server.openai.errors import deadline_exceeded, internal_error, json_response, parse_object
from ropeway.server.openai.params import ModelLimits
from ropeway.server.openai.schema import Body, outside_fields, validate
from ropeway.server.output.format import OutputFormat
from ropeway.server.sse import EventStream, Write, unless_gone
from ropeway.server.stream import RequestStream, TextDelta
from ropeway.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
Emit = Callable[[Sequence, TextDelta], Awaitable[None] | None]
"""Takes a delta; what it returns, if anything, has to be awaited before the next one."""


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
        self.grammars = GrammarChecker(tokenizer.vocabulary, metrics)
        self.output = OutputFormat.find(
            tokenizer.chat_template_text, config.model.tool_call_parser, config.model.reasoning_parser
        )
        self._sampling_defaults = sampling_defaults
        self._limits: ModelLimits | None = None
        self._request_ids = itertools.count(1)

    def close(self) -> None:
        """Stop what runs beside the event loop."""
        self.grammars.close()

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
            RequestInfo.of(request).headers.update(call.timing_headers())
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
