"""Small GGUF files for tests: a tiny random Hugging Face model, written the way llama.cpp's converter writes one.

Owns: the layout of the files, written here a second time and the other way round, so that it checks the reader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto import AutoModelForCausalLM

VOCAB = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
VOCAB_SIZE = 288  # more rows than tokens, as in real models; whole blocks of 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True, rope_parameters=rope(100000.0), rms_norm_eps=1e-5),
    "llama-untied-biased": lambda: LlamaConfig(
        **COMMON, attention_bias=True, mlp_bias=True, head_dim=32, rope_parameters=rope(10000.0)
    ),
    "llama3": lambda: LlamaConfig(**COMMON, head_dim=64, rope_parameters=dict(LLAMA3_ROPE)),
    "qwen2": lambda: Qwen2Config(**COMMON, tie_word_embeddings=True, rope_parameters=rope(1000000.0)),
    "qwen2-yarn": lambda: Qwen2Config(
        **COMMON,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 7},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": rope(10000.0),
        },
    ),
}


def tiny_model(name: str) -> PreTrainedModel:
    """A model of CONFIGS with random weights in which every tensor matters (norms and biases too)."""
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.05
    return model


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    matrices: Type = Type.F32,
    settings: dict[str, Any] | None = None,
    drop: str = "",
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write `model` with its matrices quantised. settings: more metadata; drop: a tensor to leave out; extra: to add."""
    config = model.config
    architecture = {"llama": "llama", "qwen2": "qwen2", "gemma3_text": "gemma3"}[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    parameters = config.rope_parameters
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        parameters = parameters["full_attention"]
    writer.add_rope_freq_base(parameters["rope_theta"])
    if parameters["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(parameters["rope_type"]))
        writer.add_rope_scaling_factor(parameters["factor"])
    if parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    add_vocabulary(writer)
    for key, value in (settings or {}).items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)

    tensors = {**gguf_tensors(model, architecture), **(extra or {})}
    if parameters["rope_type"] == "llama3":
        plain = parameters["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    for name, array in tensors.items():
        if name == drop:
            continue
        kind = matrices if array.ndim == 2 else Type.F32
        data = gguf.quants.quantize(np.ascontiguousarray(array, dtype=np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """The smallest SentencePiece-like vocabulary that can spell every text."""
    special, byte, normal = gguf.TokenType.CONTROL, gguf.TokenType.BYTE, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCAB)
    writer.add_token_scores([-float(index) for index in range(len(VOCAB))])
    writer.add_token_types([gguf.TokenType.UNKNOWN, special, special] + [byte] * 256 + [normal] * (len(VOCAB) - 259))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")


def gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """Every weight under its GGUF name, in llama.cpp's layout, float32."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        array = parameter.float().numpy()
        if architecture == "llama" and "q_proj" in name:
            array = interleave(array, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            array = interleave(array, config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        tensors[target] = array
    return tensors


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """From halves to pairs, row by row: row i and row i + head_dim / 2 of a head become neighbours."""
    head_dim = len(weight) // num_heads
    order = [
        head * head_dim + pair + half * (head_dim // 2)
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]
