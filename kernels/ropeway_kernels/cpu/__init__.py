"""Native CPU kernels: loads the compiled library and gives its functions tensors.

Owns: the mirror of csrc/types.h, the choice of instruction set, memory for packed weights. Must not know: models,
batches, anything of ropeway. Called by: model.layers, attention.cpu and worker.sampler through `load()`; tests.

The library is built with the package when there is a C++ compiler. Where it is missing `load` returns None and
`why_not` says why. Every function is called from one thread at a time and shares its work out to a pool of its own.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
ISA_VARIABLE = "ROPEWAY_CPU_ISA"  # one of ISAS: for tests, and for finding out whether a fault is an instruction set's
ISAS = ("avx512bf16", "avx512", "avx2", "neon", "scalar")
# Dot products of int8, by Linux's names. A processor has them or not whatever its ISA, so kernels ask for them apart.
FEATURES = ("avx512_vnni", "avx_vnni", "asimddp")

_LIBRARY = Path(__file__).with_name("libropeway_cpu.so")
_HUGE_PAGE = 2**21


class _LinearArgs(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("panel", ctypes.c_int32),
    )


class _AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("max_blocks", ctypes.c_int64),
        ("num_reqs", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("kv_type", ctypes.c_int32),
        ("sliding_window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class _RopeKvArgs(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("kv_type", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class _SampleArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("noise_keys", ctypes.c_void_p),
        ("filtered", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_filtered", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


class _PenaliseArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("presence", ctypes.c_void_p),
        ("frequency", ctypes.c_void_p),
        ("repetition", ctypes.c_void_p),
        ("output_counts", ctypes.c_void_p),
        ("in_prompt", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the layout that the chosen instruction set reads; see csrc/types.h, struct Linear."""

    data: Tensor  # [ceil(out_features / panel) * panel * in_features], in the weight's type
    bias: Tensor | None  # [out_features] float32
    out_features: int
    in_features: int
    args: Any  # ctypes pointer to a _LinearArgs over the two tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


class NativeKernels:
    """The library with one instruction set chosen. Tensors are on the CPU; a row's last dimension is contiguous."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
        self.features = tuple(name for name in FEATURES if library.ropeway_has_feature(name.encode()))
        self.panel: int = library.ropeway_panel()
        self._library = library
        p, n, i, f = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
        for name, arguments in {
            "pack": (p, n, p),
            "unpack_rows": (p, p, n, p),
            "linear": (p, p, i, n, n, p, i, n),
            "attention": (p,),
            "rope_kv": (p,),
            "rms_norm": (p, p, p, p, i, n, n, f),
            "rms_norm_int8": (p, p, p, p, p, i, n, n, f),
            "gated": (p, p, i, n, n, i),
            "argmax": (p, n, n, n, p, p),
            "penalise": (p,),
            "sample": (p,),
            "set_num_threads": (i,),
        }.items():
            self.function(name, arguments)
        for name, arguments in {"peak": (n,), "read_rate": (p, n)}.items():
            self.function(name, arguments, ctypes.c_double)
        self._linear = library.ropeway_linear
        self._rms_norm = library.ropeway_rms_norm
        self._rms_norm_int8 = library.ropeway_rms_norm_int8
        self._gated = library.ropeway_gated

    def function(self, name: str, arguments: tuple[Any, ...], result: Any = None) -> Any:
        """One of the library's functions with its types declared."""
        function = getattr(self._library, f"ropeway_{name}")
        function.argtypes, function.restype = arguments, result
        return function

    def set_num_threads(self, count: int) -> None:
        self._library.ropeway_set_num_threads(count)

    # --- linears ---

    def can_pack(self, weight: Tensor) -> bool:
        """``weight`` ``[out_features, in_features]``"""
        return weight.device.type == "cpu" and weight.dtype in TYPES and weight.shape[1] % 2 == 0

    def packed_size(self, out_features: int, in_features: int) -> int:
        """Elements of the packed form."""
        return -(-out_features // self.panel) * self.panel * in_features

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """Copy ``[out_features, in_features]`` into the packed layout, on huge pages where the system has them."""
        out_features, in_features = weight.shape
        data = allocate(self.packed_size(out_features, in_features), weight.dtype)
        packed = self.adopt(data, out_features, in_features, bias)
        assert weight.stride(1) == 1
        self._library.ropeway_pack(weight.data_ptr(), weight.stride(0), packed.args)
        return packed

    def adopt(self, data: Tensor, out_features: int, in_features: int, bias: Tensor | None = None) -> PackedWeight:
        """What `pack` made earlier (a PackedWeight's ``data``, perhaps mapped from a file), used as it is."""
        assert data.numel() == self.packed_size(out_features, in_features), "packed for another layout"
        if bias is not None:
            bias = bias.float().contiguous()
        args = _LinearArgs(
            data.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out_features,
            in_features,
            TYPES[data.dtype],
            self.panel,
        )
        return PackedWeight(data, bias, out_features, in_features, ctypes.pointer(args))

    def linear(self, x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
        """``x @ weight.T + bias`` with float32 sums; x ``[rows, in_features]``, result ``[rows, out_features]`` in
        ``out_dtype`` (x's by default). A row's result does not depend on the other rows."""
        rows = x.shape[0]
        assert x.shape[1] == weight.in_features
        assert x.stride(1) == 1
        out = torch.empty((rows, weight.out_features), dtype=out_dtype or x.dtype)
        self._linear(
            weight.args,
            x.data_ptr(),
            TYPES[x.dtype],
            rows,
            x.stride(0),
            out.data_ptr(),
            TYPES[out.dtype],
            weight.out_features,
        )
        return out

    def embedding(self, ids: Tensor, weight: PackedWeight) -> Tensor:
        """Rows ``ids`` ``[n]`` int64 of the unpacked weight, ``[n, in_features]``: a tied table needs no second copy."""
        out = torch.empty((ids.shape[0], weight.in_features), dtype=weight.dtype)
        self._library.ropeway_unpack_rows(weight.args, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out

    # --- attention ---

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Causal attention of a ragged batch over a paged cache that holds the step's own keys and values already.

        q ``[num_tokens, num_heads, head_dim]``, the heads of a token side by side; kv_layer ``[num_blocks, 2,
        num_kv_heads, block_size, head_dim]`` with tiles as csrc/types.h says, each block contiguous; query_start_loc
        ``[num_reqs + 1]``, seq_lens ``[num_reqs]`` and block_table ``[num_reqs, max_blocks]`` contiguous int32.
        Returns ``[num_tokens, num_heads, head_dim]``.
        """
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype)
        args = _AttentionArgs(
            q.data_ptr(),
            out.data_ptr(),
            kv_layer.data_ptr(),
            q.stride(0),
            kv_layer.stride(0),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            block_table.shape[1],
            seq_lens.shape[0],
            num_heads,
            kv_layer.shape[2],
            head_dim,
            kv_layer.shape[3],
            TYPES[q.dtype],
            TYPES[kv_layer.dtype],
            sliding_window or 0,
            scale,
            soft_cap or 0.0,
        )
        self._library.ropeway_attention(ctypes.byref(args))
        return out

    def rope_kv(
        self,
        qkv: Tensor,
        kv_layer: Tensor,
        slot_mapping: Tensor,
        *,
        num_heads: int,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Norm (if given) and rotate q in place and k, then write k and v into their slots.

        qkv ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`` contiguous; cos and sin ``[num_tokens,
        ..., rotary_dim / 2]`` contiguous float32, None for no rotation; q_norm and k_norm ``[head_dim]`` float32;
        slot_mapping ``[num_tokens]`` int64; kv_layer as in `attention`.
        """
        _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        args = _RopeKvArgs(
            qkv.data_ptr(),
            kv_layer.data_ptr(),
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            slot_mapping.data_ptr(),
            qkv.shape[0],
            kv_layer.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            0 if cos is None else 2 * cos.shape[-1],
            block_size,
            TYPES[qkv.dtype],
            TYPES[kv_layer.dtype],
            eps,
        )
        self._library.ropeway_rope_kv(ctypes.byref(args))

    # --- row by row ---

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """``norm(x) * weight``, or, with ``residual``, ``residual += x`` in place and the norm of that sum.

        x and residual ``[rows, size]`` contiguous; weight ``[size]`` float32; computed in float32, rounded once.
        """
        out = torch.empty_like(x)
        self._rms_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            TYPES[x.dtype],
            x.shape[0],
            x.shape[1],
            eps,
        )
        return out

    def rms_norm_int8(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `rms_norm` computes, before it is rounded to x's type, as int8 ``[rows, size]`` and float32 scales
        ``[rows]``: the greatest magnitude of a row is 127 steps, ties go to even. A row of zeros has scale 0; one with
        an infinity or a NaN has zeros and a scale that is not finite. ``weight`` must be finite."""
        out, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0])
        self._rms_norm_int8(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            scales.data_ptr(),
            TYPES[x.dtype],
            x.shape[0],
            x.shape[1],
            eps,
        )
        return out, scales

    def gated(self, x: Tensor, gate: int) -> Tensor:
        """``gate(x[:, :size]) * x[:, size:]`` of ``[rows, 2 * size]`` contiguous; ``gate`` is a value of GATES."""
        rows, size = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, size), dtype=x.dtype)
        self._gated(x.data_ptr(), out.data_ptr(), TYPES[x.dtype], rows, size, gate)
        return out

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Greatest value and its first index in each row of ``[rows, size]`` float32; NaN if the row holds one."""
        rows, size = logits.shape
        values, indices = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self._library.ropeway_argmax(
            logits.data_ptr(), rows, size, logits.stride(0), values.data_ptr(), indices.data_ptr()
        )
        return values, indices

    # --- sampling ---

    def penalise(
        self,
        logits: Tensor,
        rows: Tensor,
        slots: Tensor,
        *,
        presence: Tensor,
        frequency: Tensor,
        repetition: Tensor,
        output_counts: Tensor,
        in_prompt: Tensor,
    ) -> None:
        """Penalties in place on ``rows`` ``[n]`` int64 of ``[lines, vocab]`` float32 logits.

        presence, frequency and repetition ``[n, 1]`` float32; ``slots`` ``[n]`` int64 are the rows' lines in
        output_counts ``[*, vocab]`` int32 and in_prompt ``[*, vocab]`` bool.
        """
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        args = _PenaliseArgs(
            logits.data_ptr(),
            _data(rows, torch.int64),
            _data(slots, torch.int64),
            _data(presence, torch.float32),
            _data(frequency, torch.float32),
            _data(repetition, torch.float32),
            _data(output_counts, torch.int32),
            _data(in_prompt, torch.bool),
            rows.shape[0],
            logits.shape[1],
            logits.stride(0),
        )
        self._library.ropeway_penalise(ctypes.byref(args))

    def sample(
        self,
        logits: Tensor,
        best: Tensor,
        token_ids: Tensor,
        rows: Tensor,
        *,
        temperature: Tensor,
        noise_keys: Tensor,
        filtered: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
    ) -> None:
        """Draw tokens for ``rows`` ``[n]`` int64 of ``[lines, vocab]`` float32 logits, to replace theirs in ``token_ids``.

        best ``[lines]`` and token_ids ``[lines]`` are what `argmax` gave; a row whose best is not finite keeps its token.
        temperature ``[n, 1]`` float32, noise_keys ``[n, 2]`` int32. ``filtered`` ``[m]`` int64 says which of the n
        have filters: top_k ``[m, 1]`` int64 (the vocabulary size for no bound), top_p and min_p ``[m, 1]`` float32.
        """
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        args = _SampleArgs(
            logits.data_ptr(),
            _data(best, torch.float32),
            _data(token_ids, torch.int64),
            _data(rows, torch.int64),
            _data(temperature, torch.float32),
            _data(noise_keys, torch.int32),
            _data(filtered, torch.int64),
            _data(top_k, torch.int64),
            _data(top_p, torch.float32),
            _data(min_p, torch.float32),
            rows.shape[0],
            0 if filtered is None else filtered.shape[0],
            logits.shape[1],
            logits.stride(0),
        )
        self._library.ropeway_sample(ctypes.byref(args))

    # --- what the machine gives, for benchmarks ---

    def peak(self, iterations: int = 10_000_000) -> float:
        """Operations per second, two per multiply-add: of bf16 pairs where the processor multiplies those, of float32
        where bf16 is widened first. One sample; takes a fraction of a second."""
        return float(self._library.ropeway_peak(iterations))

    def read_rate(self, memory: Tensor) -> float:
        """Bytes per second of reading ``memory`` (from 1 MB up, contiguous) once with all threads."""
        return float(self._library.ropeway_read_rate(memory.data_ptr(), memory.numel() * memory.element_size()))


def _data(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
    """Where a contiguous tensor of this type lies."""
    if tensor is None:
        return None
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def allocate(count: int, dtype: torch.dtype) -> Tensor:
    """``[count]`` zeros on pages of 2 MB where the system grants them: long streams then miss fewer translations. Memory
    that was never touched takes neither time nor space."""
    size = max(1, math.ceil(count * dtype.itemsize / _HUGE_PAGE)) * _HUGE_PAGE
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count)


@functools.cache
def _open() -> tuple[NativeKernels | None, str]:
    if not _LIBRARY.exists():
        return None, "the package was installed without a C++ compiler"
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        return None, f"the library does not load: {error}"
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted is not None and wanted not in ISAS:
        raise ValueError(f"{ISA_VARIABLE}={wanted}: must be one of {', '.join(ISAS)}")
    library.ropeway_select.argtypes = (ctypes.c_char_p,)
    library.ropeway_select.restype = ctypes.c_char_p
    chosen = library.ropeway_select(wanted.encode() if wanted else None)
    if chosen is None:
        raise ValueError(f"{ISA_VARIABLE}={wanted}: this processor or this build does not have it")
    kernels = NativeKernels(library, chosen.decode())
    kernels.set_num_threads(torch.get_num_threads())
    return kernels, ""


def load() -> NativeKernels | None:
    """The kernels, or None. Raises ValueError if the environment asks for an instruction set that is not there."""
    return _open()[0]


def why_not() -> str:
    """Why `load` returned None."""
    return _open()[1]


__all__ = [
    "FEATURES",
    "GATES",
    "ISAS",
    "ISA_VARIABLE",
    "TYPES",
    "NativeKernels",
    "PackedWeight",
    "allocate",
    "load",
    "why_not",
]
