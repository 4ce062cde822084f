"""How long a sequence may be, how many KV blocks there are, and what a step needs beside them.

Owns: the rules, and their error messages. Must not know: devices, tensors; it is given bytes.
Called by: worker.executor at start. Results are returned, never written into the configuration.
"""

from __future__ import annotations

import logging

from ropeway.config import CacheConfig
from ropeway.errors import ConfigError
from ropeway.model.registry import DecoderConfig

_RESERVE = 384 * 2**20  # bytes: workspaces of the product library, kernels as they are loaded, captured graphs

logger = logging.getLogger(__name__)


def resolve_max_model_len(asked: int, model_max: int) -> int:
    """asked: the flag's value, 0 or -1 for the model's own. Raises ConfigError above that."""
    if asked in (0, -1):
        return model_max
    if asked > model_max:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {model_max} positions of the model; give at most {model_max}"
        )
    return asked


def num_kv_blocks(cache: CacheConfig, *, block_bytes: int, budget: int, max_num_seqs: int, max_model_len: int) -> int:
    """Blocks in the pool, with the null block 0 that holds nothing.

    block_bytes: one block over all layers; budget: bytes the device grants. More than ``max_num_seqs`` sequences of
    ``max_model_len`` tokens could fill is never taken. Raises ConfigError if not even one usable block fits.
    """
    if cache.num_gpu_blocks_override:
        return cache.num_gpu_blocks_override + 1
    if cache.kv_cache_memory_bytes:
        blocks, source = cache.kv_cache_memory_bytes // block_bytes, "--kv-cache-memory-bytes"
    else:
        most = max_num_seqs * -(-max_model_len // cache.block_size) + 1
        blocks, source = min(max(budget, 0) // block_bytes, most), "the memory that is left after the weights"
    if blocks < 2:
        raise ConfigError(
            f"the KV cache needs at least two blocks of {block_bytes:,} bytes, and {source} does not hold them; give "
            "more memory (--gpu-memory-utilization, --kv-cache-memory-bytes) or a smaller --block-size"
        )
    return blocks


def activation_bytes(
    config: DecoderConfig, *, itemsize: int, step_tokens: int, max_num_seqs: int, captured_rows: int = 0
) -> int:
    """The most that a step allocates on a device, worked out from the model's shape instead of measured by a run.

    itemsize: bytes of an activation; captured_rows: the most rows of a step that is captured as a graph. Two moments can be the peak, and are not at the same time:

    * within a layer, for each of ``step_tokens``: the residual stream and the block's input and output, beside the
      wider of attention (q, k, v and its result) and MLP (gate and up, and their product); and the angles, in float32
    * at the head, for each of ``max_num_seqs`` rows: logits as the product leaves them and in float32, one more copy in
      float32 for log-probabilities or the random rows, and another for weights over the vocabulary while sampling

    The larger is multiplied by 1.25 for what the allocator cannot fit together. Captured steps have memory of their own,
    in which logits are by far the largest. A constant is added.
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widest = max(2 * q + 2 * kv, 3 * config.intermediate_size)
    angles = len(set(config.ropes)) * 3 * config.head_dim
    layer = step_tokens * ((3 * config.hidden_size + widest) * itemsize + angles * 4)
    head = max_num_seqs * config.vocab_size * (itemsize + 3 * 4)
    captured = captured_rows * config.vocab_size * (itemsize + 4)
    return int(1.25 * max(layer, head)) + captured + _RESERVE


def clip_to_pool(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """The longest sequence that the pool can hold; says so once when that is less than the model could."""
    capacity = (num_blocks - 1) * block_size
    if capacity < max_model_len:
        logger.warning(
            "max_model_len is %d instead of %d: the KV cache holds no more tokens (%d blocks of %d)",
            capacity,
            max_model_len,
            num_blocks - 1,
            block_size,
        )
    return min(max_model_len, capacity)
