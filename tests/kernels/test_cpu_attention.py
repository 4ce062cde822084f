"""The native CPU attention against the loops of `reference`, and against itself: the same bits however it is asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ropeway.attention.base import AttentionMetadata, AttentionSpec
from ropeway.attention.cpu import CpuAttention
from ropeway.attention.torch_ref import TorchAttention
from ropeway_kernels import cpu, reference

kernels = cpu.load()
if kernels is None:
    pytest.skip(f"no native kernels: {cpu.why_not()}", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SPAN = 256  # positions that the kernel reduces together
# (context, new tokens) of each row: decoding, prefilling and chunks side by side, at edges of blocks and spans.
MIXED = [
    (0, 1),
    (0, 13),
    (17, 1),
    (SPAN - 1, 1),
    (SPAN, 1),
    (SPAN - 6, 9),
    (0, 40),
    (0, 0),
    (2 * SPAN - 1, 2),
    (600, 5),
]
SHORT = [(0, 1), (0, 13), (SPAN - 1, 1), (SPAN - 6, 9), (300, 2)]
nan = float("nan")


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    kernels.set_num_threads(torch.get_num_threads())


class Request:
    """All that one request will ever ask: q, k and v of every position."""

    def __init__(self, length: int, *, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
        self.q = torch.randn(length, kv_heads * group, head_dim).to(dtype)
        self.k, self.v = torch.randn(2, length, kv_heads, head_dim)


class Step:
    """Some tokens of some requests, over a cache that holds NaN wherever nobody has written."""

    def __init__(
        self,
        requests: Sequence[Request],
        rows: Sequence[tuple[int, int]],
        *,
        kv_dtype: torch.dtype,
        block_size: int = 16,
    ) -> None:
        """rows: (context length, new tokens) per request."""
        kv_heads, head_dim = requests[0].k.shape[1:]
        counts = [-(-(context + new) // block_size) for context, new in rows]
        ids = (torch.randperm(sum(counts) + 3) + 1).tolist()  # some are nobody's; 0 is the null block
        plain = torch.full((len(ids) + 1, 2, kv_heads, block_size, head_dim), nan).to(kv_dtype)
        self.block_table = torch.zeros((len(rows), max(counts) + 1), dtype=torch.int32)
        for row, (request, (context, new), count) in enumerate(zip(requests, rows, counts, strict=True)):
            blocks, ids = ids[:count], ids[count:]
            self.block_table[row, :count] = torch.tensor(blocks)
            slots = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(context + new)])
            reference.write_kv(request.k[: len(slots)], request.v[: len(slots)], plain, slots)
        self.plain = plain
        # One layer of three, as in the runner: blocks do not lie side by side.
        self.cache = torch.full((len(plain), 3, *plain.shape[1:]), nan).to(kv_dtype)[:, 1]
        self.cache.copy_(reference.pack_kv_tiles(self._partners_cleared(rows)))
        self.q = torch.cat([r.q[context : context + new] for r, (context, new) in zip(requests, rows, strict=True)])
        lengths = torch.tensor([0] + [new for _, new in rows])
        self.query_start_loc = lengths.cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor([context + new for context, new in rows], dtype=torch.int32)

    def _partners_cleared(self, rows: Sequence[tuple[int, int]]) -> Tensor:
        """A pair of V's positions is read together; the write clears the second if it is not written itself."""
        cleared = self.plain.clone()
        block_size = cleared.shape[3]
        for table, (context, new) in zip(self.block_table.tolist(), rows, strict=True):
            length = context + new
            if length % 2 and reference.tile_step(cleared.dtype) == 2:
                cleared[table[length // block_size], 1, :, length % block_size] = 0.0
        return cleared

    def run(self, spec: AttentionSpec, threads: int = 2) -> Tensor:
        kernels.set_num_threads(threads)
        return kernels.attention(
            self.q,
            self.cache,
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
        )

    def expected(self, spec: AttentionSpec) -> Tensor:
        some = self.query_start_loc.diff() > 0  # the reference has no rows without queries
        return reference.paged_attention(
            self.q.double(),
            self.plain,
            self.block_table[some],
            torch.cat([self.query_start_loc[:1], self.query_start_loc[1:][some]]),
            self.seq_lens[some],
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
        )


def make_requests(
    rows: Sequence[tuple[int, int]],
    *,
    kv_heads: int = 1,
    group: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> list[Request]:
    return [
        Request(context + new, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype) for context, new in rows
    ]


def check(
    rows: Sequence[tuple[int, int]],
    spec: AttentionSpec | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    block_size: int = 16,
    kv_heads: int = 1,
    group: int = 2,
    head_dim: int = 64,
    tolerance: float | None = None,
) -> None:
    kv_dtype = kv_dtype or dtype
    spec = spec or AttentionSpec(scale=head_dim**-0.5)
    requests = make_requests(rows, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    step = Step(requests, rows, kv_dtype=kv_dtype, block_size=block_size)
    actual = step.run(spec)
    assert actual.dtype == dtype
    tolerance = tolerance or max(TOLERANCE[dtype], TOLERANCE[kv_dtype])
    torch.testing.assert_close(actual.double(), step.expected(spec), atol=tolerance, rtol=tolerance)


# --- parity ---


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_types(dtype: torch.dtype, kv_dtype: torch.dtype):
    check(MIXED, dtype=dtype, kv_dtype=kv_dtype, kv_heads=2, group=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 72, 80, 96, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype):
    check(SHORT, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", range(1, 9))
def test_groups(group: int, dtype: torch.dtype):
    check(SHORT, group=group, kv_heads=2, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128])
def test_block_sizes(block_size: int, dtype: torch.dtype):
    check(SHORT, block_size=block_size, dtype=dtype, kv_heads=2)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 255, 256, 257, 511, 512, 513, 1025])
def test_decoding_at_every_edge_of_a_span(length: int):
    check([(length - 1, 1), (max(0, length - 3), min(3, length))], dtype=torch.bfloat16)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 5, 16, 100, SPAN, SPAN + 1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_and_soft_caps(dtype: torch.dtype, window: int, soft_cap: float | None):
    check(SHORT, AttentionSpec(scale=0.3, sliding_window=window, soft_cap=soft_cap), dtype=dtype)


def test_soft_cap_without_window():
    check(MIXED, AttentionSpec(scale=0.5, soft_cap=5.0))


def test_scores_far_apart_do_not_overflow():
    check(SHORT, AttentionSpec(scale=30.0), tolerance=2e-3)  # of scores in the hundreds a rounding is 1e-4


def test_blocks_before_the_window_are_not_read():
    rows, spec = [(600, 3)], AttentionSpec(scale=0.125, sliding_window=40)
    step = Step(make_requests(rows), rows, kv_dtype=torch.float32)
    expected = step.run(spec)
    step.block_table[:, : (600 - 40) // 16] = 0  # the null block holds NaN here
    assert expected.isfinite().all()
    assert torch.equal(step.run(spec), expected)


def test_a_query_that_is_not_a_number_spoils_only_its_own_token_and_head():
    rows = [(300, 9), (20, 1)]
    requests = make_requests(rows, group=3)
    requests[0].q[303, 1, 5] = nan
    result = Step(requests, rows, kv_dtype=torch.float32).run(AttentionSpec(scale=0.125))
    assert result[3, 1].isnan().all()
    result[3, 1] = 0.0
    assert result.isfinite().all()


def test_queries_may_lie_apart():
    rows = [(40, 7), (300, 1)]
    step = Step(make_requests(rows), rows, kv_dtype=torch.float32)
    expected = step.run(AttentionSpec(scale=0.125))
    step.q = torch.cat([step.q, torch.full_like(step.q, nan)], dim=1)[:, : step.q.shape[1]]
    assert not step.q.is_contiguous()
    assert torch.equal(step.run(AttentionSpec(scale=0.125)), expected)


# --- the same bits ---

SPECS = [
    AttentionSpec(scale=0.125),
    AttentionSpec(scale=0.125, sliding_window=70),
    AttentionSpec(scale=0.125, sliding_window=300, soft_cap=3.0),
]
LENGTH = 2 * SPAN + 39
SHAPES = [(torch.float32, 1, 64), (torch.bfloat16, 3, 64), (torch.float16, 8, 80)]  # dtype, group, head_dim


def request_and_answer(shape: tuple[torch.dtype, int, int], spec: AttentionSpec) -> tuple[Request, Tensor]:
    """A request, and what its tokens get when it is prefilled alone in one step by one thread."""
    dtype, group, head_dim = shape
    request = Request(LENGTH, kv_heads=2, group=group, head_dim=head_dim, dtype=dtype)
    return request, Step([request], [(0, LENGTH)], kv_dtype=dtype).run(spec, threads=1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_with_any_number_of_threads(shape: tuple[torch.dtype, int, int], spec: AttentionSpec):
    request, answer = request_and_answer(shape, spec)
    for threads in (2, 3, 8):
        step = Step([request], [(0, LENGTH)], kv_dtype=shape[0])
        assert torch.equal(step.run(spec, threads), answer)
        # With many threads a decoding token's spans are computed apart and merged afterwards.
        last = Step([request], [(LENGTH - 1, 1)], kv_dtype=shape[0])
        assert torch.equal(last.run(spec, threads), answer[-1:])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_in_any_chunks(shape: tuple[torch.dtype, int, int], spec: AttentionSpec):
    request, answer = request_and_answer(shape, spec)
    edges = [0, 1, 8, 37, 100, SPAN - 1, SPAN, SPAN + 1, 400, LENGTH - 3, LENGTH - 2, LENGTH - 1, LENGTH]
    for begin, end in itertools.pairwise(edges):
        # What comes after the chunk is not yet in the cache: it holds NaN there.
        step = Step([request], [(begin, end - begin)], kv_dtype=shape[0])
        assert torch.equal(step.run(spec), answer[begin:end]), (begin, end)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_in_any_batch(shape: tuple[torch.dtype, int, int], spec: AttentionSpec):
    dtype, group, head_dim = shape
    request, answer = request_and_answer(shape, spec)
    for begin in (0, 250, LENGTH - 1):
        rows = [(3, 1), (0, 90), (begin, LENGTH - begin), (500, 1), (130, 11)]
        requests = make_requests(rows, kv_heads=2, group=group, head_dim=head_dim, dtype=dtype)
        requests[2] = request
        result = Step(requests, rows, kv_dtype=dtype).run(spec, threads=3)
        assert torch.equal(result[91 : 91 + LENGTH - begin], answer[begin:])


@pytest.mark.parametrize("block_size", [8, 24, 64, 128])
def test_same_bits_for_any_block_size_and_blocks(block_size: int):
    request, answer = request_and_answer(SHAPES[1], SPECS[0])
    for _ in range(2):  # each step shuffles its blocks
        step = Step([request], [(100, LENGTH - 100)], kv_dtype=torch.bfloat16, block_size=block_size)
        result = step.run(SPECS[0])
        if kernels.isa == "avx2" or block_size % 16 == 0:  # a narrower vector sums the weights in another order
            assert torch.equal(result, answer[100:])
        else:
            torch.testing.assert_close(result, answer[100:], atol=2e-2, rtol=2e-2)


# --- the backend ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_backend_writes_and_attends_as_the_torch_backend_does(dtype: torch.dtype, spec: AttentionSpec):
    """Three steps of three requests; the second begins late. Both backends see the same tokens and blocks."""
    block_size, kv_heads, group, head_dim, capacity = 16, 2, 3, 64, 24
    lengths = [0, 0, 0]
    backends = [TorchAttention(block_size), CpuAttention(kernels, block_size)]
    layers = [torch.zeros(b.kv_shape(100, block_size, kv_heads, head_dim), dtype=dtype) for b in backends]
    layers[1][1:] = nan  # what an earlier owner left; the torch backend clears blocks that it begins
    table = (torch.randperm(3 * capacity) + 1).view(3, capacity).to(torch.int32)
    for new in ([270, 0, 5], [1, 33, 1], [9, 1, 1]):
        slots = [
            int(table[row, p // block_size]) * block_size + p % block_size
            for row in range(3)
            for p in range(lengths[row], lengths[row] + new[row])
        ]
        lengths = [length + more for length, more in zip(lengths, new, strict=True)]
        rows = [row for row in range(3) if new[row]]
        q = torch.randn(len(slots), kv_heads * group, head_dim).to(dtype)
        k, v = torch.randn(2, len(slots), kv_heads, head_dim).to(dtype)
        results = []
        for backend, layer in zip(backends, layers, strict=True):
            meta = AttentionMetadata(
                query_start_loc=torch.tensor([0] + [new[row] for row in rows]).cumsum(0).to(torch.int32),
                seq_lens=torch.tensor([lengths[row] for row in rows], dtype=torch.int32),
                block_table=table[rows],
                slot_mapping=torch.tensor(slots),
                num_reqs=len(rows),
                num_tokens=len(slots),
                max_query_len=max(new),
                max_seq_len=max(lengths),
            )
            with torch.inference_mode():
                results.append(backend.forward(q, k, v, layer, backend.prepare(meta), spec))
        assert results[1].isfinite().all()
        torch.testing.assert_close(results[1], results[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
