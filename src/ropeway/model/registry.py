"""From a Hugging Face ``config.json`` to the flags of the one decoder.

Owns: DecoderConfig and the list of architectures. Must not know: tensors, files, devices.
Called by: worker (parse_config), model.decoder and model.loader (read DecoderConfig), model.gguf (the same names).

A setting that would change the model's output is understood or refused, never dropped. Where a key is absent, the
value is the one that transformers gives to that model type, because that is what the checkpoint's author saw.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ropeway.errors import ConfigError
from ropeway.model.rotary import RopeSpec, parse_rope

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecoderConfig:
    architecture: str
    torch_dtype: str | None  # the checkpoint's: float32 | bfloat16 | float16; None if it does not say
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # longest sequence for which the decoder gives the reference's answer
    rms_norm_eps: float
    activation: str  # silu | gelu | gelu_tanh
    tie_word_embeddings: bool
    ropes: tuple[RopeSpec, ...]  # one per layer
    sliding_windows: tuple[int | None, ...]  # one per layer
    attention_scale: float  # on q . k
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k
    fused_checkpoint: bool = False  # the files hold qkv_proj and gate_up_proj
    gemma_norms: bool = False  # weight is 1 + w, and attention and MLP have a norm on their output too
    embedding_scale: float | None = None


# Per architecture: what transformers assumes for an absent key. A key without a default here is required.
_LLAMA = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
_MISTRAL = _LLAMA | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_QWEN2 = _LLAMA | {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
_PHI3 = _LLAMA | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_DTYPES = ("float32", "bfloat16", "float16")

# Would change the output if honoured; refused unless the value asks for nothing.
_UNSUPPORTED = (
    "use_bidirectional_attention",
    "is_encoder_decoder",
    "add_cross_attention",
    "dual_chunk_attention_config",
    "num_experts",
    "num_local_experts",
)
# Training, generation and bookkeeping: no influence on a forward pass at inference.
_IRRELEVANT = set(
    """
    architectures model_type transformers_version torch_dtype dtype _name_or_path auto_map use_cache bos_token_id
    eos_token_id pad_token_id sep_token_id decoder_start_token_id initializer_range attention_dropout hidden_dropout
    resid_pdrop embd_pdrop pretraining_tp cache_implementation is_decoder is_llama_config rope_interleaved
    transformers.js_config _attn_implementation _attn_implementation_autoset attn_implementation return_dict
    output_attentions output_hidden_states chunk_size_feed_forward id2label label2id problem_type
    task_specific_params torchscript use_bfloat16 bos_token eos_token unsloth_fixed unsloth_version tokenizer_class
    finetuning_task prefix name_or_path mm_tokens_per_image boi_token_index eoi_token_index image_token_index
    vision_config
    """.split()  # noqa: SIM905
)


class _Reader:
    """Typed access to the keys of one config, remembering which were looked at."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], architecture: str) -> None:
        self.config = config
        self.defaults = defaults
        self.architecture = architecture
        self.seen: set[str] = set()

    def value(self, key: str) -> Any:
        """The key's value; the architecture's default if the key is absent, None if there is neither."""
        self.seen.add(key)
        return self.config[key] if key in self.config else self.defaults.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number. An absent or null key takes ``default``; without one it is an error."""
        value = self.value(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"config.json: {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: {key!r} is {value!r}; it must be a positive whole number")
        return value

    def number(self, key: str) -> float | None:
        """A positive number or None."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"config.json: {key!r} is {value!r}; it must be a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        """A yes or no; absent or null is no."""
        value = self.value(key)
        if value not in (None, True, False):
            raise ConfigError(f"config.json: {key!r} is {value!r}; it must be true or false")
        return bool(value)

    def table(self, key: str) -> dict[str, Any]:
        """A nested object; empty if absent or null."""
        value = self.value(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"config.json: {key!r} is {value!r}; it must be an object")
        return dict(value or {})

    def refuse(self, key: str, *harmless: Any) -> None:
        """Raise unless the key is absent or its value asks for nothing."""
        value = self.value(key)
        if value not in (None, False, {}, *harmless):
            shown = "this" if isinstance(value, dict) else repr(value)
            raise ConfigError(f"config.json: {key!r} set to {shown} is not supported for {self.architecture}")


def parse_config(config: Mapping[str, Any], max_model_len: int = 0) -> DecoderConfig:
    """The decoder's flags from a parsed ``config.json``.

    max_model_len: longest sequence that will be served, in tokens, 0 if not decided. It matters for LongRoPE models
    alone: served within their original length they are exact, and `DecoderConfig.max_position_embeddings` says so.
    Raises ConfigError naming the key that is missing, malformed or not supported.
    """
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"config.json: architectures {names!r} is not supported; known are {known}")
    defaults, build = ARCHITECTURES[architecture]
    reader = _Reader(config, defaults, architecture)
    for key in ("quantization_config", "compression_config"):
        reader.seen.add(key)
        if config.get(key):
            table = config[key] if isinstance(config[key], dict) else {}
            kind = table.get("quant_method", "a method it does not name")
            raise ConfigError(
                f"config.json: {key!r}: the checkpoint is quantised ({kind}), which is not supported yet; serve the model's "
                "bfloat16 or float16 weights, or a .gguf file of it"
            )
    for key in _UNSUPPORTED:
        reader.refuse(key)
    if architecture == "Gemma3ForConditionalGeneration":
        # Its language model, answering text only; what stands outside text_config describes images.
        text = reader.table("text_config") | {
            key: config[key] for key in ("torch_dtype", "dtype", "tie_word_embeddings") if key in config
        }
        return parse_config({**text, "architectures": ["Gemma3ForCausalLM"]}, max_model_len)
    result = build(reader, max_model_len)
    unknown = sorted(key for key in set(config) - reader.seen - _IRRELEVANT if config[key] not in (None, False))
    if unknown:
        logger.warning("config.json: no meaning known for %s; ignored", ", ".join(unknown))
    return result


def _common(reader: _Reader) -> dict[str, Any]:
    """The fields that every architecture reads alike."""
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads)
    if reader.value("head_dim") is None and hidden_size % num_heads:
        raise ConfigError(
            f"config.json: 'hidden_size' {hidden_size} is not a multiple of 'num_attention_heads' {num_heads}, "
            "and there is no 'head_dim'"
        )
    head_dim = reader.integer("head_dim", default=hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: 'num_attention_heads' {num_heads} is not a multiple of 'num_key_value_heads' {num_kv_heads}"
        )
    dtype = reader.value("dtype") or reader.value("torch_dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"config.json: 'torch_dtype' {dtype!r} is not supported; known are {', '.join(_DTYPES)}")
    act_key = "hidden_activation" if "hidden_activation" in reader.defaults else "hidden_act"
    activation = reader.value(act_key)
    if activation not in list(_ACTIVATIONS):
        raise ConfigError(f"config.json: {act_key!r} {activation!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    eps = reader.number("rms_norm_eps")
    assert eps is not None
    return {
        "architecture": reader.architecture,
        "torch_dtype": dtype,
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_layers": reader.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": eps,
        "activation": _ACTIVATIONS[activation],
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "attention_scale": head_dim**-0.5,
    }


def _flat_rope(reader: _Reader, fields: dict[str, Any], max_model_len: int, *, partial: bool = False) -> dict[str, Any]:
    """``ropes`` and ``max_position_embeddings`` for models whose layers all turn alike; old and new spellings."""
    old, new = reader.table("rope_scaling"), reader.table("rope_parameters")
    if old and new and old != new:
        raise ConfigError("config.json: 'rope_scaling' and 'rope_parameters' disagree; keep one of them")
    table = new or old
    nested = [key for key, value in table.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(f"config.json: 'rope_parameters' per layer type ({nested[0]!r}) is not supported here")
    if (factor := reader.value("partial_rotary_factor")) is not None:
        table.setdefault("partial_rotary_factor", factor)
    if not partial and table.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"config.json: 'partial_rotary_factor' is not supported for {reader.architecture}")
    if (original := reader.value("original_max_position_embeddings")) is not None:
        table["original_max_position_embeddings"] = original
    kind = table.get("rope_type", table.get("type"))
    if reader.architecture == "Phi3ForCausalLM" and kind in ("su", "yarn"):  # names from before LongRoPE had one
        table["rope_type"] = "longrope"
    spec = parse_rope(
        table,
        theta=reader.number("rope_theta") or 10000.0,
        head_dim=fields["head_dim"],
        max_positions=reader.integer("max_position_embeddings"),
        max_model_len=max_model_len,
    )
    return {"ropes": (spec,) * fields["num_layers"], "max_position_embeddings": spec.max_positions}


def _layer_types(reader: _Reader, num_layers: int, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers have a sliding window: ``layer_types`` if the config has it, else ``default(layer index)``."""
    kinds = reader.value("layer_types")
    if kinds is None:
        return tuple(default(index) for index in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"config.json: 'layer_types' must list {num_layers} layers, one per layer")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"config.json: {kind!r} in 'layer_types' is not supported")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _windows(sliding: tuple[bool, ...], window: int | None) -> dict[str, Any]:
    if any(sliding) and window is None:
        raise ConfigError("config.json: 'layer_types' has sliding_attention, but no 'sliding_window' is in force")
    return {"sliding_windows": tuple(window if is_sliding else None for is_sliding in sliding)}


def _window(reader: _Reader) -> int | None:
    return None if reader.value("sliding_window") is None else reader.integer("sliding_window")


def _uniform_windows(reader: _Reader, num_layers: int) -> dict[str, Any]:
    """One window, or none, for all layers."""
    window = _window(reader)
    sliding = _layer_types(reader, num_layers, lambda index: window is not None)
    if sliding != (window is not None,) * num_layers:
        raise ConfigError(f"config.json: 'layer_types' contradicts 'sliding_window' {window} of {reader.architecture}")
    return _windows(sliding, window)


def _qwen_windows(reader: _Reader, num_layers: int) -> dict[str, Any]:
    """``sliding_window`` counts only with ``use_sliding_window``, and from layer ``max_window_layers`` on."""
    window = _window(reader) if reader.flag("use_sliding_window") else None
    reader.seen.add("sliding_window")
    first = reader.value("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ConfigError(f"config.json: 'max_window_layers' is {first!r}; it must be a whole number")
    sliding = _layer_types(reader, num_layers, lambda index: window is not None and index >= first)
    return _windows(sliding, window)


def _llama(reader: _Reader, max_model_len: int) -> DecoderConfig:
    fields = _common(reader)
    reader.refuse("sliding_window")
    fields |= _uniform_windows(reader, fields["num_layers"]) | _flat_rope(reader, fields, max_model_len)
    bias = reader.flag("attention_bias")
    return DecoderConfig(**fields, qkv_bias=bias, output_bias=bias, mlp_bias=reader.flag("mlp_bias"))


def _mistral(reader: _Reader, max_model_len: int) -> DecoderConfig:
    fields = _common(reader)
    fields |= _uniform_windows(reader, fields["num_layers"]) | _flat_rope(reader, fields, max_model_len)
    reader.refuse("attention_bias")
    reader.refuse("mlp_bias")
    return DecoderConfig(**fields)


def _qwen2(reader: _Reader, max_model_len: int) -> DecoderConfig:
    fields = _common(reader)
    fields |= _qwen_windows(reader, fields["num_layers"]) | _flat_rope(reader, fields, max_model_len)
    reader.refuse("attention_bias", True)  # q, k and v always have one
    reader.refuse("mlp_bias")
    return DecoderConfig(**fields, qkv_bias=True)


def _qwen3(reader: _Reader, max_model_len: int) -> DecoderConfig:
    fields = _common(reader)
    fields |= _qwen_windows(reader, fields["num_layers"]) | _flat_rope(reader, fields, max_model_len)
    reader.refuse("mlp_bias")
    bias = reader.flag("attention_bias")
    return DecoderConfig(**fields, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _phi3(reader: _Reader, max_model_len: int) -> DecoderConfig:
    fields = _common(reader)
    fields |= _uniform_windows(reader, fields["num_layers"])
    fields |= _flat_rope(reader, fields, max_model_len, partial=True)
    if (kind := fields["ropes"][0].kind) not in ("default", "longrope"):
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported for Phi3ForCausalLM")
    reader.refuse("attention_bias")
    reader.refuse("mlp_bias")
    return DecoderConfig(**fields, fused_checkpoint=True)


def _gemma3(reader: _Reader, max_model_len: int) -> DecoderConfig:
    fields = _common(reader)
    num_layers, head_dim = fields["num_layers"], fields["head_dim"]
    reader.refuse("mlp_bias")
    reader.seen.add("hidden_act")  # left over from Gemma 1; hidden_activation counts

    pattern = reader.value("sliding_window_pattern") or reader.value("_sliding_window_pattern")
    pattern = 6 if pattern is None else pattern
    reader.seen.add("_sliding_window_pattern")
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise ConfigError(f"config.json: 'sliding_window_pattern' is {pattern!r}; it must be a positive whole number")
    sliding = _layer_types(reader, num_layers, lambda index: (index + 1) % pattern != 0)
    fields |= _windows(sliding, _window(reader))

    # Global layers have rope_theta and any scaling, local ones rope_local_base_freq; or both in rope_parameters.
    tables = reader.table("rope_parameters")
    if unknown := sorted(set(tables) - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"config.json: {unknown[0]!r} in 'rope_parameters' is not a layer type of Gemma 3")
    max_positions = reader.integer("max_position_embeddings")
    specs = {
        is_sliding: parse_rope(
            table,
            theta=reader.number(theta_key) or reader.defaults[theta_key],
            head_dim=head_dim,
            max_positions=max_positions,
            max_model_len=max_model_len,
        )
        for is_sliding, theta_key, table in (
            (False, "rope_theta", (tables.get("full_attention") or {}) | reader.table("rope_scaling")),
            (True, "rope_local_base_freq", tables.get("sliding_attention") or {}),
        )
    }
    for spec in specs.values():
        if spec.rotary_dim != head_dim:
            raise ConfigError("config.json: 'partial_rotary_factor' is not supported for Gemma 3")
    bias = reader.flag("attention_bias")
    scalar = reader.number("query_pre_attn_scalar")
    if scalar is None:
        raise ConfigError("config.json: 'query_pre_attn_scalar' is missing")
    fields["attention_scale"] = scalar**-0.5
    return DecoderConfig(
        **fields,
        max_position_embeddings=min(spec.max_positions for spec in specs.values()),
        ropes=tuple(specs[is_sliding] for is_sliding in sliding),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        gemma_norms=True,
        embedding_scale=fields["hidden_size"] ** 0.5,
        attention_soft_cap=reader.number("attn_logit_softcapping"),
        logits_soft_cap=reader.number("final_logit_softcapping"),
    )


ARCHITECTURES: dict[str, tuple[dict[str, Any], Callable[[_Reader, int], DecoderConfig]]] = {
    "LlamaForCausalLM": (_LLAMA, _llama),
    "MistralForCausalLM": (_MISTRAL, _mistral),
    "Qwen2ForCausalLM": (_QWEN2, _qwen2),
    "Qwen3ForCausalLM": (_QWEN2 | {"head_dim": 128}, _qwen3),
    "Phi3ForCausalLM": (_PHI3, _phi3),
    "Gemma3ForCausalLM": (_GEMMA3, _gemma3),
    "Gemma3ForConditionalGeneration": (_GEMMA3, _gemma3),
}
