"""Executes plans: rows, batch, forward, sample.

Owns: the model, the KV cache's memory, the request rows. Must not know: scheduling, prefix caching, processes, text.
Called by: worker.executor, one plan at a time, in the order submitted.

A plan may be made before the result of the one before it is known (overlap). That is safe because a row reads its last
sampled token from the device, and because plans change the rows only here, in order. A row that runs once too often
(its request had ended) writes only to blocks and state of its own, and the engine drops its token by its epoch.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import torch
from torch import Tensor

from ropeway.attention.base import AttentionBackend, AttentionMetadata
from ropeway.engine.step import ModelRunnerOutput, SchedulerOutput
from ropeway.worker.batch import RequestRows
from ropeway.worker.device import Device
from ropeway.worker.sampler import sample
from ropeway_kernels.cpu import allocate


class Model(Protocol):
    """What the runner asks of a decoder; see ropeway.model.decoder.Decoder.forward."""

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_layers: list[Tensor],
        backend: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor,
    ) -> Tensor: ...


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
    ) -> None:
        """kv_cache: as allocate_kv_cache makes it."""
        self._model = model
        self._backend = backend
        self._device = device
        self._kv_layers = [kv_cache[:, layer] for layer in range(kv_cache.shape[1])]
        self.rows = RequestRows(max_num_seqs, max_model_len, block_size, vocab_size, device)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. A plan without rows only frees and fills."""
        began = time.perf_counter()
        self.rows.apply(plan)
        output = ModelRunnerOutput(plan.step_id, token_ids=[[] for _ in plan.request_ids])
        if plan.request_ids:
            self._step(plan, output)
        output.execute_seconds = time.perf_counter() - began
        return output

    def _step(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        batch = self.rows.gather(plan)
        meta = self._backend.prepare(batch.meta)
        logits = self._model(
            batch.input_ids, batch.positions, self._kv_layers, self._backend, meta, batch.logits_indices
        )
        if not batch.sampled:
            self._device.synchronize()  # so that the step's time is its own
            return
        result = sample(logits, batch.sampling, self._device.native)
        self.rows.commit(batch, result.token_ids)
        for i, (row, token) in enumerate(zip(batch.sampled, result.token_ids.tolist(), strict=True)):
            if i in result.errors:
                output.errors[row] = result.errors[i]
                continue
            output.token_ids[row] = [token]
            if i in result.logprobs:
                output.logprobs[row] = [result.logprobs[i]]


__all__ = ["ModelRunner", "allocate_kv_cache"]
