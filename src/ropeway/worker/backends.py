"""Which attention backend runs, and in which type it keeps keys and values.

Owns: the meaning of --attention-backend and --kv-cache-dtype on each device, and every refusal. Must not know: how a
backend works. Called by: worker.executor at start.
"""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from ropeway.attention.base import AttentionBackend
from ropeway.attention.cpu import CpuAttention
from ropeway.attention.torch_ref import TorchAttention
from ropeway.errors import ConfigError
from ropeway.model.registry import DecoderConfig
from ropeway.worker.device import Device

logger = logging.getLogger(__name__)

TRITON_BLOCKS = (8, 16, 32, 64, 128)  # tokens per KV block


def choose_backend(wanted: str, device: Device, block_size: int, head_dim: int) -> str:
    """The name of the one that runs. wanted: the flag's value; ``auto`` takes the fastest that can do this, and says so
    when that is plain torch on a GPU. Raises ConfigError if ``wanted`` names one that cannot."""
    on_cpu = device.torch_device.type == "cpu"
    lacks_cpu = _cpu_lacks(device, block_size, head_dim)
    if wanted == "auto" and on_cpu:
        return "torch" if lacks_cpu else "cpu"
    if wanted == "auto":
        why_not = _triton_lacks(device, block_size, head_dim)
        if why_not is not None:
            logger.warning("No Triton attention (%s): plain torch computes it, much slower.", why_not)
        return "triton" if why_not is None else "torch"
    why_not = None
    if wanted == "cpu":
        why_not = lacks_cpu
    elif wanted == "triton":
        why_not = _triton_lacks(device, block_size, head_dim)
    elif wanted in ("flash-attn", "flashinfer"):
        why_not = "needs a GPU; on a CPU give cpu, torch or auto" if on_cpu else None
    if why_not is not None:
        raise ConfigError(f"--attention-backend {wanted}: {why_not}")
    return wanted


def choose_kv_dtype(wanted: str, dtype: torch.dtype, device: Device, backend: str) -> torch.dtype:
    """wanted: the flag's value; dtype: of the model; backend: as chosen. Raises ConfigError for 8-bit floats where nothing
    reads them."""
    if wanted == "auto":
        return dtype
    if backend != "triton":
        if device.torch_device.type == "cpu":
            raise ConfigError(
                f"--kv-cache-dtype {wanted}: needs a GPU; on a CPU give auto, which is the model's own type"
            )
        raise ConfigError(f"--kv-cache-dtype {wanted}: the attention backend {backend} does not read it; give triton")
    return torch.float8_e4m3fn


def make_backend(
    name: str, device: Device, block_size: int, config: DecoderConfig, kv_dtype: torch.dtype, max_model_len: int
) -> AttentionBackend:
    """name: as chosen; config: of a model that is not split; max_model_len: no sequence is longer. Raises ConfigError if a
    library is not there."""
    if name == "cpu":
        assert device.native is not None
        return CpuAttention(device.native, block_size)
    if name == "triton":
        from ropeway.attention.triton import TritonAttention

        return TritonAttention(
            block_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            sliding_windows=config.sliding_windows,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
        )
    if name == "flash-attn":
        from ropeway.attention.flash_attn import FlashAttention

        return FlashAttention(block_size, kv_dtype)
    if name == "flashinfer":
        from ropeway.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(
            block_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=kv_dtype,
            device=device.torch_device,
        )
    return TorchAttention(block_size)


def _cpu_lacks(device: Device, block_size: int, head_dim: int) -> str | None:
    if device.torch_device.type != "cpu":
        return "the model runs on a GPU; give triton or auto, or --device cpu"
    if device.native is None or not CpuAttention.supports(device.native, block_size, head_dim):
        return f"there are no native kernels here for blocks of {block_size} tokens and heads of {head_dim} dimensions"
    return None


def _triton_lacks(device: Device, block_size: int, head_dim: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'ropeway[gpu]')"
    # Its interpreter runs kernels on a CPU, a thousand times slower: for tests.
    if device.torch_device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a GPU; on a CPU give cpu, torch or auto"
    if block_size not in TRITON_BLOCKS:
        return f"--block-size {block_size} is not one of {', '.join(map(str, TRITON_BLOCKS))}"
    from ropeway.attention.triton import TritonAttention

    if not TritonAttention.supports(block_size, head_dim):
        return f"its kernels do not do heads of {head_dim} dimensions"
    return None


__all__ = ["choose_backend", "choose_kv_dtype", "make_backend"]
