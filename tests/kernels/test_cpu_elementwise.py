"""The native CPU kernels that work row by row, against the readable ones in `reference`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ropeway_kernels import cpu, reference

kernels = cpu.load()
if kernels is None:
    pytest.skip(f"no native kernels: {cpu.why_not()}", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative to the exact result: float32 arithmetic, then one rounding to the type.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2e-6, torch.float16: 2**-11 + 2e-6}
inf, nan = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    kernels.set_num_threads(torch.get_num_threads())


def close(got: Tensor, exact: Tensor, absolute: float = 1e-6) -> None:
    assert exact.dtype == torch.float64
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[got.dtype], atol=absolute, equal_nan=True)


# --- norm ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 8, 31, 64, 576, 897])
def test_rms_norm_equals_the_reference(dtype: torch.dtype, size: int):
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size)
    close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 64, 577])
def test_rms_norm_adds_to_the_residual_first_and_takes_the_norm_of_what_is_stored(dtype: torch.dtype, size: int):
    x, residual, weight = torch.randn(4, size).to(dtype), torch.randn(4, size).to(dtype), torch.randn(size)
    total = residual + x
    out = kernels.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, total)
    close(out, reference.rms_norm(total.double(), weight, 1e-6))


def test_rms_norm_leaves_its_input_and_what_lies_behind_it_alone():
    memory = torch.randn(4 * 13 + 8)
    x = memory[: 4 * 13].view(4, 13)
    before = memory.clone()
    kernels.rms_norm(x, torch.ones(13), 1e-6)
    assert torch.equal(memory, before)
    kernels.rms_norm(torch.randn(4, 13), torch.ones(13), 1e-6, x)
    assert torch.equal(memory[4 * 13 :], before[4 * 13 :])


@pytest.mark.parametrize("size", [16, 77])
def test_rms_norm_may_write_over_its_input(size: int):
    x, weight = torch.randn(6, size), torch.randn(size)
    want = kernels.rms_norm(x, weight, 1e-6)
    kernels._rms_norm(x.data_ptr(), None, weight.data_ptr(), x.data_ptr(), cpu.TYPES[x.dtype], 6, size, 1e-6)
    assert torch.equal(x, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_of_extreme_rows_is_that_of_torch_in_float32(dtype: torch.dtype):
    x = torch.randn(6, 40)
    x[0] *= 1e18  # squares still fit
    x[1] *= 1e25  # squares do not: the norm is 0
    x[2] = 0.0
    x[3, 7] = inf
    x[4, 39] = nan
    x[5] *= 1e-30
    x = x.to(dtype)
    want = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype).double()
    close(kernels.rms_norm(x, torch.ones(40), 1e-6), want, absolute=0.0)


# --- norm to int8 ---


def check_int8(got: tuple[Tensor, Tensor], exact: Tensor) -> None:
    """exact: the norm ``[rows, size]`` in float64. Where a value lies in the middle between two steps either may be taken;
    everywhere else the nearest one is."""
    out, scales = got
    steps, want_scales = reference.quantise_rows(exact)
    assert (out.dtype, scales.dtype) == (torch.int8, torch.float32)
    torch.testing.assert_close(scales.double(), want_scales, rtol=3e-6, atol=0.0)
    distance = (exact / want_scales[:, None] - out).abs().where((want_scales > 0)[:, None], out.abs())
    assert distance.max() <= 0.5 + 2e-4
    assert (out != steps).float().mean() < 0.01
    assert torch.equal(out.abs().amax(-1) == 127, want_scales > 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 8, 31, 64, 576, 897, 2048])
def test_rms_norm_int8_is_the_norm_quantised_row_by_row(dtype: torch.dtype, size: int):
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size)
    exact = reference.rms_norm(x.double(), weight, 1e-5)
    got = kernels.rms_norm_int8(x, weight, 1e-5)
    check_int8(got, exact)
    want = F.rms_norm(x.float(), (size,), weight, 1e-5)
    assert ((got[0] * got[1][:, None] - want).abs() <= 0.501 * got[1][:, None]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 64, 577])
def test_rms_norm_int8_adds_to_the_residual_first_and_takes_the_norm_of_what_is_stored(dtype: torch.dtype, size: int):
    x, residual, weight = torch.randn(3, size).to(dtype), torch.randn(3, size).to(dtype), torch.randn(size)
    total, before = residual + x, x.clone()
    got = kernels.rms_norm_int8(x, weight, 1e-6, residual)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    check_int8(got, reference.rms_norm(total.double(), weight, 1e-6))


def test_rms_norm_int8_rounds_ties_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, -126.5, 3.0, 0.0]])
    for scale in (1.0, 0.25, 2.0**40):  # whatever the norm divides by
        out, _ = kernels.rms_norm_int8(x * scale, torch.ones(11), 1e-6)
        assert out.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, -126, 3, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_int8_of_extreme_rows(dtype: torch.dtype):
    x = torch.randn(8, 43)
    x[0] *= 1e18  # squares still fit
    x[1] *= 1e25  # squares do not: the norm is 0
    x[2] = 0.0
    x[3, 7] = -inf
    x[4, 42] = nan
    x[5] *= 1e-30
    x[6] *= 1e-37  # 127 steps of it would not be normal numbers: taken for zeros
    x[7, :42] = 0.0  # the greatest is in the part of a vector at the end
    x = x.to(dtype)
    out, scales = kernels.rms_norm_int8(x, torch.ones(43), 1e-6)
    for row in (0, 5, 7):
        check_int8((out[row, None], scales[row, None]), reference.rms_norm(x[row, None].double(), torch.ones(43), 1e-6))
    assert scales[[1, 2, 6]].tolist() == [0.0, 0.0, 0.0]
    assert scales[[3, 4]].isnan().all()
    assert not out[[1, 2, 3, 4, 6]].any()


def test_rms_norm_int8_writes_its_rows_and_nothing_behind_them():
    for rows in (0, 1, 3):
        out, scales = torch.full((64,), 99, dtype=torch.int8), torch.full((8,), 99.0)
        x, weight = torch.randn(rows, 13), torch.ones(13)
        kernels._rms_norm_int8(
            x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), scales.data_ptr(), cpu.TYPES[x.dtype], rows, 13, 1e-6
        )
        assert (out[rows * 13 :] == 99).all()
        assert (scales[rows:] == 99.0).all()
        assert not (scales[:rows] == 99.0).any()


# --- gated activations ---


@pytest.mark.parametrize("kind", cpu.GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 1537, 4096, 9001])
def test_gated_equals_the_reference(kind: str, dtype: torch.dtype, size: int):
    x = (torch.randn(3, 2 * size) * 3).to(dtype)
    close(kernels.gated(x, cpu.GATES[kind]), reference.gated(x.double(), kind), absolute=3e-6)


@pytest.mark.parametrize("kind", cpu.GATES)
def test_every_gate_is_good_to_a_millionth_over_its_whole_range(kind: str):
    first = torch.linspace(-12, 12, 100_001)[None]
    got = kernels.gated(torch.cat([first, torch.ones_like(first)], dim=1), cpu.GATES[kind])
    want = reference.GATES[kind](first.double())
    assert ((got - want).abs() <= 1e-6 * first.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("kind", cpu.GATES)
def test_gates_of_extreme_values(kind: str):
    first = torch.tensor([[-1e30, -100.0, -90.0, -0.0, 100.0, 1e10, inf, nan]])
    got = kernels.gated(torch.cat([first, torch.full_like(first, 2.0)], dim=1), cpu.GATES[kind])
    want = torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 2e10, inf, nan]])
    torch.testing.assert_close(got, want, equal_nan=True)


# --- the greatest value ---


@pytest.mark.parametrize("size", [1, 5, 8, 33, 2048, 2049, 16384, 49152, 100_003])
@pytest.mark.parametrize("rows", [1, 3])
def test_argmax_is_that_of_torch(size: int, rows: int):
    logits = torch.randn(rows, size)
    values, indices = kernels.argmax(logits)
    assert torch.equal(values, logits.max(-1).values)
    assert torch.equal(indices, logits.argmax(-1))


@pytest.mark.parametrize("size", [9, 2100, 70_000])
def test_argmax_finds_the_first_of_equal_values_wherever_they_are(size: int):
    places = [0, 1, 7, 8, 31, 32, 2047, 2048, 2099, 16383, 16384, 49_152, 69_999, size - 1]
    for first in [place for place in places if place < size]:
        logits = torch.zeros(1, size)
        logits[0, first:] = 3.0
        values, indices = kernels.argmax(logits)
        assert (values.item(), indices.item()) == (3.0, first)


def test_argmax_of_rows_with_infinities_and_nan():
    logits = torch.randn(6, 40_000)
    logits[0] = -inf
    logits[1, 35_000] = inf
    logits[2, 20_000], logits[2, 30_000] = inf, -inf  # their sum is NaN, but none of them is
    logits[3, 39_999] = nan
    logits[4, 10], logits[4, 39_000] = inf, nan
    logits[5, 12_345], logits[5, 35_000] = nan, nan
    values, indices = kernels.argmax(logits)
    assert values[:3].tolist() == [-inf, inf, inf]
    assert values[3:].isnan().all()
    assert indices.tolist() == [0, 35_000, 20_000, 39_999, 39_000, 12_345]


def test_argmax_follows_the_stride():
    logits = torch.randn(4, 100)[:, :60]  # rows lie 100 apart
    assert torch.equal(kernels.argmax(logits)[1], logits.argmax(-1))


# --- rotation and the write to the cache ---


class Case:
    """Tokens of several rows, their slots in a shuffled cache full of NaN, and their angles."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype = torch.bfloat16,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        rotary_dim: int | None = None,
        block_size: int = 16,
        rows: tuple[tuple[int, int], ...] = ((0, 21), (5, 6), (14, 19), (32, 32)),  # first and last position
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.block_size = block_size
        blocks = torch.randperm(sum(last // block_size + 1 for _, last in rows)) + 1
        self.slots, start = [], 0
        for first, last in rows:
            self.slots += [
                int(blocks[start + p // block_size]) * block_size + p % block_size for p in range(first, last + 1)
            ]
            start += last // block_size + 1
        self.slot_mapping = torch.tensor(self.slots)
        self.qkv = torch.randn(len(self.slots), (heads + 2 * kv_heads) * head_dim).to(dtype)
        # One layer of a cache that holds three: its blocks are not contiguous.
        whole = torch.full((len(blocks) + 1, 3, 2, kv_heads, block_size, head_dim), nan).to(kv_dtype)
        self.cache = whole[:, 1]
        self.neighbours = whole[:, 0::2]
        angles = torch.rand(len(self.slots), (head_dim if rotary_dim is None else rotary_dim) // 2) * 100
        self.cos, self.sin = angles.cos() * 1.1, angles.sin() * 1.1

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each [num_tokens, heads, head_dim]"""
        counts = [self.heads, self.kv_heads, self.kv_heads]
        return qkv.view(len(self.slots), -1, self.head_dim).split(counts, dim=1)

    def expected(self, q_norm: Tensor | None, k_norm: Tensor | None, *, rotated: bool = True) -> tuple[Tensor, Tensor]:
        """q, and the cache in plain order with NaN where nothing is written; exact."""
        q, k, v = self.heads_of(self.qkv.double())
        q = q if q_norm is None else reference.rms_norm(q, q_norm, 1e-6)
        k = k if k_norm is None else reference.rms_norm(k, k_norm, 1e-6)
        if rotated:
            q, k = reference.rotate(q, self.cos, self.sin), reference.rotate(k, self.cos, self.sin)
        cache = torch.full(self.cache.shape, nan, dtype=torch.float64)
        reference.write_kv(k, v, cache, self.slot_mapping)
        return q, cache

    def run(self, q_norm: Tensor | None = None, k_norm: Tensor | None = None, *, rotated: bool = True) -> None:
        angles = {"cos": self.cos, "sin": self.sin} if rotated else {}
        kernels.rope_kv(
            self.qkv,
            self.cache,
            self.slot_mapping,
            num_heads=self.heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=1e-6,
            **angles,
        )

    def check(self, q_norm: Tensor | None = None, k_norm: Tensor | None = None, *, rotated: bool = True) -> None:
        want_q, want_cache = self.expected(q_norm, k_norm, rotated=rotated)
        _, k, v = self.heads_of(self.qkv.clone())
        self.run(q_norm, k_norm, rotated=rotated)
        got_q, got_k, got_v = self.heads_of(self.qkv)
        close(got_q, want_q, absolute=3e-6)
        assert torch.equal(got_k, k)
        assert torch.equal(got_v, v)
        plain = reference.unpack_kv_tiles(self.cache)
        written = ~want_cache.isnan()
        close(plain[written], want_cache[written], absolute=3e-6)
        # V's slot after a row's last position is 0 where it shares a pair with it; nothing else was touched.
        touched = ~plain.isnan()
        extra = touched & ~written
        assert not plain[extra].any()
        partners = set()
        if self.cache.dtype == torch.bfloat16:
            partners = {slot + 1 for slot in self.slots if slot % 2 == 0} - set(self.slots)
        per_slot = extra.any(-1)  # [num_blocks, 2, num_kv_heads, block_size]
        assert not per_slot[:, 0].any()
        for head in range(self.kv_heads):
            assert set(per_slot[:, 1, head].flatten().nonzero().flatten().tolist()) == partners
        assert self.neighbours.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
def test_rope_kv_equals_the_reference_for_every_pair_of_types(dtype: torch.dtype, kv_dtype: torch.dtype):
    Case(dtype, kv_dtype).check()
    Case(dtype, kv_dtype).check(torch.randn(64), torch.randn(64))


@pytest.mark.parametrize("block_size", [8, 16, 40, 128])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 16), (64, 48), (80, 20), (80, 80), (96, 70), (128, 32), (256, 2)]
)
def test_rope_kv_of_every_shape(head_dim: int, rotary_dim: int, block_size: int):
    for heads, kv_heads in ((3, 1), (4, 4)):
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
        Case(rotary_dim=rotary_dim, **shape).check()
        Case(torch.float32, torch.bfloat16, rotary_dim=rotary_dim, **shape).check(torch.randn(head_dim), None)


def test_rope_kv_without_rotation_or_without_queries_still_writes():
    Case().check(rotated=False)
    Case().check(torch.randn(64), torch.randn(64), rotated=False)
    Case(heads=0).check(rotated=False)
    Case(heads=0).check(None, torch.randn(64))


def test_rope_kv_leaves_the_partner_that_was_written_in_an_earlier_step():
    """Position 4 first (its partner becomes 0), then 5, which must not touch 4; then 6 and 7 together."""
    case = Case(rows=((4, 7),))
    for tokens in (slice(0, 1), slice(1, 2), slice(2, 4)):
        kernels.rope_kv(
            case.qkv[tokens],
            case.cache,
            case.slot_mapping[tokens],
            num_heads=4,
            cos=case.cos[tokens],
            sin=case.sin[tokens],
        )
    _, want = case.expected(None, None)
    written, plain = ~want.isnan(), reference.unpack_kv_tiles(case.cache)
    assert torch.equal(plain[:, 1][written[:, 1]].double(), want[:, 1][written[:, 1]])
    assert torch.equal(~plain.isnan(), written)


# --- the same answer ---


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_row_is_bitwise_the_same_in_any_batch_and_with_any_number_of_threads(threads: int):
    x = torch.randn(300, 2 * 577).to(torch.bfloat16)
    weight = torch.randn(2 * 577)
    kernels.set_num_threads(1)
    norms = torch.cat([kernels.rms_norm(row[None], weight, 1e-6) for row in x])
    int8 = [kernels.rms_norm_int8(row[None], weight, 1e-6) for row in x]
    steps, scales = (torch.cat(part) for part in zip(*int8, strict=True))
    gates = torch.cat([kernels.gated(row[None], cpu.GATES["gelu"]) for row in x])
    kernels.set_num_threads(threads)
    for rows in (300, 299, 64, 2):
        assert torch.equal(kernels.rms_norm(x[:rows], weight, 1e-6), norms[:rows])
        got_steps, got_scales = kernels.rms_norm_int8(x[:rows], weight, 1e-6)
        assert torch.equal(got_steps, steps[:rows])
        assert torch.equal(got_scales, scales[:rows])
        assert torch.equal(kernels.gated(x[:rows], cpu.GATES["gelu"]), gates[:rows])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_rope_kv_is_bitwise_the_same_in_any_chunk_and_with_any_number_of_threads(threads: int):
    norm = torch.randn(64)

    def run(chunk: int, count: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        case = Case(rows=((0, 276), (3, 203), (8, 8)))
        kernels.set_num_threads(count)
        for start in range(0, len(case.slots), chunk):
            part = slice(start, start + chunk)
            kernels.rope_kv(
                case.qkv[part],
                case.cache,
                case.slot_mapping[part],
                num_heads=4,
                cos=case.cos[part],
                sin=case.sin[part],
                q_norm=norm,
                k_norm=norm,
                eps=1e-6,
            )
        return case.qkv, case.cache.view(torch.int16)  # NaN where nothing was written

    qkv, cache = run(1, 1)
    for chunk in (1000, 17):
        got_qkv, got_cache = run(chunk, threads)
        assert torch.equal(got_qkv, qkv)
        assert torch.equal(got_cache, cache)
