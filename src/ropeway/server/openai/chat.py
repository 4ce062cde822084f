"""POST /v1/chat/completions, and what every endpoint that generates a message shares.

Owns: prepare_chat, from a chat request to a call that is ready to run. Must not know: how sequences run, how an answer
is worded (chat_view). Called by: routes; other endpoints that speak of messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ropeway.errors import RequestError
from ropeway.server.call import Call
from ropeway.server.openai.answers import AnswerReader
from ropeway.server.openai.calls import make_call
from ropeway.server.openai.chat_view import ChatView
from ropeway.server.openai.messages import render_chat
from ropeway.server.openai.prompt_report import Echo, PromptReport
from ropeway.server.openai.schema import ChatRequest
from ropeway.server.openai.tools import read_tools
from ropeway.server.output.message import MessageParser
from ropeway.server.service import Service


async def create_chat_completion(service: Service, request: Request) -> Response:
    body = await service.read(request, ChatRequest)
    chat = await prepare_chat(service, request, body, prefix="chatcmpl-")
    return await service.respond(request, chat.call, ChatView(service, chat))


@dataclass(slots=True)
class ChatCall:
    """A chat request, checked and tokenised, and how its answers are to be read."""

    call: Call
    logprobs: bool
    answers: AnswerReader
    _parsers: dict[int, MessageParser] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """An answer's text is its content, and nothing else is in it."""
        return self.answers.is_plain

    def parser(self, index: int) -> MessageParser:
        """The one of this choice; always the same one."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self.answers.parser()
        return parser

    def usage(self) -> dict[str, Any]:
        """As of now, with the tokens of the thoughts that the parsers have seen."""
        usage = self.call.usage()
        if not self.is_plain:
            thought = sum(parser.num_reasoning_tokens for parser in self._parsers.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage


async def prepare_chat(
    service: Service, request: Request, body: ChatRequest, *, prefix: str, generates: bool = True
) -> ChatCall:
    """Check everything and build the call. prefix: of the answer's id. generates: if the call is only to be looked at, a
    server that is full still prepares it. Raises RequestError."""
    if generates:
        service.admission.check(body.n)
    _check(body)
    use = read_tools(body)
    kwargs = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    text = await render_chat(service, body.messages, body, use.tools if use else None, kwargs)
    answers = AnswerReader.find(service, body, use, text)
    constraint = answers.constraint(body) if generates else None
    call = await make_call(
        service,
        request,
        body,
        [await service.tokenizer.encode_async(text, bool(body.add_special_tokens))],
        prefix=prefix,
        param="messages",
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        shown_special_ids=answers.shown_special_ids,
        grammar=constraint.text if constraint else "",
        grammar_param=constraint.param if constraint else "",
    )
    if body.prompt_logprobs is not None:
        call.prompt_report = PromptReport(
            service.tokenizer, [Echo()], prompt_logprobs=body.prompt_logprobs, echo_logprobs=None
        )
    if use is not None and use.max_calls is not None and not use.is_forced:
        for sequence in call.sequences:
            sequence.is_complete = answers.watch()
    return ChatCall(call, body.logprobs, answers)


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) == 0:
            raise RequestError(f"Invalid value for '{name}': must be at least 1.", param=name, code="invalid_value")
