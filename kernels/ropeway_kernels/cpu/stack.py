"""A decoder from the embeddings to the last norm as one native call.

Owns: the mirror of Layer, Stack and StackStep in csrc/types.h. Must not know: checkpoints, embeddings, logits.
Called by: model.decoder, which describes its layers once and then calls `run` for every step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropeway_kernels.cpu import GATES, TYPES, NativeKernels, PackedWeight, _LinearArgs

MAX_ROTARIES = 2
KINDS = ("linear", "attention", "rope_kv", "norm", "gate")  # of kernels; Kind in csrc/stack.cpp


class _LayerArgs(ctypes.Structure):
    _fields_ = (
        ("qkv", _LinearArgs),
        ("out", _LinearArgs),
        ("gate_up", _LinearArgs),
        ("down", _LinearArgs),
        ("attention_norm", ctypes.c_void_p),
        ("attention_out_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("mlp_out_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("rotary", ctypes.c_int32),
        ("sliding_window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class _StackArgs(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_LayerArgs)),
        ("norm", ctypes.c_void_p),
        ("cos", ctypes.c_void_p * MAX_ROTARIES),
        ("sin", ctypes.c_void_p * MAX_ROTARIES),
        ("num_layers", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("intermediate_size", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("kv_type", ctypes.c_int32),
        ("gate", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class _StepArgs(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("max_blocks", ctypes.c_int64),
        ("num_reqs", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_indices", ctypes.c_int64),
    )


@dataclass(frozen=True)
class StackLayer:
    """One layer's weights and constants. Norm weights are float32; None where the architecture has no such norm."""

    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    attention_norm: Tensor
    mlp_norm: Tensor
    attention_out_norm: Tensor | None
    mlp_out_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    rotary: int  # index into the tables given to `set_angles`, below MAX_ROTARIES
    sliding_window: int | None
    scale: float
    soft_cap: float | None


class LayerStack:
    """Layers bound to their KV caches."""

    def __init__(
        self,
        native: NativeKernels,
        layers: Sequence[StackLayer],
        norm: Tensor,
        kv_layers: Sequence[Tensor],
        *,
        gate: str,
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        """norm ``[hidden_size]`` float32: after the last layer. kv_layers: one ``[num_blocks, 2, num_kv_heads,
        block_size, head_dim]`` per layer, all with the same strides. dtype: of hidden states."""
        self._layers = (_LayerArgs * len(layers))(
            *(_layer_args(layer, kv_layer) for layer, kv_layer in zip(layers, kv_layers, strict=True))
        )
        # The arguments are bare addresses into these.
        self._kept = (layers, norm, kv_layers)
        self._angles: Sequence[tuple[Tensor, Tensor]] = ()
        _, _, num_kv_heads, block_size, head_dim = kv_layers[0].shape
        self._args = _StackArgs(
            layers=self._layers,
            num_layers=len(layers),
            norm=norm.data_ptr(),
            hidden_size=layers[0].qkv.in_features,
            intermediate_size=layers[0].down.in_features,
            block_stride=kv_layers[0].stride(0),
            num_heads=layers[0].out.in_features // head_dim,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            type=TYPES[dtype],
            kv_type=TYPES[kv_layers[0].dtype],
            gate=GATES[gate],
            eps=eps,
        )
        self._run = native.function("stack", (ctypes.c_void_p, ctypes.c_void_p))
        self.num_positions = 0

    def set_angles(self, angles: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Before the first step, and whenever a position may reach ``num_positions``. angles: cos and sin per rotary,
        each ``[num_positions, rotary_dim / 2]`` contiguous float32, one line for each position."""
        self._angles = angles
        self.num_positions, half = angles[0][0].shape
        for rotary, (cos, sin) in enumerate(angles):
            self._args.cos[rotary], self._args.sin[rotary] = cos.data_ptr(), sin.data_ptr()
        self._args.rotary_dim = 2 * half

    def run(
        self,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        indices: Tensor,
    ) -> Tensor:
        """One step of all layers; the step's keys and values are written to the caches.

        hidden ``[num_tokens, hidden_size]`` contiguous: the embeddings, used up. positions ``[num_tokens]`` and indices
        ``[n]`` contiguous int64. The others as NativeKernels.attention and rope_kv take them. Returns ``[n,
        hidden_size]``: the last norm of the tokens ``indices``.
        """
        num_tokens, hidden_size = hidden.shape
        out = torch.empty((indices.shape[0], hidden_size), dtype=hidden.dtype)
        step = _StepArgs(
            hidden.data_ptr(),
            out.data_ptr(),
            positions.data_ptr(),
            indices.data_ptr(),
            slot_mapping.data_ptr(),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            block_table.shape[1],
            seq_lens.shape[0],
            num_tokens,
            out.shape[0],
        )
        self._run(ctypes.byref(self._args), ctypes.byref(step))
        return out


def stack_seconds(native: NativeKernels) -> dict[str, float]:
    """Seconds that all stacks of this process have spent so far in each kind of kernel."""
    seconds = (ctypes.c_double * len(KINDS))()
    native.function("stack_seconds", (ctypes.c_void_p,))(ctypes.addressof(seconds))
    return dict(zip(KINDS, seconds, strict=True))


def _layer_args(layer: StackLayer, kv_layer: Tensor) -> _LayerArgs:
    def address(weight: Tensor | None) -> int | None:
        return None if weight is None else weight.data_ptr()

    return _LayerArgs(
        layer.qkv.args.contents,
        layer.out.args.contents,
        layer.gate_up.args.contents,
        layer.down.args.contents,
        address(layer.attention_norm),
        address(layer.attention_out_norm),
        address(layer.mlp_norm),
        address(layer.mlp_out_norm),
        address(layer.q_norm),
        address(layer.k_norm),
        kv_layer.data_ptr(),
        layer.rotary,
        layer.sliding_window or 0,
        layer.scale,
        layer.soft_cap or 0.0,
    )


__all__ = ["MAX_ROTARIES", "LayerStack", "StackLayer", "stack_seconds"]
