"""One client request on its way: its sequences, and how an endpoint words what comes of them.

Owns: RequestInfo, Sequence, Call, the View protocol, LiveCalls. Must not know: how a body becomes a call (openai.calls),
how a call runs (service). Called by: service, and every endpoint that generates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from starlette.requests import Request
from starlette.types import Send

from ropeway.errors import RequestError
from ropeway.protocol import AddRequest
from ropeway.server.openai.errors import error_body
from ropeway.server.openai.prompt_report import PromptReport
from ropeway.server.sse import DONE, event
from ropeway.server.stream import RequestStream, TextDelta


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

    def timing_headers(self) -> dict[str, str]:
        """Seconds until the first sequence was scheduled, until its first token, and until the last token of all."""
        stream, arrival = self.sequences[0].stream, self.sequences[0].request.arrival_time
        scheduled, first = stream.first_scheduled, stream.first_token_time
        if scheduled is None or first is None:
            return {}
        last = max(sequence.stream.last_token_time or first for sequence in self.sequences)
        spans = {"Queue": scheduled - arrival, "Prefill": first - scheduled, "Decode": last - first}
        return {f"X-Ropeway-{name}-Seconds": f"{seconds:.6f}" for name, seconds in spans.items()}

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
