"""How long a sequence may be and how many KV blocks there are.

Owns: the two rules, and their error messages. Must not know: devices, tensors; it is given bytes.
Called by: worker.executor at start. Results are returned, never written into the configuration.
"""

from __future__ import annotations

import logging

from ropeway.config import CacheConfig
from ropeway.errors import ConfigError

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
