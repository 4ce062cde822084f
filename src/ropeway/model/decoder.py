"""The one decoder: Llama, Mistral, Qwen2, Qwen3, Phi-3 and Gemma 3 by the flags of DecoderConfig.

Owns: the order of the layers, and which checkpoint tensor each one wants. Must not know: requests, sampling, files.
Called by: worker.runner (forward), model.loader (slots, finalize).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ropeway.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, Rotation
from ropeway.attention.cpu import CpuAttention
from ropeway.model.layers import (
    ColumnParallelLinear,
    Finalized,
    Gate,
    Linear,
    Placement,
    RMSNorm,
    RowParallelLinear,
    Slots,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from ropeway.model.registry import DecoderConfig
from ropeway.model.rotary import Rotary, rotate
from ropeway_kernels.cpu.stack import MAX_ROTARIES, LayerStack, StackLayer


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, index: int, place: Placement) -> None:
        super().__init__()
        self.num_heads = place.group.share(config.num_heads, "attention heads")
        self.num_kv_heads = place.group.share(config.num_kv_heads, "key-value heads")
        self.head_dim = config.head_dim
        self.fused_checkpoint = config.fused_checkpoint
        self.spec = AttentionSpec(config.attention_scale, config.sliding_windows[index], config.attention_soft_cap)
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, (width, kv_width, kv_width), bias=config.qkv_bias, place=place
        )
        self.o_proj = RowParallelLinear(width, config.hidden_size, bias=config.output_bias, place=place)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps, plus_one=config.gemma_norms, place=place)
            if config.qk_norm
            else None
            for _ in range(2)
        )

    def slots(self, name: str) -> Slots:
        parts = ["qkv_proj"] if self.fused_checkpoint else ["q_proj", "k_proj", "v_proj"]
        slots = self.qkv_proj.slots([f"{name}.{part}" for part in parts]) | self.o_proj.slots(f"{name}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            slots |= self.q_norm.slots(f"{name}.q_norm") | self.k_norm.slots(f"{name}.k_norm")
        return slots

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_layer: Tensor,
        backend: AttentionBackend,
        meta: AttentionMetadata,
    ) -> Tensor:
        """``[num_tokens, hidden_size]`` -> the same shape; writes the tokens' keys and values to ``kv_layer``."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [num_tokens, q then k then v heads, head_dim]
        if (fused := getattr(backend, "forward_fused", None)) is not None:
            rotation = Rotation(*angles)
            if self.q_norm is not None and self.k_norm is not None:
                rotation = Rotation(*angles, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
            out = fused(heads, rotation, kv_layer, meta, self.spec)
            projected: Tensor = self.o_proj(out.view(x.shape[0], -1))
            return projected
        q_k, v = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(q_k, [self.num_heads, self.num_kv_heads], dim=1)
            q_k = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        q, k = torch.split(rotate(q_k, *angles), [self.num_heads, self.num_kv_heads], dim=1)
        out = backend.forward(q, k, v, kv_layer, meta, self.spec)
        result: Tensor = self.o_proj(out.reshape(x.shape[0], -1))
        return result


class MLP(nn.Module):
    """Gated: ``down(act(gate(x)) * up(x))``"""

    def __init__(self, config: DecoderConfig, place: Placement) -> None:
        super().__init__()
        self.fused_checkpoint = config.fused_checkpoint
        self.gate = Gate(config.activation, place)
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, (config.intermediate_size,) * 2, bias=config.mlp_bias, place=place
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias, place=place
        )

    def slots(self, name: str) -> Slots:
        parts = ["gate_up_proj"] if self.fused_checkpoint else ["gate_proj", "up_proj"]
        return self.gate_up_proj.slots([f"{name}.{part}" for part in parts]) | self.down_proj.slots(f"{name}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.gate(self.gate_up_proj(x)))
        return result


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, index: int, place: Placement) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            eps, plus_one = config.rms_norm_eps, config.gemma_norms
            return RMSNorm(config.hidden_size, eps, plus_one=plus_one, place=place)

        self.attention = Attention(config, index, place)
        self.mlp = MLP(config, place)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_out_norm = norm() if config.gemma_norms else None
        self.mlp_out_norm = norm() if config.gemma_norms else None

    def slots(self, name: str) -> Slots:
        slots = self.attention.slots(f"{name}.self_attn") | self.mlp.slots(f"{name}.mlp")
        slots |= self.attention_norm.slots(f"{name}.input_layernorm")
        if self.attention_out_norm is None or self.mlp_out_norm is None:
            return slots | self.mlp_norm.slots(f"{name}.post_attention_layernorm")
        return (
            slots
            | self.attention_out_norm.slots(f"{name}.post_attention_layernorm")
            | self.mlp_norm.slots(f"{name}.pre_feedforward_layernorm")
            | self.mlp_out_norm.slots(f"{name}.post_feedforward_layernorm")
        )

    def native_parts(self, rotary: int) -> StackLayer | None:
        """What `forward` does, for the native stack; None if a linear is not packed."""
        attention, mlp = self.attention, self.mlp
        qkv, out = attention.qkv_proj.packed, attention.o_proj.packed
        gate_up, down = mlp.gate_up_proj.packed, mlp.down_proj.packed
        if qkv is None or out is None or gate_up is None or down is None:
            return None

        def weight(norm: RMSNorm | None) -> Tensor | None:
            return None if norm is None else norm.weight

        return StackLayer(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            attention_norm=self.attention_norm.weight,
            mlp_norm=self.mlp_norm.weight,
            attention_out_norm=weight(self.attention_out_norm),
            mlp_out_norm=weight(self.mlp_out_norm),
            q_norm=weight(attention.q_norm),
            k_norm=weight(attention.k_norm),
            rotary=rotary,
            sliding_window=attention.spec.sliding_window,
            scale=attention.spec.scale,
            soft_cap=attention.spec.soft_cap,
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: tuple[Tensor, Tensor],
        kv_layer: Tensor,
        backend: AttentionBackend,
        meta: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """``x`` is the last layer's output, not yet added to ``residual``; so are the two that are returned."""
        x, residual = (self.attention_norm(x), x) if residual is None else self.attention_norm.add(x, residual)
        x = self.attention(x, angles, kv_layer, backend, meta)
        if self.attention_out_norm is not None:
            x = self.attention_out_norm(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x)
        if self.mlp_out_norm is not None:
            x = self.mlp_out_norm(x)
        return x, residual


class Decoder(nn.Module):
    """Weights of one rank, undefined until the loader has filled every slot and called `finalize`."""

    def __init__(self, config: DecoderConfig, place: Placement) -> None:
        super().__init__()
        self.config = config
        self.dtype = place.dtype
        self.native = place.native
        self._stackable = place.native is not None and place.group.size == 1
        self._stack: tuple[int, LayerStack] | None = None  # with the address of the cache that it is bound to
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, place=place)
        self.layers = nn.ModuleList(DecoderLayer(config, index, place) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, plus_one=config.gemma_norms, place=place)
        self.head = VocabParallelHead(self.embedding, tied=config.tie_word_embeddings, place=place)
        self.rotaries = [Rotary(spec, place.device) for spec in dict.fromkeys(config.ropes)]
        kinds = {rotary.spec: index for index, rotary in enumerate(self.rotaries)}
        self.rotary_of_layer = [kinds[spec] for spec in config.ropes]
        # The reference rounds the factor to the weights' type before it multiplies.
        scale = config.embedding_scale
        self.embedding_scale = None if scale is None else torch.tensor(scale, dtype=place.dtype).item()

    def slots(self) -> Slots:
        """Every tensor the checkpoint must hold, under its Hugging Face name. Only before `finalize`."""
        slots = self.embedding.slots("model.embed_tokens") | self.norm.slots("model.norm")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots |= layer.slots(f"model.layers.{index}")
        if not self.config.tie_word_embeddings:
            slots |= self.head.slots("lm_head")
        return slots

    def finalize(self) -> None:
        """Once, after loading: bring the weights into the form in which they run."""
        for module in self.modules():
            if isinstance(module, Linear | RMSNorm):
                module.finalize()

    def finalized(self) -> dict[str, Tensor] | None:
        """Every tensor that `finalize` left, by name, so that `adopt` can put them into a new decoder of the same kind;
        None where a layer does not run on native kernels. Read them only."""
        result: dict[str, Tensor] = {}
        for path, layer in self._weighted():
            tensors = layer.finalized()
            if tensors is None:
                return None
            result |= {f"{path}.{name}": tensor.detach() for name, tensor in tensors.items()}
        return result

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Instead of loading and `finalize`. ``tensors`` may be read-only. Raises ValueError if they are not those of a
        decoder of this kind; it is of no use then."""
        for path, layer in self._weighted():
            layer.adopt(Finalized(tensors, path))

    def _weighted(self) -> Iterator[tuple[str, Linear | RMSNorm | VocabParallelEmbedding]]:
        """Every layer with weights of its own, and its name."""
        for path, module in self.named_modules():
            if module is self.embedding and self.config.tie_word_embeddings:
                continue
            if isinstance(module, Linear | RMSNorm | VocabParallelEmbedding):
                yield path, module

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_layers: list[Tensor],
        backend: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor,
    ) -> Tensor:
        """One step of a ragged batch.

        input_ids, positions ``[num_tokens]``; kv_layers: one cache per layer; meta: prepared by ``backend``;
        logits_indices ``[num_sampled]``: the tokens whose next token is wanted.
        Returns logits ``[num_sampled, vocab_size]`` float32.
        """
        return self.logits(self.hidden(input_ids, positions, kv_layers, backend, meta, logits_indices))

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_layers: list[Tensor],
        backend: AttentionBackend,
        meta: AttentionMetadata,
        indices: Tensor,
    ) -> Tensor:
        """The same step as far as the last norm: ``[len(indices), hidden_size]``, of the tokens ``indices``."""
        x = self.embedding(input_ids)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        stack = self._native_stack(kv_layers, backend)
        if stack is not None:
            if meta.max_seq_len > stack.num_positions:
                # Twice as many as needed now, so that this is rare however long a sequence becomes.
                stack.set_angles([rotary.table(2 * meta.max_seq_len) for rotary in self.rotaries])
            return stack.run(
                x, positions, meta.slot_mapping, meta.query_start_loc, meta.seq_lens, meta.block_table, indices
            )
        x, residual = self._run_layers(x, positions, kv_layers, backend, meta)
        x, _ = self.norm.add(x[indices], residual[indices])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, hidden_size]`` of `hidden` to ``[n, vocab_size]`` float32."""
        logits: Tensor = self.head(hidden)
        if (cap := self.config.logits_soft_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def _run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        kv_layers: list[Tensor],
        backend: AttentionBackend,
        meta: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        angle_type = torch.float32 if hasattr(backend, "forward_fused") else self.dtype
        angles = [rotary.angles(positions, angle_type) for rotary in self.rotaries]
        residual: Tensor | None = None
        for layer, rotary, kv_layer in zip(self.layers, self.rotary_of_layer, kv_layers, strict=True):
            x, residual = layer(x, residual, angles[rotary], kv_layer, backend, meta)
        assert residual is not None
        return x, residual

    def _native_stack(self, kv_layers: list[Tensor], backend: AttentionBackend) -> LayerStack | None:
        """All layers and the last norm as one native call, where every part of them is native: the same kernels in the
        same order as `_run_layers`, without Python between them."""
        if not self._stackable or not isinstance(backend, CpuAttention):
            return None
        address = kv_layers[0].data_ptr()
        if self._stack is None or self._stack[0] != address:
            layers = []
            for layer, rotary in zip(self.layers, self.rotary_of_layer, strict=True):
                assert isinstance(layer, DecoderLayer)
                if (parts := layer.native_parts(rotary)) is not None:
                    layers.append(parts)
            one_width = len({rotary.spec.rotary_dim for rotary in self.rotaries}) == 1
            if len(layers) < len(self.layers) or not one_width or len(self.rotaries) > MAX_ROTARIES:
                self._stackable = False
                return None
            config = self.config
            assert self.native is not None
            stack = LayerStack(
                self.native,
                layers,
                self.norm.weight,
                kv_layers,
                gate=config.activation,
                eps=config.rms_norm_eps,
                dtype=self.dtype,
            )
            self._stack = address, stack
        return self._stack[1]
