"""Everything that crosses the boundary between the API process and the engine process.

Owns: the message types, columnar where one is sent per step. Must not know: text, HTTP, tensors, blocks.
Called by: server (builds requests, reads deltas), engine (the reverse). Only the standard library is imported, because
both processes load this file first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal


class FinishReason(IntEnum):
    """Why a request ended. The server maps STOP and LENGTH to the OpenAI words."""

    STOP = 0  # an end-of-sequence or stop token id was sampled
    LENGTH = 1  # max_tokens or the model's context was reached
    ABORT = 2  # the client went away, or the server is shutting down
    ERROR = 3  # this request alone failed (for example its logits were NaN); see StepOutputs.errors
    QUEUE_TIMEOUT = 4  # it had not begun to run by its queue_deadline
    DEADLINE = 5  # it had not ended by its deadline; tokens told before stand


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Parsed and validated once, in the server; immutable ever after.

    Stop *strings* are not here: text never enters the engine. ``seed`` is always set, because random numbers are a
    function of (seed, output position) alone; the server draws one when the client gave none.
    """

    max_tokens: int  # generated tokens, already clipped to the context length; 0: only the prompt is computed
    min_tokens: int = (
        0  # end and stop token ids are masked until so many tokens were generated, or the grammar is complete
    )
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    seed: int = 0  # unsigned 64 bit
    eos_token_ids: tuple[int, ...] = ()  # the model's own end tokens
    stop_token_ids: tuple[int, ...] = ()  # the client's
    ignore_eos: bool = False  # eos_token_ids no longer end the request; stop_token_ids still do
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None: none; k: the sampled token's and the k best, of the raw distribution
    prompt_logprobs: int | None = None  # the same for every prompt token after the first; the prefix cache is not read
    grammar: str = ""  # llguidance's language; checked by the server. Where it is complete, the request ends with STOP
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of two or more token ids that generated text never completes
    pooling: Literal["", "mean", "last"] = ""  # not empty: max_tokens is 0 and the request ends with an embedding

    @property
    def wants_nothing(self) -> bool:
        """No token and nothing about the prompt: there is nothing to compute."""
        return self.max_tokens == 0 and self.prompt_logprobs is None and not self.pooling

    @property
    def needs_known_tokens(self) -> bool:
        """Each token must be on the host before the next one can be drawn."""
        return bool(self.grammar or self.bad_words)

    @property
    def needs_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(slots=True)
class AddRequest:
    """One sequence to generate. A client request with n choices or several prompts becomes several of these."""

    request_id: int  # unique in the life of the API process
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float  # time.monotonic(), which is one clock for all processes of a host
    output_token_ids: list[int] = field(default_factory=list)  # already generated before an engine restart
    priority: int = 0  # lower runs first
    tenant: str = ""  # the API key's name or the client's `user`
    deadline: float | None = None  # time.monotonic(), like the next; when the request ends at the latest
    queue_deadline: float | None = None  # when it has begun to run, or ends
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    fork_of: int | None = None  # an earlier request with the same prompt and salt, whose prompt blocks are to be shared


@dataclass(slots=True)
class AbortRequests:
    """Stop these; unknown or finished ids are ignored, so an abort may cross with a finish."""

    request_ids: list[int]


@dataclass(slots=True)
class ResetPrefixCache:
    """Forget every cached block that no request is using."""


@dataclass(slots=True)
class Shutdown:
    """Finish the current step and leave."""


@dataclass(slots=True)
class TokenLogprobs:
    """Raw-distribution log-probabilities (natural log, finite or -inf) for one generated token."""

    logprob: float  # of the sampled token
    rank: int  # 1 is the most likely
    top_ids: list[int]  # most likely first; as many as were asked for
    top_logprobs: list[float]


@dataclass(slots=True)
class PromptLogprobs:
    """The same for a run of prompt tokens, in flat arrays: a long prompt has hundreds of thousands of numbers."""

    num_top: int
    logprobs: array[float] = field(default_factory=lambda: array("f"))  # [num_tokens]
    ranks: array[int] = field(default_factory=lambda: array("i"))  # [num_tokens]
    top_ids: array[int] = field(default_factory=lambda: array("i"))  # [num_tokens * num_top]
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))  # [num_tokens * num_top]

    def extend(self, more: PromptLogprobs) -> None:
        """Append the tokens that follow."""
        self.num_top = more.num_top
        self.logprobs.extend(more.logprobs)
        self.ranks.extend(more.ranks)
        self.top_ids.extend(more.top_ids)
        self.top_logprobs.extend(more.top_logprobs)

    def __len__(self) -> int:
        return len(self.logprobs)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for index, (logprob, rank) in enumerate(zip(self.logprobs, self.ranks, strict=True)):
            top = slice(index * self.num_top, (index + 1) * self.num_top)
            yield TokenLogprobs(logprob, rank, self.top_ids[top].tolist(), self.top_logprobs[top].tolist())


@dataclass(slots=True)
class EngineStats:
    """State of the engine after a step. Counts named num_new_* are of this step alone, so an engine restart cannot
    make a counter go down: the API process adds them up."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # usable blocks in the pool
    num_used_blocks: int = 0  # in at least one block table
    num_cached_blocks: int = 0  # evictable: hold a published prefix, no request uses them
    num_live_tokens: int = 0  # tokens held in used blocks, shared ones counted once per request
    num_new_prefill_tokens: int = 0  # prompt or recomputed tokens computed in this step
    num_new_decode_tokens: int = 0  # tokens sampled in this step
    num_new_preemptions: int = 0
    num_new_recomputed_tokens: int = 0  # computed tokens thrown away by this step's preemptions
    num_new_prefix_queries: int = 0  # tokens looked up
    num_new_prefix_hits: int = 0  # tokens found
    step_id: int = 0
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    update_seconds: float = 0.0


@dataclass(slots=True)
class StepOutputs:
    """Engine to API, one per step, columnar: row i produced ``token_counts[i]`` of ``token_ids``, in order.

    A request appears at most once per message. The sparse dicts are keyed by request id. A request that ends without a
    new token (abort, error) has a row with count 0.
    """

    request_ids: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # flat
    finished: dict[int, FinishReason] = field(default_factory=dict)
    stop_reasons: dict[int, int] = field(default_factory=dict)  # the client's stop token id that ended it
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # one entry per token
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)  # with a request's first row: all of them
    embeddings: dict[int, list[float]] = field(default_factory=dict)  # with the finish of a pooling request
    cached_tokens: dict[int, int] = field(default_factory=dict)  # with a request's first row: prefix-cache tokens
    first_scheduled: dict[int, float] = field(default_factory=dict)  # time.monotonic(), once per request
    errors: dict[int, str] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass(frozen=True, slots=True)
class EngineReady:
    """What was found out at start. Facts are returned, never written back into the configuration."""

    max_model_len: int
    vocab_size: int
    num_blocks: int  # usable
    block_size: int
    dtype: str
    device: str
    architecture: str
    hidden_size: int = 0  # numbers of an embedding
    startup_seconds: dict[str, float] = field(default_factory=dict)  # by phase

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(slots=True)
class EngineFailed:
    """The engine's last words: a start that failed (``config`` true: the user can mend it) or a crashed step."""

    message: str
    config: bool = False


EngineInput = AddRequest | AbortRequests | ResetPrefixCache | Shutdown
EngineOutput = StepOutputs | EngineReady | EngineFailed
