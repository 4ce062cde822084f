"""The Triton attention against the loops of `reference`, in the interpreter; and the plan of a step by itself.

Whatever must not be read holds NaN: blocks of nobody, the null block, the rest of a row's last block, and table entries
beyond a row's blocks point to one of these. Outputs hold NaN before they are written. numpy's warnings are errors here,
so a NaN that arises and is masked afterwards is found too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropeway_kernels import reference
from ropeway_kernels.attention_plan import AttentionPlan, plan_step
from ropeway_kernels.paged_attention import paged_attention
from ropeway_kernels.tuning import ARCHS, AttentionConfig, attention_config

FP8 = torch.float8_e4m3fn
# Of one step of q's type at 1.0: weights and outputs are rounded to it, and what is smaller adds up below that. The
# interpreter cuts bfloat16 off instead of rounding it (two times 2**-7); float16 is two times 2**-11, and a little for sums
# of a thousand weights; float32 is 1e-7 times the number of sums. The reference reads the same fp8 cache, whose values are
# exact in q's type: it needs no tolerance of its own.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LENGTHS = [1, 15, 16, 17, 127, 128, 129, 1000]
# (context, new tokens) per row: every length decoding, every length but the last as a prompt, chunks of longer prompts.
DECODING = [(length - 1, 1) for length in LENGTHS]
PROMPTS = [(0, length) for length in LENGTHS[:-1]]
CHUNKS = [(1000 - 40, 40), (129, 17), (3, 126), (300, 3)]
PADDING = (0, 0)  # a row of no tokens and no cache
MIXED = [CHUNKS[0], PADDING, *DECODING, *PROMPTS, PADDING, *CHUNKS[1:]]
SHORT = [(0, 37), (128, 1), (16, 1), (15, 2), PADDING, (100, 29), (0, 1)]  # of every kind, for long lists of options
SMALL = AttentionConfig(16, 32, 4, 2)  # tiles so small that short rows have many
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
nan = float("nan")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Batch:
    """One step of some rows, over a cache that holds NaN wherever none of them has written."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        block_size: int = 16,
        kv_heads: int = 1,
        group: int = 4,
        head_dim: int = 64,
    ) -> None:
        self.rows = list(rows)
        self.kv_heads, self.group, self.head_dim = kv_heads, group, head_dim
        counts = [-(-(context + new) // block_size) for context, new in rows]
        ids = (torch.randperm(sum(counts) + 3) + 1).tolist()  # 0 is the null block, three more are nobody's
        poisoned = ids.pop()
        # One layer of two, as in the runner: blocks do not lie side by side.
        shape = (len(ids) + 2, 2, 2, kv_heads, block_size, head_dim)
        self.cache = torch.full(shape, nan).to(kv_dtype or dtype)[:, 1]
        self.block_table = torch.full((len(rows), max(counts) + 2), poisoned, dtype=torch.int32)
        for row, ((context, new), count) in enumerate(zip(rows, counts, strict=True)):
            blocks, ids = torch.tensor(ids[:count], dtype=torch.int64), ids[count:]
            self.block_table[row, :count] = blocks
            positions = torch.arange(context + new)
            entries = torch.randn(2, kv_heads, context + new, head_dim).to(self.cache.dtype)
            for part in range(2):
                for head in range(kv_heads):
                    at = blocks[positions // block_size], positions % block_size
                    self.cache[:, part, head].view(torch.uint8)[at] = entries[part, head].view(torch.uint8)
        lengths = torch.tensor([0] + [new for _, new in rows])
        self.query_start_loc = lengths.cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor([context + new for context, new in rows], dtype=torch.int32)
        # As the fused projection leaves them: k and v heads follow the queries of a token.
        self.q = torch.randn(int(lengths.sum()), kv_heads * (group + 2), head_dim).to(dtype)[:, : kv_heads * group]

    def plan(self, windows: tuple[int | None, ...] = (None,), **options: object) -> AttentionPlan:
        return plan_step(
            np.array([new for _, new in self.rows]),
            self.seq_lens.numpy(),
            num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            sliding_windows=windows,
            **{"num_programs": 5, "dtype": self.cache.dtype, "arch": 90} | options,  # type: ignore[arg-type]
        )

    def run(self, plan: AttentionPlan, *, scale: float = 0.3, **options: object) -> Tensor:
        out = torch.full(self.q.shape, nan, dtype=self.q.dtype)
        arguments = self.q, self.cache, self.query_start_loc, self.seq_lens, self.block_table, plan
        result = paged_attention(*arguments, scale=scale, out=out, **options)  # type: ignore[arg-type]
        assert result is out
        return out

    def expected(self, *, scale: float = 0.3, **options: object) -> Tensor:
        return reference.paged_attention(
            self.q.double(),
            self.cache.double(),
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            scale=scale,
            **options,  # type: ignore[arg-type]
        )

    def check(self, plan: AttentionPlan | None = None, **options: object) -> None:
        window = options.get("sliding_window")
        actual = self.run(plan or self.plan((window,)), **options)  # type: ignore[arg-type]
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(actual.double(), self.expected(**options), atol=tolerance, rtol=tolerance)


def small(**options: object) -> dict[str, object]:
    return {"configs": (SMALL, SMALL)} | options


# --- parity ---


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_mixed_batch_of_every_length(dtype: torch.dtype):
    Batch(MIXED, dtype=dtype, kv_heads=2 if dtype == torch.bfloat16 else 1).check()


def test_a_long_prompt_beside_decoding_rows():
    Batch([(0, 1000), *DECODING], dtype=torch.bfloat16, block_size=32, group=1).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_fp8_cache(dtype: torch.dtype):
    Batch(SHORT, dtype=dtype, kv_dtype=FP8).check()
    Batch(DECODING[1:], dtype=dtype, kv_dtype=FP8, head_dim=128).check()


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_block_sizes(block_size: int):
    batch = Batch([*SHORT, (300, 1), (126, 3)], dtype=torch.bfloat16, block_size=block_size)
    batch.check(batch.plan(**small()))


@pytest.mark.parametrize(("group", "dtype"), [(1, FP32), (3, BF16), (4, FP16), (8, BF16), (20, FP32)])
def test_groups(group: int, dtype: torch.dtype):
    """A tile's rows are group x queries, where the group need not divide them."""
    rows = [*SHORT, (33, 16), (40, 17)] if group < 20 else [(0, 5), (40, 1)]
    Batch(rows, dtype=dtype, group=group, kv_heads=2).check()


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(8, FP32), (64, FP16), (80, FP32), (80, BF16), (96, FP32), (128, FP16), (256, BF16)]
)
def test_head_dims(head_dim: int, dtype: torch.dtype):
    Batch([(0, 37), (128, 1), (70, 2)], dtype=dtype, head_dim=head_dim, kv_heads=2, group=3).check(scale=head_dim**-0.5)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 100, 128, 1000])
def test_windows(window: int):
    batch = Batch([*SHORT, (150, 40)])
    batch.check(batch.plan((window,), **small()) if window % 2 else None, sliding_window=window)


def test_windows_of_two_kinds_share_a_plan():
    batch = Batch([*SHORT, (200, 1)])
    plan = batch.plan((None, 20, 70), **small())
    for window in (20, None, 70):
        batch.check(plan, sliding_window=window)
    with pytest.raises(ValueError, match="21 was not planned"):
        batch.run(plan, sliding_window=21)


@pytest.mark.parametrize(("soft_cap", "window", "dtype"), [(2.0, None, FP32), (50.0, None, BF16), (2.0, 40, BF16)])
def test_soft_caps(dtype: torch.dtype, soft_cap: float, window: int | None):
    Batch(SHORT, dtype=dtype).check(soft_cap=soft_cap, sliding_window=window)


@pytest.mark.parametrize(("soft_cap", "window"), [(None, None), (5.0, None), (None, 3)])
def test_sinks(soft_cap: float | None, window: int | None):
    batch = Batch(SHORT, group=8)
    sinks = torch.tensor([0.0, 8.0, -3.0, 1.0, 20.0, -20.0, 2.0, 0.5])
    for plan in (batch.plan((window,)), batch.plan((window,), num_programs=8, **small())):  # whole rows, and cut ones
        batch.check(plan, soft_cap=soft_cap, sliding_window=window, sinks=sinks)


def test_scores_far_apart_do_not_overflow():
    batch = Batch(SHORT)
    actual, expected = (run(scale=30.0) for run in (lambda **o: batch.run(batch.plan(), **o), batch.expected))
    torch.testing.assert_close(actual.double(), expected, atol=2e-3, rtol=2e-3)  # of scores in the hundreds


@pytest.mark.parametrize("num_programs", [1, 3, 7, 30])
def test_decoding_rows_cut_anywhere(num_programs: int):
    batch = Batch([(399, 1), (0, 1), PADDING, (16, 1), (150, 3), (127, 1)], kv_heads=2)
    batch.check(batch.plan(num_programs=num_programs, **small()))
    batch.check(batch.plan((50,), num_programs=num_programs, **small()), sliding_window=50)


@pytest.mark.parametrize("config", [(16, 16), (32, 16), (16, 128), (64, 32)])
def test_tile_sizes(config: tuple[int, int]):
    batch = Batch([*SHORT, (100, 40)], block_size=32)
    config = AttentionConfig(*config, 4, 2)
    batch.check(batch.plan((30,), configs=(config, config)), sliding_window=30)


# --- rows without work, and memory that is not theirs ---


def test_rows_without_positions_yield_zeros():
    """As a CUDA graph pads: rows that have a token but no position."""
    batch = Batch([(40, 1), (90, 1), (0, 1), (0, 1), (0, 20)], kv_heads=2)
    expected = batch.run(batch.plan())
    batch.seq_lens[2:] = 0
    batch.block_table[2:] = 0  # the null block, which holds NaN
    for options in ({}, {"fixed_spans": True}):
        actual = batch.run(batch.plan(**options))
        assert torch.equal(actual[:2].isnan(), torch.zeros_like(actual[:2], dtype=torch.bool))
        torch.testing.assert_close(actual[:2], expected[:2])
        assert torch.equal(actual[2:], torch.zeros_like(actual[2:]))


def test_a_batch_of_padding_only():
    batch = Batch([(0, 1)] * 3)
    batch.seq_lens[:] = 0
    assert torch.equal(batch.run(batch.plan()), torch.zeros_like(batch.q))


def test_tokens_of_no_row_are_left_alone():
    batch = Batch([(40, 1), (20, 1)])
    batch.q = torch.cat([batch.q, batch.q])
    assert torch.equal(batch.run(batch.plan()).isnan().flatten(1).all(1), torch.tensor([False, False, True, True]))


@pytest.mark.parametrize("new", [1, 3, 40])
def test_blocks_that_windows_have_passed_are_not_read(new: int):
    batch = Batch([(600, new)])
    plan = batch.plan((50,), **small())
    expected = batch.run(plan, sliding_window=50)
    batch.block_table[:, : (600 - 49) // 16] = 0
    assert expected.isfinite().all()
    assert torch.equal(batch.run(plan, sliding_window=50), expected)


def test_an_output_is_made_where_none_is_given():
    batch = Batch(SHORT)
    plan = batch.plan()
    arguments = batch.q, batch.cache, batch.query_start_loc, batch.seq_lens, batch.block_table, plan
    out = paged_attention(*arguments, scale=0.3)
    assert out.is_contiguous()
    assert torch.equal(out, batch.run(plan))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 64)}, "do not go with"),
        ({"q": torch.zeros(2, 4, 32)}, "do not go with"),
        ({"q": torch.zeros(2, 64, 4).transpose(1, 2)}, "contiguous"),
        ({"q": torch.zeros(2, 4, 64, dtype=torch.float16)}, "cache of"),
        ({"cache": torch.zeros(4, 2, 16, 2, 64).transpose(2, 3)}, "contiguous"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(change: dict[str, Tensor], message: str):
    batch = Batch([(3, 1), (4, 1)], kv_heads=2, group=2)
    plan = batch.plan()
    vars(batch).update(change)
    with pytest.raises(ValueError, match=message):
        batch.run(plan)


# --- fixed spans ---


def spans(**options: object) -> dict[str, object]:
    return {"configs": (AttentionConfig(32, 32, 4, 2),) * 2, "fixed_spans": True, "span": 64} | options


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(FP32, {}), (BF16, {"sliding_window": 90}), (FP32, {"soft_cap": 2.0}), (BF16, {"sinks": torch.arange(4.0)})],
)
def test_fixed_spans_are_right(dtype: torch.dtype, options: dict[str, object]):
    batch = Batch([*SHORT, (199, 1), (110, 70), (250, 3)], dtype=dtype)
    batch.check(batch.plan((options.get("sliding_window"),), **spans()), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 90, "soft_cap": 2.0}])
def test_fixed_spans_do_not_depend_on_the_batch_nor_on_chunks(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
):
    """A prompt of 200 at once; in chunks, decoding at the end; and its last token in other company, cut elsewhere."""
    # numpy's matrix product, unlike a tensor core's, computes a row differently in another place.
    from triton.runtime import interpreter

    def dot(self: object, a: Any, b: Any, total: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
        product = (a.data[:, :, None].astype(np.float32) * b.data[None].astype(np.float32)).sum(1)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    length = 200
    whole = Batch([(0, length)], dtype=BF16)
    window = options.get("sliding_window")

    def run(context: int, new: int, company: list[tuple[int, int]], num_programs: int) -> Tensor:
        batch = Batch([(0, length), *company], dtype=BF16)
        batch.rows[0] = (context, new)
        batch.seq_lens[0] = context + new
        batch.q = torch.cat([whole.q[context : context + new], batch.q[length:]])
        batch.query_start_loc[1:] -= length - new
        batch.cache = torch.cat([batch.cache, whole.cache])
        batch.block_table[0, : whole.block_table.shape[1]] = whole.block_table[0] + len(batch.cache) - len(whole.cache)
        plan = batch.plan((window,), **spans(num_programs=num_programs))  # type: ignore[arg-type]
        return batch.run(plan, **options)[:new]

    expected = run(0, length, [], 1)
    for edges in ([0, 7, 16, 150, 199, 200], [0, 64, 128, 197, 200]):
        parts = [run(begin, end - begin, [(77, 1)], 4) for begin, end in itertools.pairwise(edges)]
        assert torch.equal(torch.cat(parts), expected)
    for company, programs in ([(10, 1)], 2), ([(150, 1), (20, 2)], 5), ([(0, 40), (100, 1)], 20):
        assert torch.equal(run(length - 1, 1, company, programs), expected[length - 1 :])


# --- plans that a captured step reads ---


@pytest.mark.parametrize("options", [{}, {"fixed_spans": True, "span": 64}])
def test_a_plan_is_copied_into_another_of_its_size(options: dict[str, object]):
    """Two steps of four padded rows, the second through the buffers of the first."""
    sizes = {"configs": (SMALL, SMALL), "max_seq_len": 1000, **options}
    first = Batch([(200, 1), (20, 1), (3, 1), (0, 1)], kv_heads=2)
    first.seq_lens[3] = 0
    static = first.plan((None, 30), **sizes)
    second = Batch([(3, 1), (299, 1), (0, 1), (0, 1)], kv_heads=2)
    second.seq_lens[2:] = 0
    address, plan = static.buffer.data_ptr(), second.plan((None, 30), **sizes)
    plan.copy_into(static)
    assert static.buffer.data_ptr() == address
    for window in (None, 30):
        actual = second.run(static, sliding_window=window)
        assert torch.equal(actual, second.run(plan, sliding_window=window))
        assert actual.isfinite().all()
        second.check(static, sliding_window=window)


@pytest.mark.parametrize(
    ("rows", "windows", "options"),
    [
        ([(3, 1)] * 3, (None,), {}),
        ([(3, 1)] * 4, (7,), {}),
        ([(3, 1)] * 4, (None,), {"num_programs": 6}),
        ([(3, 1)] * 4, (None,), {"fixed_spans": True}),
        ([(3, 1)] * 4, (None,), {"configs": (AttentionConfig(16, 16, 4, 2),) * 2}),
    ],
)
def test_a_plan_of_another_size_is_refused(
    rows: list[tuple[int, int]], windows: tuple[int | None, ...], options: dict[str, object]
):
    static = Batch([(3, 1)] * 4).plan(**small())
    with pytest.raises(ValueError, match="cannot stand in"):
        Batch(rows).plan(windows, **small(**options)).copy_into(static)


def test_a_plan_with_prompts_is_not_copied():
    plan = Batch([(0, 40), (3, 1)]).plan()
    with pytest.raises(ValueError, match="cannot stand in"):
        plan.copy_into(plan)


# --- the plan by itself ---


def shares_of(plan: AttentionPlan, window: int | None, num_kv_heads: int) -> list[list[tuple[int, int, int, int, int]]]:
    """What each program does, as (decode tile, KV head, first unit, number of units, slot or -1 where all is its own)."""
    buffer, at = plan.buffer.tolist(), plan.section(window)
    before = buffer[at : at + plan.num_decode + 1]
    shares: list[list[tuple[int, int, int, int, int]]] = []
    for program in range(plan.num_programs):
        begin = at + plan.num_decode + 1 + 6 * program
        tile, head, unit, left, head_slot, tail_slot = buffer[begin : begin + 6]
        share = []
        while left:
            units = before[tile + 1] - before[tile]
            count = min(units - unit, left)
            if count:
                share.append((tile, head, unit, count, -1 if count == units else head_slot if unit else tail_slot))
            left, unit = left - count, 0
            tile, head = (tile + 1, 0) if head + 1 == num_kv_heads or not units else (tile, head + 1)
        shares.append(share)
    return shares


def merges_of(plan: AttentionPlan, window: int | None) -> dict[tuple[int, int], list[int]]:
    begin = plan.section(window) + plan.num_decode + 1 + 6 * plan.num_programs
    entries = plan.buffer[begin : begin + 4 * plan.num_programs].view(-1, 4).tolist()
    found = {(tile, head): list(range(slot, slot + count)) for tile, head, slot, count in entries if count}
    assert len(found) == sum(count > 0 for *_, count in entries)
    return found


row_lists = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 60)), min_size=1, max_size=12)


@given(
    rows=row_lists,
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 8]),
    num_programs=st.integers(1, 40),
    window=st.sampled_from([None, 1, 16, 50]),
    fixed_spans=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_piece_of_work_is_planned_once(
    rows: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    num_programs: int,
    window: int | None,
    fixed_spans: bool,
):
    query_lens = np.array([new for _, new in rows])
    seq_lens = np.array([context + new for context, new in rows]) * (query_lens > 0)
    config = AttentionConfig(32, 16, 4, 2)
    plan = plan_step(
        query_lens,
        seq_lens,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        sliding_windows=(None, window),
        num_programs=num_programs,
        fixed_spans=fixed_spans,
        configs=(config, config),
        span=64,
    )
    buffer = plan.buffer.tolist()
    assert plan.buffer.dtype == torch.int32
    unit = 64 if fixed_spans else 16

    # Rows of few queries go to the decode kernel, in order; the others are cut into query tiles.
    few = [row for row, (_, new) in enumerate(rows) if new <= 16 // group]
    assert buffer[: plan.num_decode] == few
    tiles = list(zip(*np.reshape(buffer[plan.prefill_section :], (2, -1)).tolist(), strict=True))
    width = 32 // group
    expected = [(row, first) for row in range(len(rows)) if row not in few for first in range(0, rows[row][1], width)]
    assert sorted(tiles) == expected
    positions = [seq_lens[row] - query_lens[row] + first for row, first in tiles]
    assert positions == sorted(positions, reverse=True)

    # Each unit of each decode row and head is in one share, and shares are equal within one unit.
    shares = shares_of(plan, window, num_kv_heads)
    done = [(tile, head, first + i) for share in shares for tile, head, first, count, _ in share for i in range(count)]
    wanted = []
    for tile, row in enumerate(few):
        end, begin = int(seq_lens[row]), 0
        if window is not None:
            begin = max(0, end - int(query_lens[row]) - window + 1)
        units = -(-end // unit) - begin // unit
        wanted += [(tile, head, i) for head in range(num_kv_heads) for i in range(units)]
    assert done == wanted
    sizes = [sum(count for *_, count, _ in share) for share in shares]
    busy = [size for size in sizes if size]
    assert max(sizes) - min(busy, default=0) <= 1
    assert len(busy) == min(num_programs, len(wanted))

    # What a share's edge has cut leaves its parts in slots of its own, which are merged in order.
    parts: dict[tuple[int, int], list[int]] = {}
    for tile, head, first, count, slot in itertools.chain(*shares):
        if slot >= 0:
            slots = range(slot + first, slot + first + count) if fixed_spans else [slot]
            parts.setdefault((tile, head), []).extend(slots)
    assert merges_of(plan, window) == parts
    used = list(itertools.chain(*parts.values()))
    assert used == sorted(set(used))
    assert all(slot < plan.num_slots for slot in used)


@given(rows=row_lists, others=row_lists, num_programs=st.integers(2, 20), window=st.sampled_from([None, 50]))
@settings(max_examples=100, deadline=None)
def test_fixed_spans_are_planned_by_row_alone(
    rows: list[tuple[int, int]], others: list[tuple[int, int]], num_programs: int, window: int | None
):
    """Which spans a row has does not change with its company; nor what its slots are joined to."""

    def units(batch: list[tuple[int, int]]) -> list[int]:
        query_lens = np.minimum([new for _, new in batch], 16)
        seq_lens = np.array([context for context, _ in batch]) + query_lens
        plan = plan_step(
            query_lens,
            seq_lens,
            num_heads=1,
            num_kv_heads=1,
            head_dim=64,
            sliding_windows=(window,),
            num_programs=num_programs,
            fixed_spans=True,
            configs=(SMALL, SMALL),
            span=64,
        )
        at = plan.section(window)
        before = plan.buffer[at : at + plan.num_decode + 1]
        for (tile, _), slots in merges_of(plan, window).items():
            assert len(slots) == before[tile + 1] - before[tile]  # one per span, wherever the cut is
        return before.diff().tolist()

    assert units([*rows, *others])[: len(rows)] == units(rows)


def test_shares_of_a_skewed_batch_are_equal():
    """One row of 128k beside 31 of 4k: what a split by row would leave to few programs."""
    seq_lens = np.array([131072] + [4096] * 31)
    plan = plan_step(
        np.ones(32, int), seq_lens, num_heads=32, num_kv_heads=8, head_dim=128, num_programs=264, dtype=torch.bfloat16
    )
    total = 8 * int((seq_lens // plan.decode.tile_n).sum())
    sizes = [sum(count for *_, count, _ in share) for share in shares_of(plan, None, 8)]
    assert sum(sizes) == total
    assert {size - total // 264 for size in sizes} <= {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5, "num_kv_heads": 2}, "cannot share"),
        ({"head_dim": 512}, "256"),
        ({"num_heads": 32, "configs": (SMALL, SMALL)}, "cannot hold"),
        ({"fixed_spans": True, "configs": (SMALL, AttentionConfig(32, 16, 4, 2))}, "one configuration"),
        ({"fixed_spans": True, "configs": (SMALL, SMALL), "span": 72}, "whole tiles"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, object], message: str):
    sizes = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "num_programs": 4} | options
    with pytest.raises(ValueError, match=message):
        plan_step(np.array([1]), np.array([5]), **sizes)  # type: ignore[arg-type]


# --- the table ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 8, 71])
def test_the_table_has_a_line_for_every_size(head_dim: int, group: int, dtype: torch.dtype):
    for arch in (75, *ARCHS, 120):
        for decode, spanned in itertools.product((True, False), repeat=2):
            config = attention_config(arch, head_dim, group, dtype, decode=decode, spans=spanned)
            assert config.tile_m >= max(16, group)
            assert min(config.tile_m & -config.tile_m, config.tile_n & -config.tile_n) >= 16
    assert attention_config(89, 128, 4, dtype, decode=True) == attention_config(80, 128, 4, dtype, decode=True)
    assert len({attention_config(90, 128, 4, dtype, decode=decode, spans=True) for decode in (True, False)}) == 1
