"""The adapters of FlashAttention and FlashInfer on stand-ins that read what they are given as the libraries' documentation
says, and compute with the oracle."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ropeway.attention.base import AttentionMetadata, AttentionSpec
from ropeway.attention.flash_attn import FlashAttention
from ropeway.attention.flashinfer import FlashInferAttention
from ropeway.errors import ConfigError
from ropeway_kernels import reference

HEADS, KV_HEADS, DIM = 6, 2, 16
SPECS = [
    AttentionSpec(0.3),
    AttentionSpec(0.25, sliding_window=7),
    AttentionSpec(0.25, soft_cap=5.0),
    AttentionSpec(0.4, sliding_window=300, soft_cap=9.0),
]
BATCHES = [([1], [1]), ([1, 1, 1], [40, 1, 300]), ([5, 1, 17], [5, 33, 60]), ([40, 1], [280, 257])]


def make_batch(query_lens: list[int], seq_lens: list[int], block_size: int, seed: int = 0):
    """(q, k, v, kv_layer, meta): the layer is one of two, so that its blocks lie apart; the cache holds earlier tokens."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 3
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
    cache = noise(num_blocks, 2, 2, KV_HEADS, block_size, DIM)
    slots = []
    for row, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        positions = range(length - query, length)
        slots += [int(table[row, at // block_size]) * block_size + at % block_size for at in positions]
    num_tokens = sum(query_lens)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        num_reqs=len(query_lens),
        num_tokens=num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        host_query_lens=np.array(query_lens, dtype=np.int32),
        host_seq_lens=np.array(seq_lens, dtype=np.int32),
    )
    q, k, v = noise(num_tokens, HEADS, DIM), noise(num_tokens, KV_HEADS, DIM), noise(num_tokens, KV_HEADS, DIM)
    return q, k, v, cache[:, 1], meta


def check(
    backend: Any, query_lens: list[int], seq_lens: list[int], block_size: int, specs: list[AttentionSpec]
) -> None:
    """As several layers of one step."""
    q, k, v, kv_layer, meta = make_batch(query_lens, seq_lens, block_size)
    expected_cache = kv_layer.clone()
    reference.write_kv(k, v, expected_cache, meta.slot_mapping)
    meta = backend.prepare(meta)
    for spec in specs:
        out = backend.forward(q, k, v, kv_layer, meta, spec)
        assert torch.equal(kv_layer, expected_cache)
        expected = reference.paged_attention(
            q,
            expected_cache,
            meta.block_table,
            meta.query_start_loc,
            meta.seq_lens,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
        )
        assert out.shape == expected.shape
        assert torch.equal(out, expected)


# --- FlashAttention ---------------------------------------------------------------------------------------------------


class FlashAttnStandIn:
    """flash_attn, paged: caches are [num_blocks, block_size, num_kv_heads, head_dim], contiguous in the last dimension."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor:
        self.calls.append("kvcache")
        batch, length = q.shape[:2]
        assert length == 1
        starts = torch.arange(batch + 1, dtype=torch.int32)
        out = self._attend(
            q[:, 0], k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale, window_size, softcap
        )
        assert causal
        return out[:, None]

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        block_table: Tensor,
    ) -> Tensor:
        self.calls.append("varlen")
        assert causal
        assert cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        lens = cu_seqlens_k.diff()
        return self._attend(q, k, v, cu_seqlens_q, lens, block_table, softmax_scale, window_size, softcap)

    def _attend(self, q, k, v, starts, seq_lens, block_table, scale, window, softcap) -> Tensor:
        for tensor in (starts, seq_lens, block_table):
            assert tensor.dtype == torch.int32
        for tensor in (q, k, v):
            assert tensor.dtype == torch.bfloat16
            assert tensor.stride(-1) == 1
        assert k.shape[1:] == v.shape[1:] == (256, KV_HEADS, DIM)
        assert window[1] in (-1, 0)
        assert (window[0] == -1) == (window[1] == -1)
        cache = torch.stack([k.transpose(1, 2), v.transpose(1, 2)], dim=1)
        return reference.paged_attention(
            q,
            cache,
            block_table,
            starts,
            seq_lens,
            scale=scale,
            sliding_window=None if window[0] < 0 else window[0] + 1,
            soft_cap=softcap or None,
        )


@pytest.mark.parametrize("lens", BATCHES, ids=str)
def test_flash_attention_is_given_what_it_documents(monkeypatch: pytest.MonkeyPatch, lens: Any) -> None:
    library = FlashAttnStandIn()
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    check(FlashAttention(256, torch.bfloat16), *lens, 256, SPECS)
    assert set(library.calls) == ({"kvcache"} if max(lens[0]) == 1 else {"varlen"})


# --- FlashInfer -------------------------------------------------------------------------------------------------------


class _Wrapper:
    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8
        self.planned = 0

    def _plan(
        self, starts, page_starts, pages, last_lens, heads, kv_heads, dim, page_size, *, window_left, logits_soft_cap,
        sm_scale, q_data_type, kv_data_type,
    ) -> None:  # fmt: skip
        assert (heads, kv_heads, dim) == (HEADS, KV_HEADS, DIM)
        assert q_data_type == kv_data_type == torch.bfloat16
        for tensor in (starts, page_starts, pages, last_lens):
            assert tensor.dtype == torch.int32
        assert len(pages) == page_starts[-1]
        assert ((last_lens >= 1) & (last_lens <= page_size)).all()
        self.planned += 1
        self.page_size, self.starts = page_size, starts
        counts = page_starts.diff()
        self.seq_lens = (counts - 1) * page_size + last_lens
        self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, (begin, end) in enumerate(itertools.pairwise(page_starts.tolist())):
            self.table[row, : end - begin] = pages[begin:end]
        self.options = {
            "scale": sm_scale,
            "sliding_window": None if window_left < 0 else window_left + 1,
            "soft_cap": logits_soft_cap or None,
        }

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        assert paged_kv_cache.shape[1:] == (2, KV_HEADS, self.page_size, DIM)
        return reference.paged_attention(q, paged_kv_cache, self.table, self.starts, self.seq_lens, **self.options)


class _Prefill(_Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *sizes, causal, **options
    ) -> None:
        assert causal
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *sizes, **options)


class _Decode(_Wrapper):
    def __init__(self, workspace: Tensor, kv_layout: str, *, use_tensor_cores: bool) -> None:
        super().__init__(workspace, kv_layout)

    def plan(self, indptr, indices, last_page_len, *sizes, **options) -> None:
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._plan(starts, indptr, indices, last_page_len, *sizes, **options)


@pytest.mark.parametrize("block_size", [8, 16])
def test_flashinfer_is_given_what_it_documents(monkeypatch: pytest.MonkeyPatch, block_size: int) -> None:
    made: list[_Wrapper] = []

    def make(kind: type[_Wrapper]) -> Any:
        return lambda *args, **kwargs: made.append(kind(*args, **kwargs)) or made[-1]

    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=make(_Prefill), BatchDecodeWithPagedKVCacheWrapper=make(_Decode)
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    backend = FlashInferAttention(
        block_size,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    for lens in BATCHES:
        check(backend, *lens, block_size, [*SPECS, *SPECS])  # layers of the same kind share a plan
    assert len(made) == 2 * len(SPECS)  # to decode and to prefill
    assert sum(wrapper.planned for wrapper in made) == len(BATCHES) * len(SPECS)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_library_that_is_not_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"--attention-backend flash-attn: the package flash_attn .*triton"):
        FlashAttention(256, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: the package flashinfer .*triton"):
        FlashInferAttention(
            16, num_heads=2, num_kv_heads=2, head_dim=8, dtype=torch.float16, device=torch.device("cpu")
        )


def test_what_a_library_does_not_do_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttnStandIn())
    with pytest.raises(ConfigError, match="--block-size must be a multiple of 256 for it, not 16"):
        FlashAttention(16, torch.bfloat16)
    with pytest.raises(ConfigError, match="--dtype float16 or bfloat16"):
        FlashAttention(256, torch.float32)
    with pytest.raises(ConfigError, match="--dtype float16 or bfloat16"):
        FlashInferAttention(
            16, num_heads=2, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu")
        )
