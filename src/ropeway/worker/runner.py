"""Executes plans: rows, batch, forward, sample.

Owns: the model, the KV cache's memory, the request rows. Must not know: scheduling, prefix caching, processes, text.
Called by: worker.executor, one plan at a time, in the order submitted.

`begin` gives a step to the device and `PendingStep.result` waits for it, so that on a device that computes by itself the
next step can be planned, and begun, meanwhile. A plan may be made before the result of the one before it is known
(overlap). That is safe because a row reads its last sampled token from the device, and because plans change the rows only
here, in order. A row that runs once too often (its request had ended) writes only to blocks and state of its own, and the
engine drops its token by its epoch.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ropeway.attention.base import AttentionBackend, AttentionMetadata
from ropeway.engine.step import ModelRunnerOutput, SchedulerOutput
from ropeway.worker.batch import RequestRows
from ropeway.worker.constraints import Constraints, StepMasks
from ropeway.worker.device import Device, Results
from ropeway.worker.graphs import DecodeGraphs
from ropeway.worker.prompts import PromptRows, PromptStep
from ropeway.worker.sampler import Drawn, Logprobs, Sampled, SamplingInputs, draw, report
from ropeway_kernels.cpu import allocate


class Model(Protocol):
    """What the runner asks of a decoder; see ropeway.model.decoder.Decoder. Calling it is ``logits(hidden(...))``."""

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_layers: list[Tensor],
        backend: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor,
    ) -> Tensor: ...

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_layers: list[Tensor],
        backend: AttentionBackend,
        meta: AttentionMetadata,
        indices: Tensor,
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def allocate_kv_cache(
    backend: AttentionBackend,
    *,
    num_blocks: int,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Zeros ``[num_blocks, num_layers, *one block of one layer]``: a block is contiguous over all layers, so that it can
    be copied or moved to another memory as one piece."""
    shape = (num_blocks, num_layers, *backend.kv_shape(num_blocks, block_size, num_kv_heads, head_dim)[1:])
    if device.type == "cpu":
        return allocate(math.prod(shape), dtype).view(shape)  # memory is used as blocks are
    return torch.zeros(shape, dtype=dtype, device=device)


class ModelRunner:
    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        device: Device,
        kv_cache: Tensor,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        constraints: Constraints | None = None,
        graphs: bool = False,
    ) -> None:
        """kv_cache: as allocate_kv_cache makes it. constraints: for rows with a grammar or bad words, if there can be
        any. graphs: replay decode steps as CUDA graphs, if the backend allows."""
        self._model = model
        self._backend = backend
        self._device = device
        self._kv_cache = kv_cache
        self._kv_layers = [kv_cache[:, layer] for layer in range(kv_cache.shape[1])]
        self.rows = RequestRows(max_num_seqs, max_model_len, block_size, vocab_size, device)
        self.prompts = PromptRows(vocab_size, device)
        self.constraints = constraints
        self._finished = 0.0  # when the last result was there, by time.perf_counter
        self._decode: DecodeGraphs | None = None
        if getattr(backend, "captures_decode", False):
            self._decode = DecodeGraphs(
                self._forward, device, max_num_seqs, -(-max_model_len // block_size), max_model_len, capture=graphs
            )

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. A plan without rows only frees and fills."""
        return self.begin(plan).result()

    @torch.inference_mode()
    def begin(self, plan: SchedulerOutput) -> PendingStep:
        """Give one step to the device. Steps may be begun before the results of earlier ones are taken."""
        step = PendingStep(self, plan)
        try:
            self.rows.apply(plan)
            self.prompts.apply(plan)
            if self.constraints is not None:
                self.constraints.apply(plan)
            if plan.block_copies:
                self._copy_blocks(plan.block_copies)
            if plan.request_ids:
                self._launch(plan, step)
        finally:
            self._device.end_step()
        return step

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        cache = self._kv_cache
        if cache.is_cuda:
            from ropeway_kernels.block_copy import copy_blocks  # which loads Triton

            copy_blocks(cache, cache, self._device.upload({"pairs": np.array(pairs, dtype=np.int64)})["pairs"])
        else:
            for source, target in pairs:
                cache[target].copy_(cache[source])

    def _launch(self, plan: SchedulerOutput, step: PendingStep) -> None:
        padded = 0
        prompts = step.prompts = self.prompts.gather(plan)
        if self._decode is not None and max(plan.num_tokens) == 1 and prompts is None:
            padded = self._decode.padded_size(len(plan.request_ids))
        batch = self.rows.gather(plan, padded)
        masks = step.masks = self.constraints.begin(plan, batch.sampled) if self.constraints is not None else None
        batch.meta = self._backend.prepare(batch.meta)
        prompt_tensors: list[Tensor] = []
        if prompts is not None:
            num_sampled = len(batch.sampled)
            indices = torch.cat([batch.logits_indices, prompts.indices])
            hidden = self._model.hidden(
                batch.input_ids, batch.positions, self._kv_layers, self._backend, batch.meta, indices
            )
            logits = self._model.logits(hidden[:num_sampled])
            prompt_tensors = prompts.run(hidden[num_sampled:], self._model.logits)
        elif padded and self._decode is not None:
            logits = self._decode.run(batch)
            if len(batch.sampled) == len(plan.request_ids):
                logits = logits[: len(batch.sampled)]
            else:
                logits = logits.index_select(0, batch.logits_indices)
        else:
            logits = self._forward(batch.input_ids, batch.positions, batch.meta, batch.logits_indices)
        tensors: list[Tensor] = []
        if batch.sampled:
            if masks is not None:
                masks.wait()
                uploaded = self._device.upload({"rows": masks.rows, "bits": masks.bits})
                batch.sampling.masks = uploaded["rows"], uploaded["bits"]
            drawn = draw(logits, batch.sampling, self._device.native)
            self.rows.commit(batch, drawn.token_ids)
            tensors = [drawn.token_ids, drawn.best]
            if (found := drawn.logprobs) is not None:
                tensors += found.columns()
            step.sampled, step.sampling = batch.sampled, batch.sampling
        step.num_drawn = len(tensors)
        step.results = self._device.download(tensors + prompt_tensors)

    def _forward(self, input_ids: Tensor, positions: Tensor, meta: AttentionMetadata, logits_indices: Tensor) -> Tensor:
        return self._model(input_ids, positions, self._kv_layers, self._backend, meta, logits_indices)


class PendingStep:
    """A step that the device was given; an engine.step.Handle."""

    def __init__(self, runner: ModelRunner, plan: SchedulerOutput) -> None:
        self._began = time.perf_counter()
        self._runner = runner
        self._plan = plan
        self.results: Results | None = None  # the tensors of a Drawn, then those of ``prompts``; none without rows
        self.num_drawn = 0  # of those tensors
        self.prompts: PromptStep | None = None
        self.sampled: list[int] = []  # the plan's index of each row that samples
        self.sampling: SamplingInputs | None = None
        self.masks: StepMasks | None = None

    def result(self) -> ModelRunnerOutput:
        """Wait for the step. Once only, and in the order in which steps were begun."""
        output = ModelRunnerOutput(self._plan.step_id, token_ids=[[] for _ in self._plan.request_ids])
        if self.results is not None:
            tensors = self.results.result()
            if self.sampling is not None:
                token_ids, best, *logprobs = tensors[: self.num_drawn]
                drawn = Drawn(token_ids, best, Logprobs(*logprobs) if logprobs else None)
                self._fill(output, report(drawn, self.sampling))
            if self.prompts is not None:
                self.prompts.report(tensors[self.num_drawn :], output)
        now = time.perf_counter()
        # The device began with it when it had finished the step before, if not later.
        output.execute_seconds = now - max(self._began, self._runner._finished)
        self._runner._finished = now
        return output

    def _fill(self, output: ModelRunnerOutput, result: Sampled) -> None:
        plan, constraints = self._plan, self._runner.constraints if self.masks is not None else None
        for i, (row, token) in enumerate(zip(self.sampled, result.token_ids.tolist(), strict=True)):
            if i in result.errors:
                reasons = self.masks.errors if self.masks is not None else {}
                output.errors[row] = reasons.get(i, result.errors[i])
                continue
            output.token_ids[row] = [token]
            if constraints is not None and constraints.take(plan.request_ids[row], plan.epochs[row], token):
                output.complete.add(row)
            if i in result.logprobs:
                output.logprobs[row] = [result.logprobs[i]]


__all__ = ["ModelRunner", "PendingStep", "allocate_kv_cache"]
