"""What the kernels should have computed, in float64 on whatever device the inputs are on.

Owns: vectorised twins of ropeway_kernels.reference, which goes token by token and would take minutes at these sizes.
Must not know: kernels, plans. Called by: the correctness sections of check.py. The CPU run of check.py compares the
attention here with the slow one, so that both say the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import raw
from torch import Tensor

GATES = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x ``[..., size]``, weight ``[size]``."""
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def gated(x: Tensor, kind: str) -> Tensor:
    first, second = x.double().chunk(2, dim=-1)
    return GATES[kind](first) * second


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x ``[num_tokens, num_heads, head_dim]``; cos and sin ``[num_tokens, 1, rotary_dim / 2]``."""
    half = cos.shape[-1]
    wide, cos, sin = x.double(), cos.double(), sin.double()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attention(
    q: Tensor,
    kv_layer: Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    block_table: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Paged causal attention as ropeway_kernels.reference.paged_attention, in float64.

    q ``[num_tokens, num_heads, head_dim]``; kv_layer ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``;
    block_table ``[num_reqs, max_blocks]``; sinks ``[num_heads]``: one more logit per head, whose value is nothing. Rows
    of length 0 are padding and their output is zeros.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_layer.shape[2:4]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    begin = 0
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if count == 0 or length == 0:
            begin += count
            continue
        blocks = block_table[row, : -(-length // block_size)].long()
        kv = raw(kv_layer)[blocks].view(kv_layer.dtype).double()  # [blocks, 2, kv heads, block_size, head_dim]
        kv = kv.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :length]
        query = q[begin : begin + count].double().view(count, num_kv_heads, num_heads // num_kv_heads, head_dim)
        logits = torch.einsum("tkgd,kld->kgtl", query, kv[0]) * scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        position = torch.arange(length - count, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)[None]
        hidden = key > position
        if sliding_window is not None:
            hidden |= key <= position - sliding_window
        logits = logits.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            extra = sinks.double().view(num_kv_heads, -1, 1, 1).expand(-1, -1, count, 1)
            weights = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        out[begin : begin + count] = torch.einsum("kgtl,kld->tkgd", weights, kv[1]).reshape(count, num_heads, head_dim)
        begin += count
    return out


def sampled(logits: Tensor, noise: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Tokens ``[n]`` of the race that worker.sampler describes, with its filters: equal scores stay or go together.

    logits and noise ``[n, vocab]``; temperature, top_k (the vocabulary size for no bound), top_p and min_p ``[n, 1]``.
    """
    wide = logits.double()
    scores = (wide - wide.max(-1, keepdim=True).values) / temperature.double()
    falling = scores.sort(-1, descending=True).values
    weights = falling.exp()
    rank = torch.arange(logits.shape[1], device=logits.device)
    weights = torch.where(rank < top_k, weights, 0.0)
    before = weights.cumsum(-1) - weights
    nucleus = (before < top_p.double() * weights.sum(-1, keepdim=True)) | (top_p >= 1)
    keep = (rank < top_k) & nucleus & (weights >= min_p.double())
    last = keep.sum(-1, keepdim=True).clamp_min(1) - 1
    stays = scores >= falling.gather(1, last)
    return torch.where(stays, scores.exp() / noise.double(), -1.0).argmax(-1)


def penalised(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """logits, counts and in_prompt ``[n, vocab]``; the penalties ``[n, 1]``."""
    x, repetition = logits.double(), repetition.double()
    generated = counts > 0
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(generated | in_prompt, repeated, x)
    return x - frequency.double() * counts - presence.double() * generated
