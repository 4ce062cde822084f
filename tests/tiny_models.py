"""Tiny random checkpoints of every architecture, the reference's answer for them, and ours through a paged cache."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ropeway.attention.base import AttentionBackend, AttentionMetadata
from ropeway.attention.cpu import CpuAttention
from ropeway.attention.torch_ref import TorchAttention
from ropeway.model.decoder import Decoder
from ropeway.model.loader import load_model
from ropeway.model.parallel import SINGLE, ProcessGroup
from ropeway.model.registry import parse_config

SIZES: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}


def save_checkpoint(folder: Path, config: Any, *, seed: int = 0, **save: Any) -> Any:
    """A reference model with every parameter random, saved to ``folder``; returns it.

    The library's own start values would hide faults: norms of one, biases of zero and logits too small to differ.
    """
    cls = getattr(transformers, config.architectures[0])
    model = cls._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.5 * noise)
            else:
                sharp = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0
                parameter.copy_(noise * sharp / math.sqrt(parameter.shape[-1]))
    if config.tie_word_embeddings:
        model.tie_weights()
    model.save_pretrained(folder, **save)
    return model


def tiny(architecture: str, **changes: Any) -> Any:
    """A transformers config of that architecture at `SIZES`, with ``changes``."""
    cls = getattr(transformers, architecture).config_class
    return cls(**{**SIZES, **changes, "architectures": [architecture]})


def edit_config(folder: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Rewrite keys of the folder's config.json."""
    path = folder / "config.json"
    table = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in table.items() if key not in drop}))


def load(folder: Path, *, max_model_len: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    """``native=`` gives the kernels to run on; without it, torch."""
    config = parse_config(json.loads((folder / "config.json").read_text()), max_model_len)
    values: dict[str, Any] = {"load_format": "auto", "seed": 0, "group": SINGLE} | options
    return load_model(folder, config, dtype=dtype, device=torch.device("cpu"), **values)


@dataclass
class Answer:
    tokens: list[int]
    logits: Tensor  # [steps, vocab_size]


@torch.inference_mode()
def reference_answer(model: Any, prompt: list[int], steps: int) -> Answer:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Answer(out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits))


def backend_of(decoder: Decoder, block_size: int) -> AttentionBackend:
    """Attention by the kernels that the decoder's layers run on."""
    native = decoder.native
    if native is not None and CpuAttention.supports(native, block_size, decoder.config.head_dim):
        return CpuAttention(native, block_size)
    return TorchAttention(block_size)


@torch.inference_mode()
def paged_answers(
    decoder: Decoder,
    prompts: list[list[int]],
    steps: int,
    *,
    block_size: int | None = None,
    chunk: int = 7,
    group: ProcessGroup = SINGLE,
) -> list[Answer]:
    """Greedy continuation of all prompts in one ragged batch: prompts in chunks, each row decoding as soon as it can."""
    config = decoder.config
    block_size = block_size or (8 if decoder.native else 4)
    backend = backend_of(decoder, block_size)
    blocks_per_row = -(-(max(map(len, prompts)) + steps) // block_size)
    num_blocks = 1 + blocks_per_row * len(prompts)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(5)) + 1
    table = order.view(len(prompts), blocks_per_row)
    shape = backend.kv_shape(num_blocks, block_size, config.num_kv_heads // group.size, config.head_dim)
    caches = [torch.zeros(shape, dtype=decoder.dtype) for _ in range(config.num_layers)]
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for _ in range(steps + -(-max(map(len, prompts)) // chunk)):
        rows = [i for i, prompt in enumerate(prompts) if len(known[i]) < len(prompt) + steps]
        counts = [min(chunk, len(known[i]) - computed[i]) for i in rows]
        if not rows:
            break
        ends = [computed[i] + count for i, count in zip(rows, counts, strict=True)]
        positions = torch.cat([torch.arange(computed[i], end) for i, end in zip(rows, ends, strict=True)])
        row_of_token = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts))
        starts = torch.tensor([0, *counts]).cumsum(0)
        meta = AttentionMetadata(
            query_start_loc=starts.int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_table=table[rows].int(),
            slot_mapping=table[row_of_token, positions // block_size] * block_size + positions % block_size,
            num_reqs=len(rows),
            num_tokens=len(positions),
            max_query_len=max(counts),
            max_seq_len=max(ends),
        )
        ids = torch.tensor([token for i, end in zip(rows, ends, strict=True) for token in known[i][computed[i] : end]])
        last = starts[1:] - 1
        out = decoder(ids, positions, caches, backend, backend.prepare(meta), last)
        for line, (i, end) in enumerate(zip(rows, ends, strict=True)):
            computed[i] = end
            if end == len(known[i]):
                logits[i].append(out[line])
                known[i].append(int(out[line].argmax()))
    return [
        Answer(tokens[len(prompt) :], torch.stack(lines))
        for tokens, prompt, lines in zip(known, prompts, logits, strict=True)
    ]


def random_prompts(*lengths: int, vocab_size: int = SIZES["vocab_size"], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
