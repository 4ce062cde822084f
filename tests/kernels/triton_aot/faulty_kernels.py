"""Kernels that the ahead-of-time check must refuse, and one that it must not."""

from __future__ import annotations

import triton
import triton.language as tl

from ropeway_kernels.aot import Variant


@triton.jit
def double(x, out, size, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < size) * 2, mask=offsets < size)


@triton.jit
def hold_too_much(x, out, TILE: tl.constexpr):
    """One warp holds the whole tile from the first load to the last store: far more than a thread has registers."""
    offsets = tl.arange(0, TILE)
    held = tl.load(x + offsets)
    total = tl.sum(held, axis=0)
    tl.debug_barrier()
    again = tl.load(x + TILE + offsets) * total
    tl.store(out + offsets, held * tl.sum(again, axis=0) + again)


@triton.jit
def multiply(a, b, out, steps, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """As many stages of two large tiles as the launch options ask for."""
    rows, depth = tl.arange(0, TILE), tl.arange(0, DEPTH)
    total = tl.zeros([TILE, TILE], tl.float32)
    for step in range(steps):
        left = tl.load(a + rows[:, None] * 65536 + step * DEPTH + depth[None, :])
        right = tl.load(b + (step * DEPTH + depth)[:, None] * 65536 + rows[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * TILE + rows[None, :], total)


@triton.jit
def add_pointers(x, out):
    tl.store(out, x + out)


def variants() -> list[Variant]:
    double_types = {"x": "*fp32", "out": "*fp32", "size": "i32", "TILE": "constexpr"}
    multiply_types = {"a": "*fp16", "b": "*fp16", "out": "*fp32", "steps": "i32"}
    return [
        Variant("sound", double, double_types, {"TILE": 1024}),
        Variant(
            "spills", hold_too_much, {"x": "*fp32", "out": "*fp32", "TILE": "constexpr"}, {"TILE": 16384}, num_warps=1
        ),
        Variant(
            "large",
            multiply,
            {**multiply_types, "TILE": "constexpr", "DEPTH": "constexpr"},
            {"TILE": 128, "DEPTH": 128},
            num_warps=8,
            num_stages=4,
        ),
        Variant("unknown argument", double, {**double_types, "y": "i32"}, {"TILE": 1024}),
        Variant("broken", add_pointers, {"x": "*fp32", "out": "*fp32"}, {}),
    ]
