"""What some requests want of their prompt's tokens besides KV: log-probabilities, or an embedding.

Owns: which tokens of a step that concerns, and the sums of mean pooling. Must not know: scheduling, sampling parameters
other than these, models (it is given hidden states and a head). Called by: worker.runner.

Logits of a whole chunk of a prompt would be gigabytes, so they are made and used a few rows at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ropeway.engine.step import ModelRunnerOutput, NewRow, SchedulerOutput
from ropeway.protocol import PromptLogprobs
from ropeway.worker.device import Device
from ropeway.worker.sampler import raw_logprobs

_CHUNK = 2**22  # logits at a time; with what is made of them, a few times so many numbers
_CPU_CHUNK = 2**20  # already enough to be at the processor's peak


@dataclass(slots=True)
class _Prompt:
    """What one request still wants."""

    token_ids: np.ndarray  # [num_prompt] int64
    num_top: int | None  # alternatives; None: no log-probabilities
    num_scored: int  # tokens after the first that are not wanted again
    pooling: Literal["", "mean", "last"]
    total: Tensor | None = None  # [hidden_size] float32, on the device: sum over the tokens so far, for the mean


@dataclass(slots=True)
class _Scored:
    """A run of consecutive tokens of one row whose followers' log-probabilities are wanted."""

    row: int  # in the plan
    count: int
    num_top: int


@dataclass(slots=True)
class _Pooled:
    row: int
    begin: int  # among the hidden states that are pooled
    count: int
    prompt: _Prompt
    ends: bool  # with the prompt's last token


@dataclass(slots=True)
class PromptStep:
    """What is wanted of one step. `indices` says of which tokens; `run` makes it of their hidden states."""

    indices: Tensor  # [num_scored + num_pooled] int64, among the step's tokens
    targets: Tensor  # [num_scored] int64; the tokens that follow
    scored: list[_Scored]
    pooled: list[_Pooled]
    vocab_size: int

    def run(self, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """hidden ``[num_scored + num_pooled, hidden_size]``; logits: the head, ``[n, hidden_size]`` to ``[n, vocab]``.
        Returns tensors for `report`, on the device."""
        num_scored = self.targets.shape[0]
        tensors = self._score(hidden[:num_scored], logits) if num_scored else []
        if (embeddings := self._pool(hidden[num_scored:])) is not None:
            tensors.append(embeddings)
        return tensors

    def report(self, tensors: list[Tensor], output: ModelRunnerOutput) -> None:
        """Put what `run` made, now on the host, into the step's result."""
        if self.scored:
            chosen, ranks, top_ids, top, *tensors = tensors
            begin = 0
            for run in self.scored:
                lines = slice(begin, begin + run.count)
                output.prompt_logprobs[run.row] = PromptLogprobs(
                    min(run.num_top, top.shape[1]),
                    _array("f", chosen[lines]),
                    _array("i", ranks[lines]),
                    _array("i", top_ids[lines, : run.num_top]),
                    _array("f", top[lines, : run.num_top]),
                )
                begin += run.count
        if tensors:
            rows = [pooled.row for pooled in self.pooled if pooled.ends]
            output.embeddings.update(zip(rows, tensors[0].tolist(), strict=True))

    def _score(self, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> list[Tensor]:
        num_rows, place = hidden.shape[0], hidden.device
        most = min(max(run.num_top for run in self.scored), self.vocab_size)
        # What stays is allocated before what does not: in between, it would keep the heap from being used again.
        chosen, ranks = torch.empty(num_rows, device=place), torch.empty(num_rows, dtype=torch.int32, device=place)
        top_ids = torch.empty(num_rows, most, dtype=torch.int32, device=place)
        top = torch.empty(num_rows, most, device=place)
        size = max(1, (_CPU_CHUNK if place.type == "cpu" else _CHUNK) // self.vocab_size)
        for begin in range(0, num_rows, size):
            some = slice(begin, begin + size)
            found = raw_logprobs(logits(hidden[some]), self.targets[some], most)
            for result, part in zip((chosen, ranks, top_ids, top), found.columns(), strict=True):
                result[some] = part
        return [chosen, ranks, top_ids, top]

    def _pool(self, hidden: Tensor) -> Tensor | None:
        """``[rows that end, hidden_size]`` float32."""
        embeddings = []
        for pooled in self.pooled:
            prompt = pooled.prompt
            total = hidden[pooled.begin : pooled.begin + pooled.count].float().sum(0)
            if prompt.pooling == "mean":
                prompt.total = total = total if prompt.total is None else prompt.total + total
                total = total / len(prompt.token_ids)
            if pooled.ends:
                embeddings.append(total)
        return torch.stack(embeddings) if embeddings else None


class PromptRows:
    """The requests in the runner's rows of which more than KV is wanted. Most of the time there are none."""

    def __init__(self, vocab_size: int, device: Device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._prompts: dict[int, _Prompt] = {}  # by request id

    def apply(self, plan: SchedulerOutput) -> None:
        """As RequestRows.apply."""
        for request_id in plan.removed:
            self._prompts.pop(request_id, None)
        for new in plan.added:
            sampling = new.sampling
            if sampling.pooling or sampling.prompt_logprobs is not None:
                self._prompts[new.request_id] = _prompt_of(new)

    def gather(self, plan: SchedulerOutput) -> PromptStep | None:
        """What is wanted of the step; None, as a rule, if that is nothing."""
        if not self._prompts:
            return None
        scored, pooled = [], []
        score_indices, pool_indices, targets = [], [], []
        offset = num_pooled = 0
        for row, (request_id, start, count) in enumerate(
            zip(plan.request_ids, plan.start_positions, plan.num_tokens, strict=True)
        ):
            prompt = self._prompts.get(request_id)
            end = start + count
            if prompt is not None and start < len(prompt.token_ids):
                tokens = np.arange(start, end)
                if prompt.num_top is not None:
                    # The token at p foretells the one at p + 1, which is known even behind the end of this chunk.
                    found = tokens[(tokens >= prompt.num_scored) & (tokens + 1 < len(prompt.token_ids))]
                    if len(found):
                        scored.append(_Scored(row, len(found), prompt.num_top))
                        score_indices.append(found - start + offset)
                        targets.append(prompt.token_ids[found + 1])
                ends = end == len(prompt.token_ids)
                if prompt.pooling == "last":
                    tokens = tokens[-1:] if ends else tokens[:0]
                if prompt.pooling and len(tokens):
                    pooled.append(_Pooled(row, num_pooled, len(tokens), prompt, ends))
                    pool_indices.append(tokens - start + offset)
                    num_pooled += len(tokens)
            offset += count
        if not (scored or pooled):
            return None
        none = np.zeros(0, dtype=np.int64)
        arrays = {
            "indices": np.concatenate([none, *score_indices, *pool_indices]),
            "targets": np.concatenate([none, *targets]),
        }
        return PromptStep(**self._device.upload(arrays), scored=scored, pooled=pooled, vocab_size=self._vocab_size)


def _prompt_of(new: NewRow) -> _Prompt:
    token_ids = np.array(new.token_ids[: new.num_prompt_tokens], dtype=np.int64)
    return _Prompt(token_ids, new.sampling.prompt_logprobs, new.num_scored, new.sampling.pooling)


def _array(kind: str, tensor: Tensor) -> array:  # type: ignore[type-arg]
    """kind: "f" for float32, "i" for int32."""
    values = array(kind)
    values.frombytes(tensor.contiguous().numpy().tobytes())
    return values


__all__ = ["PromptRows", "PromptStep"]
