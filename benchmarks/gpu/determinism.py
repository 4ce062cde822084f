"""Which changes of the batch change a row's bits, with attention's fixed spans and without, and what those cost.

Owns: the changes that are tried. Must not know: how the kernels keep their promise. Called by: check.py.

With fixed spans every change must leave every bit; without, it is told how many rows keep theirs. Whole models change
their bits anyway as long as matrix products choose their kernel by the number of rows; how often that shows in greedy
tokens is told too.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from attention_steps import Shape, Step, make_step, metadata
from harness import Context, Finding, Timer, holds
from torch import Tensor

LLAMA_8B = Shape(32, 8, 128)


@dataclass(frozen=True)
class Pick:
    """Queries ``begin`` to ``end`` of a sequence, which then has ``end`` positions."""

    sequence: int
    begin: int
    end: int


@dataclass
class Sequences:
    """Dense q, k and v of some sequences, from which any step can be put together."""

    shape: Shape
    q: list[Tensor]  # [length, num_heads, head_dim]
    kv: list[Tensor]  # [2, num_kv_heads, length, head_dim]

    @classmethod
    def draw(cls, context: Context, shape: Shape, lengths: list[int]) -> Sequences:
        q = [context.normal(n, shape.num_heads, shape.head_dim, dtype=shape.dtype, salt=2 * n) for n in lengths]
        kv = [
            context.normal(2, shape.num_kv_heads, n, shape.head_dim, dtype=shape.cache, salt=2 * n + 1) for n in lengths
        ]
        return cls(shape, q, kv)

    def attend(self, context: Context, picks: list[Pick], *, fixed_spans: bool, salt: int = 0) -> list[Tensor]:
        """One step of these rows, over blocks shuffled by ``salt``; each row's ``[queries, num_heads, head_dim]``."""
        size = self.shape.block_size
        counts = [-(-pick.end // size) for pick in picks]
        order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(salt))
        table = torch.zeros(len(picks), max(counts), dtype=torch.int32)
        empty = (1 + sum(counts), 2, self.shape.num_kv_heads, size, self.shape.head_dim)
        layer = torch.zeros(empty, dtype=self.shape.cache, device=context.device)
        begin = 0
        for row, (pick, count) in enumerate(zip(picks, counts, strict=True)):
            blocks = order[begin : begin + count]
            table[row, :count] = blocks.int()
            begin += count
            padded = torch.zeros(
                (2, self.shape.num_kv_heads, count * size, self.shape.head_dim), dtype=layer.dtype, device=layer.device
            )
            padded[:, :, : pick.end] = self.kv[pick.sequence][:, :, : pick.end]
            tiles = padded.view(2, self.shape.num_kv_heads, count, size, self.shape.head_dim).permute(2, 0, 1, 3, 4)
            layer[blocks.to(layer.device)] = tiles.contiguous()
        query_lens = [pick.end - pick.begin for pick in picks]
        seq_lens = [pick.end for pick in picks]
        q = torch.cat([self.q[pick.sequence][pick.begin : pick.end] for pick in picks])
        meta = metadata(table, query_lens, seq_lens, size, context.device)
        step = Step(self.shape, query_lens, seq_lens, q, layer, meta)
        out = step.attend(step.plan(fixed_spans=fixed_spans))
        return list(out.split(query_lens))


def run(context: Context) -> Iterator[Finding]:
    shape = Shape(4, 2, 64) if context.quick else LLAMA_8B
    lengths = [40, 70, 33] if context.quick else [5000, 1030, 700, 129, 2500, 64]
    chunk = 16 if context.quick else 192
    sequences = Sequences.draw(context, shape, lengths)
    last = [Pick(i, n - 1, n) for i, n in enumerate(lengths)]
    whole = [Pick(i, 0, n) for i, n in enumerate(lengths)]
    for fixed in (True, False):
        name = "fixed spans" if fixed else "equal shares"
        attend = functools.partial(sequences.attend, context, fixed_spans=fixed)
        together = attend(last)
        context.check_time()
        changes = {
            "decoding alone": [attend([pick])[0] for pick in last],
            "in another order": attend(last[::-1])[::-1],
            "among more rows": attend([*last, *last, *last], salt=1)[: len(last)],
            "over other blocks": attend(last, salt=2),
            "beside a prompt": attend([whole[0], *last])[1:],
            "as the end of a prompt": [rows[-1:] for rows in attend(whole)],
            "as the end of a chunk": [
                rows[-1:] for rows in attend([Pick(i, max(0, n - chunk), n) for i, n in enumerate(lengths)])
            ],
        }
        for change, rows in changes.items():
            same = [torch.equal(one, other) for one, other in zip(together, rows, strict=True)]
            if fixed:
                yield holds(f"{name}: {change}", all(same), note=f"{sum(same)} of {len(same)} rows")
            else:
                yield Finding(f"{name}: {change}", f"{sum(same)}/{len(same)}", "rows keep")
        context.check_time()
    if context.device.type == "cuda":
        yield from cost(context)
        yield from whole_model(context)


def cost(context: Context) -> Iterator[Finding]:
    timer = Timer(context)
    steps = {
        "decode 64x8192": ([1] * 64, [8192] * 64),
        "decode 1x131072 + 31x4096": ([1] * 32, [131072] + [4096] * 31),
        "decode 256x562": ([1] * 256, [562] * 256),
        "prefill 8192": ([8192], [8192]),
    }
    for name, (query_lens, seq_lens) in steps.items():
        step = make_step(context, LLAMA_8B, query_lens, seq_lens)
        times = [
            timer.median(functools.partial(step.attend, step.plan(fixed_spans=fixed)), repeats=10)
            for fixed in (True, False)
        ]
        yield Finding(f"cost of fixed spans: {name}", times[0] / times[1], "x as long")


def whole_model(context: Context) -> Iterator[Finding]:
    """Greedy tokens of a small bf16 model: each prompt alone, against all together."""
    from engine_runs import TINY_MODELS, Engine, Job, agreement

    source = random.Random(context.seed)
    jobs = [Job([source.randrange(1000) for _ in range(20 + 13 * i)], 40) for i in range(16)]
    flags = {"num_gpu_blocks_override": 400, "max_num_seqs": 16, "enable_prefix_caching": False}
    with Engine(TINY_MODELS["qwen3"], context, dtype="bfloat16", **flags) as engine:
        together = engine.run(jobs)
        alone = [engine.run([job])[0] for job in jobs]
    yield Finding("whole bf16 model, alone = together", agreement(alone, together), "of tokens")
