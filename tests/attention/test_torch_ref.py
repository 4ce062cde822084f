"""The torch backend against the loops of ropeway_kernels.reference, over ragged batches and poisoned caches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ropeway.attention import torch_ref
from ropeway.attention.base import AttentionMetadata, AttentionSpec
from ropeway.attention.torch_ref import TorchAttention
from ropeway_kernels import reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Case:
    """A cache in the middle of its life: each row has a context written earlier, and stale blocks hold NaN."""

    def __init__(
        self, rows, *, block_size=16, num_kv_heads=2, group=2, head_dim=64, dtype=torch.float32, seed=0, layers=3
    ):
        """rows: (context length, new tokens) per request."""
        generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.backend = TorchAttention(block_size)
        tables = [-(-(context + new) // block_size) for context, new in rows]
        num_blocks = sum(tables) + 5
        shape = self.backend.kv_shape(num_blocks, block_size, num_kv_heads, head_dim)
        # As the runner does it: one tensor, a block contiguous over all layers; this test looks at the middle layer.
        pool = torch.full((num_blocks, layers, *shape[1:]), float("nan"), dtype=dtype)
        pool[0] = 0.0
        self.layer = pool[:, layers // 2]
        ids = rng.permutation(np.arange(1, num_blocks)).tolist()
        block_table = np.zeros((len(rows), max(tables) + 2), dtype=np.int32)
        for row, count in enumerate(tables):
            block_table[row, :count] = [ids.pop() for _ in range(count)]
        starts = np.concatenate([[0], np.cumsum([new for _, new in rows])]).astype(np.int32)
        total = int(starts[-1])
        slots = []
        for row, (context, new) in enumerate(rows):
            for position in range(context + new):
                slot = int(block_table[row, position // block_size]) * block_size + position % block_size
                if position >= context:
                    slots.append(slot)
                elif position % block_size == 0:
                    # Context: whole blocks of finite numbers; entries past the row's end were zeroed when begun.
                    block = slot // block_size
                    length = min(block_size, context - position)
                    self.layer[block] = 0.0
                    self.layer[block, :, :, :length] = randn(2, num_kv_heads, length, head_dim)
        self.meta = AttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.tensor([context + new for context, new in rows], dtype=torch.int32),
            block_table=torch.from_numpy(block_table),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            num_reqs=len(rows),
            num_tokens=total,
            max_query_len=max(new for _, new in rows),
            max_seq_len=max(context + new for context, new in rows),
        )
        self.q = randn(total, num_kv_heads * group, head_dim)
        self.k = randn(total, num_kv_heads, head_dim)
        self.v = randn(total, num_kv_heads, head_dim)

    def expected(self, spec: AttentionSpec) -> torch.Tensor:
        cache = self.layer.clone()
        reference.write_kv(self.k, self.v, cache, self.meta.slot_mapping)
        return reference.paged_attention(
            self.q,
            cache,
            self.meta.block_table,
            self.meta.query_start_loc,
            self.meta.seq_lens,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
        )

    def run(self, spec: AttentionSpec) -> torch.Tensor:
        with torch.inference_mode():
            meta = self.backend.prepare(self.meta)
            return self.backend.forward(self.q, self.k, self.v, self.layer, meta, spec)

    def check(self, spec: AttentionSpec | None = None) -> None:
        spec = spec or AttentionSpec(scale=self.q.shape[-1] ** -0.5)
        expected = self.expected(spec)
        actual = self.run(spec)
        assert torch.isfinite(actual).all()
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


MIXED = [(0, 1), (0, 15), (17, 1), (128, 1), (100, 28), (0, 16), (127, 1), (15, 1), (0, 17), (63, 66), (1, 2), (40, 3)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129])
def test_prefill_and_decode_at_block_edges(length):
    Case([(0, length), (length, 1), (length - 1, 1)]).check()


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_block_sizes(block_size):
    Case(MIXED, block_size=block_size).check()


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_groups(group):
    Case(MIXED, group=group, num_kv_heads=3 if group == 3 else 1).check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim):
    Case(MIXED[:8], head_dim=head_dim).check()


@pytest.mark.parametrize("window", [1, 5, 16, 64, 1000])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_windows_and_soft_caps(window, soft_cap):
    Case(MIXED).check(AttentionSpec(scale=0.3, sliding_window=window, soft_cap=soft_cap))


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype, soft_cap):
    Case(MIXED, dtype=dtype).check(AttentionSpec(scale=0.125, soft_cap=soft_cap))


def test_one_step_serves_layers_with_different_windows():
    case = Case(MIXED)
    wide, narrow = AttentionSpec(scale=0.125), AttentionSpec(scale=0.125, sliding_window=9)
    expected = case.expected(wide), case.expected(narrow)
    with torch.inference_mode():
        meta = case.backend.prepare(case.meta)
        for spec, want in [(wide, expected[0]), (narrow, expected[1]), (wide, expected[0])]:
            got = case.backend.forward(case.q, case.k, case.v, case.layer, meta, spec)
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_write_touches_only_its_slots_and_the_rest_of_begun_blocks():
    case = Case([(16, 3), (5, 2), (0, 20)])
    before = case.layer.clone()
    case.run(AttentionSpec(scale=0.125))
    wanted = before.clone()
    table = case.meta.block_table
    for block in (table[0, 1], table[2, 1]):  # begun by this step and not filled
        wanted[block] = 0.0
    reference.write_kv(case.k, case.v, wanted, case.meta.slot_mapping)
    assert torch.equal(torch.nan_to_num(case.layer, 7.0), torch.nan_to_num(wanted, 7.0))


def test_a_row_does_not_depend_on_its_neighbours():
    rows = [(300, 1), (5, 1), (37, 130), (1000, 1), (64, 64)]
    spec = AttentionSpec(scale=0.125)
    together = Case(rows)
    case_out = together.run(spec)
    starts = together.meta.query_start_loc.tolist()
    for row, (context, new) in enumerate(rows):
        alone = Case([(context, new)])
        blocks = -(-(context + new) // 16)
        source, target = together.meta.block_table[row, :blocks].long(), alone.meta.block_table[0, :blocks].long()
        alone.layer[target] = together.layer[source]
        tokens = slice(starts[row], starts[row + 1])
        alone.q, alone.k, alone.v = together.q[tokens], together.k[tokens], together.v[tokens]
        torch.testing.assert_close(alone.run(spec), case_out[tokens], atol=2e-6, rtol=2e-6)


def test_a_neighbours_nan_stays_with_the_neighbour():
    case = Case([(20, 1), (20, 4), (33, 1)])
    want = case.expected(AttentionSpec(scale=0.125))
    case.q[1:5] = float("nan")
    case.k[1:5] = float("nan")
    case.v[1:5] = float("nan")
    got = case.run(AttentionSpec(scale=0.125))
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(got[5], want[5], atol=2e-5, rtol=2e-5)
    assert got[1:5].isnan().all()


def test_buckets_bound_padding_and_memory():
    rng = np.random.default_rng(1)
    contexts = [*rng.integers(1, 1500, size=64).tolist(), 8000]
    case = Case([(int(context), 1) for context in contexts] + [(0, 400)], num_kv_heads=3, group=3, layers=1)
    case.run(AttentionSpec(scale=0.125))
    used = sum(-(-(context + 1) // 16) * 16 for context in contexts)
    padded = 0
    for bucket in case.meta.plan.buckets[None]:
        elements = bucket.num_tiles * bucket.kv_len * 3 * 64
        assert bucket.num_tiles == 1 or elements <= torch_ref._MAX_KV_ELEMENTS
        scores = bucket.num_tiles * bucket.kv_len * bucket.width * 9
        assert bucket.num_tiles == 1 or scores <= torch_ref._MAX_SCORES
        padded += bucket.num_tiles * bucket.kv_len if bucket.width == 1 else 0
    assert padded <= 1.5 * used


def test_long_prefill_is_computed_in_tiles():
    case = Case([(1000, 700), (0, 260)], num_kv_heads=1, group=2, head_dim=32, layers=1)
    case.check()
    assert max(bucket.width for bucket in case.meta.plan.buckets[None]) <= torch_ref._TILE
