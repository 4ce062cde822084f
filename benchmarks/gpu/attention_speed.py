"""How fast attention is, against what a copy and a matrix product reach on the same device, and beside other libraries.

Owns: the shapes and their bars. Must not know: whether results are right. Called by: check.py.

Decode counts the bytes of K and V, each read once, over the time; prefill the operations that the causal mask leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attention_steps import Shape, Step, make_step
from harness import Context, Finding, OutOfTimeError, Timer, at_least, copy_bandwidth, gemm_peak

from ropeway_kernels.attention_plan import AttentionPlan

LLAMA_8B = Shape(32, 8, 128)
QWEN3_06B = Shape(16, 8, 128)
FP8 = torch.float8_e4m3fn


def limits(context: Context) -> Iterator[Finding]:
    timer = Timer(context)
    context.facts["bandwidth"] = copy_bandwidth(timer, context.device)
    yield Finding("copy bandwidth, read plus written", context.facts["bandwidth"] / 1e12, "TB/s")
    context.facts["gemm"] = gemm_peak(timer, context.device)
    yield Finding("bf16 product of 8,192", context.facts["gemm"] / 1e12, "TFLOP/s")


def measured_limits(context: Context) -> tuple[float, float]:
    """Bytes and operations per second; measured now if that section has not run."""
    if "bandwidth" not in context.facts or "gemm" not in context.facts:
        for _ in limits(context):
            pass
    return context.facts["bandwidth"], context.facts["gemm"]


def attention(context: Context) -> Iterator[Finding]:
    bandwidth, peak = measured_limits(context)
    timer = Timer(context)
    yield from decode(context, timer, bandwidth)
    yield from prefill(context, timer, peak)


# --- decode ---------------------------------------------------------------------------------------------------------


def decode(context: Context, timer: Timer, bandwidth: float) -> Iterator[Finding]:
    fp8 = dataclasses.replace(LLAMA_8B, cache=FP8)
    uniform = {
        "decode 64x8192, 32/8x128": (LLAMA_8B, 64, 8192, 0.88),
        "decode 8x32768, 32/8x128": (LLAMA_8B, 8, 32768, None),
        "decode 256x562, 16/8x128": (QWEN3_06B, 256, 562, None),
        "decode 64x8192, 32/8x128, fp8": (fp8, 64, 8192, None),
        "decode 1x8192, 32/8x128": (LLAMA_8B, 1, 8192, None),
    }
    for name, (shape, rows, length, bar) in uniform.items():
        step = make_step(context, shape, [1] * rows, [length] * rows)
        plan = step.plan()
        out = torch.empty_like(step.q)
        seconds = timer.median(functools.partial(step.attend, plan, out=out))
        share = step.kv_bytes / seconds / bandwidth
        note = f"{seconds * 1e6:.0f} us"
        if bar is None:
            yield Finding(name, share, "of copy", note=note)
        else:
            yield at_least(name, share, bar, "of copy", note)
        for library, other in dense_decode(step):
            their = timer.median(other, repeats=10)
            yield Finding(f"{name}: {library}", their / seconds, "x as long", note=f"{their * 1e6:.0f} us")
        del step, plan, out

    step = make_step(context, LLAMA_8B, [1] * 32, [131072] + [4096] * 31)
    plan = step.plan()
    seconds = timer.median(functools.partial(step.attend, plan))
    share = step.kv_bytes / seconds / bandwidth
    yield Finding("decode 1x131072 + 31x4096", share, "of copy", note=f"{seconds * 1e6:.0f} us")
    static: dict[int, float] = {}
    usual = usual_splits(32 * LLAMA_8B.num_kv_heads, plan.num_programs)
    for splits in sorted({usual, 1, 2, 4, 8, 16, 32, 64}):
        split = static_split(plan, step, splits)
        static[splits] = timer.median(functools.partial(step.attend, split), repeats=10)
    yield at_least(
        "skewed: equal shares against a static split", static[usual] / seconds, 1.5, "x faster", f"split by {usual}"
    )
    best = min(static, key=lambda splits: static[splits])
    yield Finding("skewed: against the best static split", static[best] / seconds, "x faster", note=f"split by {best}")


def usual_splits(items: int, programs: int) -> int:
    """What a static split-KV takes: the fewest splits that give every program something to do, lengths unseen."""
    return max(1, -(-programs // items))


def static_split(plan: AttentionPlan, step: Step, splits: int) -> AttentionPlan:
    """The same kernels with every row and KV head cut into so many equal parts, one program each, whatever its length."""
    units = [-(-length // plan.decode.tile_n) for length in step.seq_lens]
    heads = step.shape.num_kv_heads
    before = np.concatenate([[0], np.cumsum(units)])
    programs, merges, slot = [], [], 0
    for row, count in enumerate(units):
        size = -(-count // splits)
        begins = list(range(0, count, size))
        for head in range(heads):
            for begin in begins:
                programs.append([row, head, begin, min(size, count - begin), slot, slot])
                slot += 1
            if len(begins) > 1:
                merges.append([row, head, slot - len(begins), len(begins)])
    merges += [[0] * 4] * (len(programs) - len(merges))
    arrays = [np.arange(len(units)), before, np.ravel(programs), np.ravel(merges)]
    buffer = torch.from_numpy(np.concatenate(arrays).astype(np.int32)).to(plan.buffer.device)
    return dataclasses.replace(plan, num_programs=len(programs), num_slots=slot, buffer=buffer)


def dense_decode(step: Step) -> Iterator[tuple[str, Callable[[], object]]]:
    """The same work for libraries that want one dense cache: rows of one length, K and V in q's type."""
    shape, rows, length = step.shape, len(step.seq_lens), step.seq_lens[0]
    if shape.cache != shape.dtype:
        return
    size = (rows, shape.num_kv_heads, length, shape.head_dim)
    k, v = (torch.randn(size, device=step.q.device, dtype=shape.dtype) for _ in range(2))
    q = step.q.view(rows, shape.num_heads, 1, shape.head_dim)
    yield "torch SDPA", functools.partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    if (flash := flash_attention()) is not None:
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
        yield "FlashAttention", functools.partial(flash, q, k, v, causal=True)


# --- prefill --------------------------------------------------------------------------------------------------------


def prefill(context: Context, timer: Timer, peak: float) -> Iterator[Finding]:
    cases = {
        "prefill 8192, 32/8x128": (LLAMA_8B, [8192], [8192], 0.60),
        "prefill 2048 of 8192, 32/8x128": (LLAMA_8B, [2048], [8192], None),
        "prefill 16x512, 32/8x128": (LLAMA_8B, [512] * 16, [512] * 16, None),
        "prefill 8192, 16/8x128": (QWEN3_06B, [8192], [8192], None),
        "prefill 8192, 16/8x64": (Shape(16, 8, 64), [8192], [8192], None),
    }
    for name, (shape, query_lens, seq_lens, bar) in cases.items():
        step = make_step(context, shape, query_lens, seq_lens)
        plan = step.plan()
        out = torch.empty_like(step.q)
        seconds = timer.median(functools.partial(step.attend, plan, out=out))
        share = step.operations / seconds / peak
        note = f"{step.operations / seconds / 1e12:.0f} TFLOP/s"
        if bar is None:
            yield Finding(name, share, "of GEMM", note=note)
        else:
            yield at_least(name, share, bar, "of GEMM", note)
        if query_lens == seq_lens and len(query_lens) == 1:
            for library, other in dense_prefill(step):
                their = timer.median(other, repeats=10)
                note = f"{step.operations / their / 1e12:.0f} TFLOP/s"
                yield Finding(f"{name}: {library}", their / seconds, "x as long", note=note)


def dense_prefill(step: Step) -> Iterator[tuple[str, Callable[[], object]]]:
    shape, length = step.shape, step.seq_lens[0]
    q = torch.randn(1, shape.num_heads, length, shape.head_dim, device=step.q.device, dtype=shape.dtype)
    size = (1, shape.num_kv_heads, length, shape.head_dim)
    k, v = (torch.randn(size, device=step.q.device, dtype=shape.dtype) for _ in range(2))
    yield "torch SDPA", functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    if shape == LLAMA_8B:  # compiling it takes half a minute; once is enough
        try:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(q.device))
            compiled: Any = torch.compile(flex_attention)
            compiled(q, k, v, block_mask=mask, enable_gqa=True)
        except OutOfTimeError:
            raise
        except Exception as error:  # not ours: say so and go on
            print(f"flex_attention does not run here: {type(error).__name__}: {str(error)[:200]}")
        else:
            yield "flex_attention", functools.partial(compiled, q, k, v, block_mask=mask, enable_gqa=True)
    if (flash := flash_attention()) is not None:
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
        yield "FlashAttention", functools.partial(flash, q, k, v, causal=True)


def flash_attention() -> Any:
    """FlashAttention 3's or 2's function, if one is installed."""
    for name in ("flash_attn_interface", "flash_attn"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).flash_attn_func
    return None
