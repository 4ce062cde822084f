"""The layers of the decoder, split over a process group, each knowing which checkpoint tensors fill it.

Owns: linears, embedding, head, norm, activations; Slot. Must not know: architectures, files, attention.
Called by: model.decoder (builds and runs them), model.loader (fills their slots, then finalize).

Life of a layer: built with memory of undefined content, filled through `slots`, then `finalize` once, then run. With
native kernels (`Placement.native`) a layer runs on them, otherwise on torch alone, where `Placement.triton` says so with
norms and gates by Triton kernels; all mean the same. On native kernels `finalized` gives what a layer has become, by
name, and `adopt` puts that into a new one, instead of the first two steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropeway.model.parallel import ProcessGroup
from ropeway_kernels.cpu import GATES, NativeKernels, PackedWeight

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass
class Slot:
    """Where one checkpoint tensor goes: ``pieces`` are (part of a parameter, first row or column of it in the tensor
    along ``dim``). A rank's pieces cover its own share only."""

    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    pieces: list[tuple[Tensor, int]]
    dim: int = 0
    filled: bool = False

    def load(self, tensor: Tensor) -> None:
        """Copy this rank's share, converting the type. ``tensor`` has ``shape``."""
        for part, start in self.pieces:
            stop = min(start + part.shape[self.dim], self.shape[self.dim])  # a padded vocabulary ends early
            if stop > start:
                part.narrow(self.dim, 0, stop - start).copy_(tensor.narrow(self.dim, start, stop - start))
        self.filled = True


Slots = dict[str, Slot]


class Finalized:
    """One layer's finalized tensors by name, as they were kept."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self._tensors = tensors
        self._prefix = prefix

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Raises ValueError if it is not there or is not like that."""
        tensor = self._tensors.get(f"{self._prefix}.{name}")
        if tensor is None or tensor.shape != torch.Size(shape) or tensor.dtype != dtype:
            raise ValueError(f"no {self._prefix}.{name} of shape {list(shape)} and type {dtype}")
        return tensor


@dataclass(frozen=True)
class Placement:
    """Where a rank's weights live and in which type."""

    dtype: torch.dtype
    device: torch.device
    group: ProcessGroup
    native: NativeKernels | None = None  # kernels for this device and type, where there are any
    triton: bool = False  # norms and gates by Triton kernels; without ``native`` only

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)

    # Triton is imported only where it is wanted: it is not there on every machine, and is slow to import.

    def norm_kernel(self) -> Callable[..., Tensor] | None:
        """``(x [rows, size], weight [size] float32, eps, residual [rows, size] or none) -> [rows, size]``"""
        if self.native is not None:
            return self.native.rms_norm
        if self.triton:
            from ropeway_kernels.norm import rms_norm

            return rms_norm
        return None

    def gate_kernel(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """``[rows, 2 * size] -> [rows, size]``"""
        if self.native is not None:
            return functools.partial(self.native.gated, gate=GATES[activation])
        if self.triton:
            from ropeway_kernels.activation import gated

            return functools.partial(gated, gate=activation)
        return None


class Linear(nn.Module):
    """``x @ weight.T + bias`` on this rank's weight ``[out_features, in_features]``, packed once for the kernels."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, place: Placement) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = weight
        self.bias = bias
        self.native = place.native
        self.packed: PackedWeight | None = None  # by the native kernels, bias included
        self._reordered: Tensor | None = None  # by oneDNN

    def finalize(self) -> None:
        """Bring the weight into the layout that is read at each call, and drop the plain one. oneDNN would otherwise
        do that each time; where it has no kernel (no bf16 units, other devices) the weight stays as it is."""
        assert self.weight is not None
        if self.native is not None and self.native.can_pack(self.weight):
            self.packed = self.native.pack(self.weight.detach(), self.bias)
            self.weight = None
            return
        if self.weight.device.type != "cpu":
            return
        try:
            self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        except (RuntimeError, AttributeError):  # no kernel for this type; torch built without oneDNN
            return
        self.weight = None

    def finalized(self) -> dict[str, Tensor] | None:
        """None if it is in a form that only this process can read."""
        if self.packed is None:
            return None
        return {"packed": self.packed.data} | ({} if self.packed.bias is None else {"bias": self.packed.bias})

    def adopt(self, state: Finalized) -> None:
        assert self.native is not None
        assert self.weight is not None
        out_features, in_features = self.weight.shape
        size = self.native.packed_size(out_features, in_features)
        bias = None if self.bias is None else state.take("bias", [out_features], torch.float32)
        self.packed = self.native.adopt(
            state.take("packed", [size], self.weight.dtype), out_features, in_features, bias
        )
        self.weight = self.bias = None

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """``[num_tokens, in_features]`` -> ``[num_tokens, out_features]`` in ``out_dtype``, by default x's."""
        if self.packed is not None:
            assert self.native is not None
            return self.native.linear(x, self.packed, out_dtype)
        if self._reordered is not None:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._reordered, self.bias, "none", [], "")
        else:
            assert self.weight is not None
            y = F.linear(x, self.weight, self.bias)
        return y if out_dtype is None else y.to(out_dtype)


class ColumnParallelLinear(Linear):
    """One or several linears over the same input, their outputs side by side; each is split by output over the ranks.

    out_features: the whole width of each part. A rank's output is its share of part 0, then of part 1, ...
    """

    def __init__(self, in_features: int, out_features: Sequence[int], *, bias: bool, place: Placement) -> None:
        local_sizes = [place.group.share(size, "layer width") for size in out_features]
        total = sum(local_sizes)
        super().__init__(place.empty(total, in_features), place.empty(total) if bias else None, place)
        self.out_features = tuple(out_features)
        self.local_sizes = local_sizes
        self.rank = place.group.rank

    def slots(self, names: Sequence[str]) -> Slots:
        """``names``: one per part, or a single one if the checkpoint holds the parts merged."""
        result: Slots = {}
        for suffix, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is None:
                continue
            tail = tuple(parameter.shape[1:])
            parts = torch.split(parameter, self.local_sizes)
            shares = [self.rank * size for size in self.local_sizes]
            if len(names) == len(parts):
                for name, size, part, share in zip(names, self.out_features, parts, shares, strict=True):
                    result[f"{name}.{suffix}"] = Slot((size, *tail), [(part, share)])
            else:
                (name,) = names
                pieces, offset = [], 0
                for size, part, share in zip(self.out_features, parts, shares, strict=True):
                    pieces.append((part, offset + share))
                    offset += size
                result[f"{name}.{suffix}"] = Slot((offset, *tail), pieces)
        return result


class RowParallelLinear(Linear):
    """A linear whose input is split over the ranks; the ranks' partial results are added up."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, place: Placement) -> None:
        local = place.group.share(in_features, "layer width")
        super().__init__(place.empty(out_features, local), place.empty(out_features) if bias else None, place)
        self.in_features = in_features
        self.group = place.group

    def slots(self, name: str) -> Slots:
        assert self.weight is not None
        out_features, local = self.weight.shape
        shape = (out_features, self.in_features)
        result = {f"{name}.weight": Slot(shape, [(self.weight, self.group.rank * local)], dim=1)}
        if self.bias is not None:
            result[f"{name}.bias"] = Slot((out_features,), [(self.bias, 0)])
        return result

    def finalize(self) -> None:
        if self.bias is not None and self.group.rank > 0:
            self.bias.zero_()  # added once, by rank 0
        super().finalize()

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.group.all_reduce(super().forward(x, out_dtype))


class VocabParallelEmbedding(nn.Module):
    """Token id -> hidden state; the rows of the table are split over the ranks, the last rank's padded with zeros."""

    def __init__(self, vocab_size: int, hidden_size: int, *, place: Placement) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = place.group
        self.native = place.native
        self.rows = -(-vocab_size // self.group.size)
        self.start = self.group.rank * self.rows
        self.weight: nn.Parameter | None = self.new_table(hidden_size, place)
        self.packed: PackedWeight | None = None  # a tied head's: one table in memory serves both

    def new_table(self, hidden_size: int, place: Placement) -> nn.Parameter:
        """``[rows, hidden_size]``, its padding zero and the rest of undefined content."""
        table = place.empty(self.rows, hidden_size)
        table[max(self.vocab_size - self.start, 0) :].zero_()
        return table

    def slots(self, name: str) -> Slots:
        assert self.weight is not None
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{name}.weight": Slot(shape, [(self.weight, self.start)])}

    def finalized(self) -> dict[str, Tensor]:
        return {} if self.weight is None else {"weight": self.weight}

    def adopt(self, state: Finalized) -> None:
        """Not for one whose table a tied head has: the head's `adopt` gives it."""
        assert self.weight is not None
        self.weight = nn.Parameter(state.take("weight", self.weight.shape, self.weight.dtype), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[num_tokens]`` -> ``[num_tokens, hidden_size]``"""
        if self.group.size == 1:
            return self._look_up(input_ids)
        local = input_ids - self.start
        mine = (local >= 0) & (local < self.rows)
        hidden = self._look_up(local.where(mine, 0)) * mine[:, None]
        return self.group.all_reduce(hidden)

    def _look_up(self, local_ids: Tensor) -> Tensor:
        if self.packed is not None:
            assert self.native is not None
            return self.native.embedding(local_ids, self.packed)
        assert self.weight is not None
        return F.embedding(local_ids, self.weight)


class VocabParallelHead(Linear):
    """Hidden state -> logits of the whole vocabulary on every rank. A tied head shares the embedding's table."""

    def __init__(self, embedding: VocabParallelEmbedding, *, tied: bool, place: Placement) -> None:
        table = embedding.weight
        assert table is not None
        super().__init__(table if tied else embedding.new_table(table.shape[1], place), None, place)
        self.vocab_size = embedding.vocab_size
        self.start = embedding.start
        self.group = embedding.group
        self._tied = (embedding,) if tied else ()  # in a tuple: it is not a part of this module

    def slots(self, name: str) -> Slots:
        assert self.weight is not None
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{name}.weight": Slot(shape, [(self.weight, self.start)])}

    def finalize(self) -> None:
        super().finalize()
        if self.packed is not None:
            self._share()

    def adopt(self, state: Finalized) -> None:
        super().adopt(state)
        self._share()

    def _share(self) -> None:
        for embedding in self._tied:
            embedding.packed, embedding.weight = self.packed, None

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = torch.float32) -> Tensor:
        """``[num_rows, hidden_size]`` -> ``[num_rows, vocab_size]``"""
        logits = self.group.all_gather(super().forward(x, out_dtype))
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 (arXiv 1910.07467). ``plus_one``: Gemma's form, where the file holds w - 1 and
    the product is rounded once, after the weight. The others round before it, too, in torch; kernels never do.
    """

    def __init__(self, size: int, eps: float, *, plus_one: bool, place: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.plus_one = plus_one
        self._kernel = place.norm_kernel()
        self.weight = place.empty(size, dtype=torch.float32 if plus_one else None)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(tuple(self.weight.shape), [(self.weight, 0)])}

    def finalize(self) -> None:
        if self.plus_one:
            self.weight.add_(1.0)
        if self._kernel is not None:
            self.weight = nn.Parameter(self.weight.float(), requires_grad=False)

    def finalized(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def adopt(self, state: Finalized) -> None:
        self.weight = nn.Parameter(state.take("weight", self.weight.shape, torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[num_tokens, size]``, or ``[num_tokens, num_heads, size]``, -> the same shape and type."""
        if self._kernel is not None:
            return self._kernel(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.plus_one:
            return (wide * self.weight).to(x.dtype)
        return wide.to(x.dtype) * self.weight

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum): a block's output joins the residual stream and the next block's input comes out.
        ``residual`` is used up: it may be the sum afterwards."""
        if self._kernel is not None:
            return self._kernel(x, self.weight, self.eps, residual), residual
        residual = residual + x
        return self(residual), residual


class Gate:
    """``activation(gate) * up`` of the two halves of a row."""

    def __init__(self, activation: str, place: Placement) -> None:
        self._activation = ACTIVATIONS[activation]
        self._kernel = place.gate_kernel(activation)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """``[num_tokens, 2 * size]`` -> ``[num_tokens, size]``"""
        if self._kernel is not None:
            return self._kernel(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate) * up
