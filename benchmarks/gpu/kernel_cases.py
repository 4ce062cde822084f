"""Every kernel against float64 on fresh random inputs, outputs poisoned first.

Owns: the list of cases and their tolerances. Must not know: how fast anything is. Called by: check.py, which deals the
cases out to several processes.

A result is rounded once from float32, so a row's relative error is about u / sqrt(3) of its type, u being half the
distance between neighbours over their size: 2^-9 for bf16, 2^-12 for fp16 (u of 2^-8 and 2^-11 counted as spacing), and
never above u. Float32 kernels differ from float64 by a few roundings of 2^-24 each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import references
import torch
from attention_steps import Shape, make_step
from harness import Context, Finding, at_least, at_most, holds, poisoned, raw, row_error
from torch import Tensor

TOLERANCE = {torch.bfloat16: 2**-8.5, torch.float16: 2**-11.5, torch.float32: 4e-6}
# Weights are rounded to q's type before they meet V, and then the result is: two roundings of that type.
ATTENTION_TOLERANCE = {torch.bfloat16: 2**-7.5, torch.float16: 2**-10.5, torch.float32: 2e-5}
FP8 = torch.float8_e4m3fn
FP8_TOLERANCE = 2**-4  # its unit roundoff: three bits after the leading one


def tolerance(context: Context, dtype: torch.dtype, table: dict[torch.dtype, float] = TOLERANCE) -> float:
    """Triton's interpreter cuts bf16 off instead of rounding it, which doubles what a rounding costs."""
    return table[dtype] * (2 if context.quick and dtype == torch.bfloat16 else 1)


@dataclass(frozen=True)
class Case:
    name: str
    check: Callable[[Context], Iterator[Finding]]


def run(context: Context, share: tuple[int, int] = (0, 1)) -> Iterator[Finding]:
    """share: (i, n) takes every n-th case from the i-th on."""
    for case in cases(context)[share[0] :: share[1]]:
        context.check_time()
        yield from case.check(context)
        context.synchronize()  # so that a fault in a kernel is told by the case that launched it


def cases(context: Context) -> list[Case]:
    makers = (attention_cases, static_cases, sampling_cases, rope_cases, norm_cases, gate_cases, copy_cases)
    return [case for make in makers for case in make(context)]


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8"}[dtype]


# --- attention ------------------------------------------------------------------------------------------------------

# (queries, length) of each row. Prompts, chunks, rows with a few queries, decoding rows, padding.
RAGGED = [
    *((1, length) for length in (1, 15, 16, 17, 127, 128, 129, 1000, 5003)),
    *((4, 900), (128, 1000), (1, 64), (1000, 1000), (0, 0), (33, 33), (3, 3), (1, 0)),
]
TINY_RAGGED = [(1, 17), (5, 5), (1, 0), (2, 40), (20, 33)]
OPTIONS = {"window": 100, "soft_cap": 20.0, "sinks": True}


def attention_cases(context: Context) -> list[Case]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    if context.quick:
        specs = [
            (Shape(4, 2, 64, bf16, bf16, 16), {}),
            (Shape(3, 1, 64, bf16, FP8, 16), {"window": 11, "soft_cap": 20.0, "sinks": True}),
            (Shape(4, 2, 64, bf16, bf16, 32), {"fixed_spans": True}),
        ]
    else:
        shapes = [
            Shape(32, 8, 128, bf16, bf16, 16),
            Shape(16, 8, 128, bf16, FP8, 16),
            Shape(9, 3, 64, fp16, fp16, 32),
            Shape(8, 8, 64, bf16, bf16, 64),
            Shape(8, 1, 256, bf16, bf16, 128),
            Shape(14, 2, 80, bf16, bf16, 16),
            Shape(4, 4, 96, fp16, FP8, 8),
            Shape(4, 2, 64, fp32, fp32, 16),
        ]
        specs = [(shape, options) for shape in shapes for options in ({}, OPTIONS)]
        specs += [(shape, {"fixed_spans": True, **options}) for shape in shapes[:2] for options in ({}, OPTIONS)]
        specs += [(shapes[0], {"window": 1}), (shapes[0], {"window": 4096}), (shapes[3], {"soft_cap": 30.0})]
    return [
        Case(attention_name(shape, options), functools.partial(check_attention, shape=shape, options=options))
        for shape, options in specs
    ]


def attention_name(shape: Shape, options: dict[str, object]) -> str:
    kind = f"{name_of(shape.dtype)} on {name_of(shape.cache)}, blocks of {shape.block_size}"
    given = "".join(f", {name}" if value is True else f", {name} {value}" for name, value in options.items())
    return f"attention {shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim} {kind}{given}"


def check_attention(context: Context, shape: Shape, options: dict[str, Any]) -> Iterator[Finding]:
    rows = TINY_RAGGED if context.quick else RAGGED
    step = make_step(context, shape, [count for count, _ in rows], [length for _, length in rows])
    window, soft_cap = options.get("window"), options.get("soft_cap")
    sinks = context.normal(shape.num_heads, dtype=torch.float32, salt=9) if options.get("sinks") else None
    plan = step.plan(window=window, fixed_spans=options.get("fixed_spans", False))
    out = poisoned(*step.q.shape, dtype=shape.dtype, device=context.device)
    step.attend(plan, window=window, soft_cap=soft_cap, sinks=sinks, out=out)
    expected = references.attention(
        step.q,
        step.kv_layer,
        step.query_lens,
        step.seq_lens,
        step.meta.block_table,
        scale=shape.head_dim**-0.5,
        sliding_window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    yield at_most(
        attention_name(shape, options), row_error(out, expected), tolerance(context, shape.dtype, ATTENTION_TOLERANCE)
    )


def static_cases(context: Context) -> list[Case]:
    return [Case("attention, static split", check_static_split)]


def check_static_split(context: Context) -> Iterator[Finding]:
    """What the skewed benchmark compares with must be right too."""
    from attention_speed import static_split

    shape = Shape(4, 2, 64)
    lengths = [70, 1, 133] if context.quick else [70, 1, 133, 9000]
    step = make_step(context, shape, [1] * len(lengths), lengths)
    table, scale = step.meta.block_table, shape.head_dim**-0.5
    expected = references.attention(step.q, step.kv_layer, step.query_lens, lengths, table, scale=scale)
    for splits in (1, 3):
        out = poisoned(*step.q.shape, dtype=shape.dtype, device=context.device)
        step.attend(static_split(step.plan(), step, splits), out=out)
        name = f"attention, static split by {splits}"
        yield at_most(name, row_error(out, expected), tolerance(context, shape.dtype, ATTENTION_TOLERANCE))


# --- sampling -------------------------------------------------------------------------------------------------------


def sampling_cases(context: Context) -> list[Case]:
    shapes = [(4, 5000)] if context.quick else [(64, 151936), (17, 32001), (256, 49152)]
    return [
        Case(f"sampling {rows}x{vocab}", functools.partial(check_sampling, rows=rows, vocab=vocab))
        for rows, vocab in shapes
    ]


def check_sampling(context: Context, rows: int, vocab: int) -> Iterator[Finding]:
    from ropeway.worker.sampler import exponential_noise
    from ropeway_kernels import sampling

    name = f"{rows}x{vocab}"
    device = context.device
    logits = context.normal(rows, vocab, dtype=torch.float32, scale=3.0)
    best, tokens = sampling.draw(logits.clone())
    yield holds(f"greedy {name}", torch.equal(tokens, logits.argmax(-1)) and torch.equal(best, logits.amax(-1)))

    def uniform(low: float, high: float, salt: int) -> Tensor:
        return torch.rand(rows, 1, generator=context.generator(salt), device=device) * (high - low) + low

    line = torch.arange(rows, device=device)
    keys = torch.randint(-(2**31), 2**31, (rows, 2), generator=context.generator(5), device=device).int()
    temperature = uniform(0.3, 1.5, 6)
    top_k = torch.randint(1, 300, (rows, 1), generator=context.generator(7), device=device)
    top_k[::3] = vocab
    top_p, min_p = uniform(0.5, 1.0, 8), uniform(0.0, 0.05, 9)
    top_p[1::4], min_p[::2] = 1.0, 0.0
    noise = exponential_noise(torch.arange(vocab, device=device).int(), keys)
    random = {"rows": line, "temperature": temperature, "noise_keys": keys}
    _, tokens = sampling.draw(logits.clone(), **random)
    whole = references.sampled(
        logits, noise, temperature, torch.full_like(top_k, vocab), torch.ones_like(top_p), torch.zeros_like(min_p)
    )
    # One roundoff apart two tokens may change places; that is rarer than one row in a thousand.
    yield at_least(f"temperature {name}: same token", float((tokens == whole).double().mean()), 0.98)
    _, tokens = sampling.draw(logits.clone(), **random, filtered=line, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = references.sampled(logits, noise, temperature, top_k, top_p, min_p)
    yield at_least(f"top_k, top_p, min_p {name}: same token", float((tokens == kept).double().mean()), 0.98)

    counts = torch.randint(-20, 4, (rows, vocab), generator=context.generator(10), device=device).clamp_min(0).int()
    prompt = torch.rand(rows, vocab, generator=context.generator(11), device=device) < 0.1
    order = torch.randperm(rows, generator=context.generator(12), device=device)
    penalties = {"presence": uniform(-1, 1, 13), "frequency": uniform(-1, 1, 14), "repetition": uniform(0.5, 2, 15)}
    changed = logits.clone()
    half = line[: rows // 2 or 1]
    some = {name: values[half] for name, values in penalties.items()}
    sampling.penalise(changed, half, order[half], output_counts=counts, in_prompt=prompt, **some)
    expected = references.penalised(logits[half], counts[order[half]], prompt[order[half]], **some)
    yield at_most(f"penalties {name}", row_error(changed[half], expected), 1e-6)
    others = line[len(half) :]
    yield holds(f"penalties {name}: other rows stay", torch.equal(changed[others], logits[others]))

    chosen, ranks, top_ids, top = sampling.logprobs(logits, tokens, 20)
    wide = logits.double().log_softmax(-1)
    picked = wide.gather(1, tokens[:, None])
    yield at_most(f"log-probabilities {name}", float((chosen - picked.flatten()).abs().max()), 5e-5)
    yield holds(f"ranks {name}", torch.equal(ranks, (logits > logits.gather(1, tokens[:, None])).sum(-1) + 1))
    values, ids = wide.topk(20)
    # float32 normal numbers repeat: of equals either may come first.
    yield holds(f"best tokens {name}", torch.equal(logits.gather(1, top_ids), logits.gather(1, ids)))
    yield at_most(f"best log-probabilities {name}", float((top - values).abs().max()), 5e-5)


# --- norm and gate --------------------------------------------------------------------------------------------------


def norm_cases(context: Context) -> list[Case]:
    shapes = [(3, 65), (1, 1024)] if context.quick else [(1, 64), (7, 1024), (257, 4096), (2048, 5120), (3, 12289)]
    return [
        Case(
            f"rms_norm {rows}x{size} {name_of(dtype)}", functools.partial(check_norm, rows=rows, size=size, dtype=dtype)
        )
        for rows, size in shapes
        for dtype in ((torch.float16,) if context.quick else TOLERANCE)
    ]


def check_norm(context: Context, rows: int, size: int, dtype: torch.dtype) -> Iterator[Finding]:
    from ropeway_kernels.norm import rms_norm

    name = f"rms_norm {rows}x{size} {name_of(dtype)}"
    x = context.normal(rows, size, dtype=dtype, scale=3.0)
    weight = context.normal(size, dtype=torch.float32, salt=1)
    out = rms_norm(x, weight, 1e-6)
    yield at_most(name, row_error(out, references.rms_norm(x, weight, 1e-6)), tolerance(context, dtype))
    residual = context.normal(rows, size, dtype=dtype, salt=2)
    total = (residual.float() + x.float()).to(dtype)
    out = rms_norm(x, weight, 1e-6, residual)
    yield holds(f"{name}, residual holds the sum", torch.equal(residual, total))
    yield at_most(
        f"{name}, with residual", row_error(out, references.rms_norm(total, weight, 1e-6)), tolerance(context, dtype)
    )


def gate_cases(context: Context) -> list[Case]:
    shapes = [(3, 65)] if context.quick else [(1, 96), (257, 3072), (1024, 14336), (5, 8191)]
    return [
        Case(
            f"gated {kind} {rows}x{size} {name_of(dtype)}",
            functools.partial(check_gate, rows=rows, size=size, dtype=dtype, kind=kind),
        )
        for rows, size in shapes
        for dtype in ((torch.float16,) if context.quick else TOLERANCE)
        for kind in references.GATES
    ]


def check_gate(context: Context, rows: int, size: int, dtype: torch.dtype, kind: str) -> Iterator[Finding]:
    from ropeway_kernels.activation import gated

    x = context.normal(rows, 2 * size, dtype=dtype, scale=2.0)
    error = row_error(gated(x, kind), references.gated(x, kind))
    yield at_most(f"gated {kind} {rows}x{size} {name_of(dtype)}", error, tolerance(context, dtype))


# --- KV write -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeCase:
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # 0: no rotation
    norms: bool
    block_size: int
    dtype: torch.dtype
    cache: torch.dtype

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"
        what = f"rotary {self.rotary_dim}{', norms' if self.norms else ''}, blocks of {self.block_size}"
        return f"rope_kv_write {heads} {what}, {name_of(self.dtype)} to {name_of(self.cache)}"


def rope_cases(context: Context) -> list[Case]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    if context.quick:
        specs = [RopeCase(5, 4, 2, 64, 32, True, 16, bf16, bf16), RopeCase(3, 2, 1, 64, 64, False, 16, bf16, FP8)]
    else:
        specs = [
            RopeCase(1, 16, 8, 128, 128, True, 16, bf16, bf16),
            RopeCase(513, 32, 8, 128, 128, False, 32, bf16, bf16),
            RopeCase(127, 9, 3, 64, 64, False, 64, fp16, fp16),
            RopeCase(129, 8, 4, 256, 256, True, 128, bf16, bf16),
            RopeCase(77, 32, 32, 96, 48, False, 16, bf16, bf16),
            RopeCase(200, 6, 6, 80, 32, False, 8, fp32, fp32),
            RopeCase(65, 16, 8, 128, 128, True, 16, bf16, FP8),
            RopeCase(33, 4, 4, 64, 0, False, 16, fp16, FP8),
        ]
    return [Case(spec.name, functools.partial(check_rope, spec=spec)) for spec in specs]


def check_rope(context: Context, spec: RopeCase) -> Iterator[Finding]:
    from ropeway_kernels.kv_write import rope_kv_write

    count, heads, kv_heads = spec.num_tokens, spec.num_heads, spec.num_kv_heads
    rows = context.normal(count, heads + 2 * kv_heads, spec.head_dim, dtype=spec.dtype)
    before = rows.clone()
    q, k, v = before.double().split([heads, kv_heads, kv_heads], dim=1)
    options: dict[str, object] = {}
    if spec.norms:
        q_norm = context.normal(spec.head_dim, dtype=torch.float32, salt=1)
        k_norm = context.normal(spec.head_dim, dtype=torch.float32, salt=2)
        q, k = references.rms_norm(q, q_norm, 1e-6), references.rms_norm(k, k_norm, 1e-6)
        options |= {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
    if spec.rotary_dim:
        angle = context.normal(count, 1, spec.rotary_dim // 2, dtype=torch.float32, salt=3, scale=10.0)
        cos, sin = angle.cos(), angle.sin()
        q, k = references.rotate(q, cos, sin), references.rotate(k, cos, sin)
        options |= {"cos": cos, "sin": sin}

    # One layer of three, as the cache lies in memory; every byte of it set to a pattern that no result has.
    blocks = -(-2 * count // spec.block_size) + 1
    shape = (blocks, 3, 2, kv_heads, spec.block_size, spec.head_dim)
    cache = torch.full((torch.Size(shape).numel() * spec.cache.itemsize,), 0x7F, dtype=torch.uint8, device=rows.device)
    cache = cache.view(spec.cache).view(shape)
    untouched = cache.view(torch.uint8).clone()
    slots = torch.randperm(blocks * spec.block_size, generator=context.generator(4), device=rows.device)[:count]
    slots[::7] = -1  # padding rows of a graph
    rope_kv_write(rows, cache[:, 1], slots, num_heads=heads, **options)

    written = slots >= 0
    yield at_most(f"{spec.name}: q", row_error(rows[written][:, :heads], q[written]), tolerance(context, spec.dtype))
    rows[written, :heads] = before[written, :heads]
    yield holds(f"{spec.name}: k, v and padding stay in the input", torch.equal(rows, before))
    block, offset = slots[written] // spec.block_size, slots[written] % spec.block_size
    kept = raw(cache)[block, 1, :, :, offset].view(spec.cache).float()  # [written, 2, num_kv_heads, head_dim]
    limit = FP8_TOLERANCE if spec.cache == FP8 else tolerance(context, spec.dtype)
    if written.any():
        yield at_most(f"{spec.name}: k", row_error(kept[:, 0], k[written]), limit)
        exact = v[written].float().to(spec.cache).float()
        yield holds(f"{spec.name}: v", torch.equal(kept[:, 1], exact))
    # Put the pattern back where something had to be written: then nothing may differ from before.
    cache.view(torch.uint8)[block, 1, :, :, offset] = 0x7F
    yield holds(f"{spec.name}: nothing else", torch.equal(cache.view(torch.uint8), untouched))


# --- block copy -----------------------------------------------------------------------------------------------------


def copy_cases(context: Context) -> list[Case]:
    sizes = [(9, 4096)] if context.quick else [(65, 3 * 2**18), (17, 48)]  # blocks and bytes of each
    places = ["device to device"] if context.quick else ["device to device", "device to host", "host to device"]
    return [
        Case(f"copy_blocks {place}", functools.partial(check_copy, count=count, size=size, place=place))
        for count, size in sizes
        for place in places
    ]


def check_copy(context: Context, count: int, size: int, place: str) -> Iterator[Finding]:
    from ropeway_kernels.block_copy import copy_blocks

    def memory(where: str, fill: Tensor) -> Tensor:
        return fill if where == "device" else fill.cpu().pin_memory()

    begin, _, end = place.partition(" to ")
    numbers = torch.randint(256, (count, size), generator=context.generator(), device=context.device).to(torch.uint8)
    source = memory(begin, numbers)
    target = memory(end, poisoned(count, size, dtype=torch.int8, device=context.device).view(torch.uint8))
    expected = target.clone()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(context.seed))
    pairs = torch.stack([order, order.roll(1)], dim=1)[: count - 2]
    expected[pairs[:, 1].to(expected.device)] = source[pairs[:, 0].to(source.device)].to(expected.device)
    copy_blocks(source, target, pairs.to(context.device))
    context.synchronize()
    yield holds(f"copy_blocks {count} of {size} bytes, {place}", torch.equal(target.cpu(), expected.cpu()))
