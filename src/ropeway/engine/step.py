"""The messages between the engine and its workers: one plan down and one result up per step.

Owns: SchedulerOutput, ModelRunnerOutput, the Executor protocol. Must not know: how either side keeps its state.
Called by: scheduler (writes plans, reads results), worker (the reverse), tests (fake executors).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ropeway.protocol import PromptLogprobs, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class NewRow:
    """A request that the runner does not hold (new, or back after a preemption): all it needs to fill a row."""

    request_id: int
    epoch: int
    token_ids: list[int]  # every known token: prompt, then outputs so far
    num_prompt_tokens: int
    num_computed_tokens: int  # KV of these is already in block_ids (prefix hit)
    block_ids: list[int]  # the whole table, including blocks for this step's tokens
    sampling: SamplingParams
    num_scored: int = 0  # prompt tokens after the first whose log-probabilities are known from an earlier life


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan. Columns are parallel: entry i of each describes scheduled row i. Order is significant and rows
    are never sorted by anyone downstream. Read-only once made.

    Row i computes the tokens at positions ``start_positions[i] .. start_positions[i] + num_tokens[i] - 1``. It samples
    if and only if ``samples[i]``: then the token after the last computed one is not known yet, and wanted. A row that decodes reads
    its input token from the runner's own row state, because with overlap the engine may not have seen it yet.
    """

    step_id: int
    request_ids: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    start_positions: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_blocks: dict[int, list[int]] = field(default_factory=dict)  # request id -> appended ids; not for `added` rows
    added: list[NewRow] = field(default_factory=list)  # apply after `removed`
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), before this step writes any KV
    removed: list[int] = field(default_factory=list)  # finished, aborted or preempted request ids: free their rows
    total_tokens: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """One step's result, rows in the plan's order."""

    step_id: int
    token_ids: list[list[int]]  # [rows][sampled tokens]: one, or none for a row that does not sample
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # row index -> one per token
    # Row index -> of the prompt tokens that follow those computed in this step; where the row asks for them.
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    embeddings: dict[int, list[float]] = field(default_factory=dict)  # row index -> with the prompt's last token
    complete: set[int] = field(default_factory=set)  # rows whose token completes their grammar: nothing may follow
    errors: dict[int, str] = field(
        default_factory=dict
    )  # row index -> why this row alone failed; its token_ids are empty
    execute_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What the executor found at start. ``num_blocks`` counts block 0, the null block that nobody owns."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    architecture: str
    hidden_size: int = 0  # numbers of an embedding
    step_tokens: int = 2048  # in one step, beyond which the device gains nothing and requests only wait for each other
    overlap: bool = False  # the device can run step N while step N + 1 is planned
    startup_seconds: dict[str, float] = field(default_factory=dict)


class Handle(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput: ...


class Executor(Protocol):
    """Runs plans, in the order submitted, on one or many devices."""

    def start(self) -> KVCapacity: ...
    def submit(self, plan: SchedulerOutput) -> Handle: ...
    def compile(self, grammar: str, done: Callable[[str], None]) -> None:
        """Make a grammar ready for rows with it. Must not block; ``done`` is called once, in any thread, with the reason
        if it cannot be used."""
        ...

    def close(self) -> None: ...
