"""One sequence on its way through the engine.

Owns: the state of a request. Must not know: blocks, devices, text. Changed by: the scheduler alone.
"""

from __future__ import annotations

from enum import Enum

from ropeway.protocol import AddRequest, PromptLogprobs, SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"  # new, or preempted and to be computed again
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """``num_computed_tokens`` chases ``num_tokens``; there are no phases.

    ``token_ids`` are the known tokens. ``num_tokens`` counts those whose KV is to be computed: the known ones and, while
    a step that samples is in flight, the token that it will bring (if the request runs ahead). It never reaches ``max_num_tokens``, because the
    last token's KV is of no use to anyone. A request that generates nothing ends when its prompt is computed.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "deadline",
        "epoch",
        "first_scheduled",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scored",
        "num_tokens",
        "parent",
        "parent_epoch",
        "priority",
        "prompt_logprobs",
        "queue_deadline",
        "request_id",
        "runs_ahead",
        "sampling",
        "status",
        "stop_ids",
        "tenant",
        "token_ids",
    )

    def __init__(self, message: AddRequest, max_model_len: int) -> None:
        sampling: SamplingParams = message.sampling
        self.request_id = message.request_id
        self.token_ids: list[int] = [*message.prompt_token_ids, *message.output_token_ids]
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.max_num_tokens = min(self.num_prompt_tokens + sampling.max_tokens, max_model_len)
        if sampling.max_tokens == 0:  # the bound that num_tokens never reaches
            self.max_num_tokens = self.num_prompt_tokens + 1
        self.num_computed_tokens = 0
        self.sampling = sampling
        self.runs_ahead = not sampling.needs_known_tokens  # planned again before its last token is known
        eos = () if sampling.ignore_eos else sampling.eos_token_ids
        self.stop_ids = frozenset((*eos, *sampling.stop_token_ids))
        self.status = RequestStatus.WAITING
        self.epoch = 0  # grows whenever results in flight become stale: preempted, finished, aborted
        self.priority = message.priority
        self.tenant = message.tenant
        self.deadline = message.deadline
        self.queue_deadline = message.queue_deadline
        self.arrival_time = message.arrival_time
        self.cache_salt = message.cache_salt
        self.first_scheduled: float | None = None
        self.num_cached_tokens = 0  # found in the prefix cache when first scheduled
        self.num_preemptions = 0
        self.parent: Request | None = None  # whose prompt blocks it takes over when it is admitted,
        self.parent_epoch = -1  # if that is still in this epoch then, and so has them still
        # Log-probabilities of the prompt's tokens so far, until they are told with the first output row; and for how
        # many tokens after the first they are known, told or not.
        self.prompt_logprobs = None if sampling.prompt_logprobs is None else PromptLogprobs(sampling.prompt_logprobs)
        self.num_scored = 0
        self.block_hashes: list[bytes] = []  # of the known full blocks; a memo that the KV manager fills

    @property
    def needs_every_prompt_token(self) -> bool:
        """Something is still wanted of each token of the prompt, so KV that lies in the prefix cache is of no use."""
        sampling = self.sampling
        if sampling.pooling == "mean":
            return True
        return sampling.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens - 1

    def add_prompt_logprobs(self, scores: PromptLogprobs) -> None:
        """Of the tokens that follow those known so far."""
        self.num_scored += len(scores)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(scores)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, epoch={self.epoch}, "
            f"computed={self.num_computed_tokens}/{self.num_tokens}, prompt={self.num_prompt_tokens})"
        )
