"""GGUF files: their header, their weights under Hugging Face names and in Hugging Face layout, and the folder made of them.

Owns: the reading of GGUF and the mapping of its architectures, names and layouts. Must not know: the decoder, devices.
Called by: model.loader (iter_tensors) and, as a process of its own (`python -m ropeway.model.gguf`), by hub.
"""

from __future__ import annotations

import argparse
import json
import mmap
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import pi, prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ropeway.errors import ConfigError
from ropeway.model.gguf_tokenizer import stop_token_ids, tokenizer_config, tokenizer_json

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


# --- the file -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]  # as torch writes it: outermost dimension first
    type: GGMLQuantizationType
    start: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """A GGUF file's metadata and tensor table; weights are only touched by `read`.

    (The gguf package's own reader makes a numpy view of every token of the vocabulary, which takes seconds per start.)
    Raises ConfigError, naming the file, for anything that is not a whole GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {path}: {getattr(error, 'strerror', None) or 'the file is empty'}"
            ) from error
        if self._bytes[:4] != b"GGUF":
            raise ConfigError(f"{path} is not a GGUF file")
        self._at = 4
        try:
            self._read_header()
        except (struct.error, ValueError, OverflowError, IndexError) as error:
            raise ConfigError(f"{path} is damaged or cut short: its header cannot be read ({error})") from error
        for name, tensor in self.tensors.items():
            if tensor.start + tensor.num_bytes > len(self._bytes):
                raise ConfigError(f"{path} is cut short: tensor {name} lies beyond the end of the file")

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, de-quantised, in its torch shape. The array is the caller's own."""
        tensor = self.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        raw = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.start)
        weight = np.empty(prod(tensor.shape), np.float32)
        # Blocks do not depend on rows. Pieces of this size fit in the cache and make the package's overhead small.
        step = max(1, 2**17 // block)
        for first in range(0, len(raw) // block_bytes, step):
            piece = raw[first * block_bytes : (first + step) * block_bytes]
            weight[first * block : (first + step) * block] = dequantize(piece, tensor.type)
        return weight.reshape(tensor.shape)

    def _read_header(self) -> None:
        version = self._scalar("I")
        if version not in (2, 3):
            raise ConfigError(
                f"{self.path}: GGUF version {version} is not supported, only 2 and 3 in little-endian order"
            )
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        table = []
        for _ in range(num_tensors):
            name = self._string()
            dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
            type_id, offset = self._scalar("I"), self._scalar("Q")
            table.append((name, tuple(reversed(dims)), type_id, offset))
        alignment = self.metadata.get("general.alignment", 32)
        data = -(-self._at // alignment) * alignment
        self.tensors: dict[str, StoredTensor] = {}
        for name, shape, type_id, offset in table:
            kind = _tensor_type(type_id, f"{self.path}: tensor {name}")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block:
                raise ValueError(f"tensor {name} of shape {shape} is not made of whole {kind.name} blocks")
            self.tensors[name] = StoredTensor(shape, kind, data + offset, prod(shape) // block * block_bytes)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        end = self._at + 8 + self._scalar("Q")
        if end > len(self._bytes):
            raise ValueError("a string runs beyond the end of the file")
        text = self._bytes[self._at : end].decode("utf-8", "replace")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ValueError(f"unknown metadata type {kind}")
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("I"), self._scalar("Q")
        if item not in _SCALARS:
            return [self._value(item) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{count}{_SCALARS[item]}")
        return list(values)


def _tensor_type(type_id: int, where: str) -> GGMLQuantizationType:
    """The tensor's type, if the gguf package knows how to de-quantise it."""
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise ConfigError(f"{where} has the quantisation type number {type_id}, which is not known") from None
    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        raise ConfigError(f"{where} is quantised as {kind.name}, which cannot be de-quantised") from None
    return kind


# --- architectures --------------------------------------------------------------------------------------------------

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture differs from its Hugging Face counterpart."""

    norms: dict[str, str]
    specifics: Callable[[Settings, dict[str, Any]], dict[str, Any]]  # (settings, common part) -> its own config entries
    interleaved_rope: bool = False  # q and k rows are stored with each rotated pair side by side
    norm_offset: float = 0.0  # what the file adds to every norm weight
    biases: tuple[str, ...] = ()  # linears that always have one


# Notes on the model's past, and the size of a vocabulary that is counted anyway.
_TELL_NOTHING = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "expert_used_count")


@dataclass
class Settings:
    """The metadata below `<architecture>.`: notes which keys were used, so that no setting is passed over in silence."""

    file: GGUFFile
    prefix: str
    used: set[str] = field(default_factory=lambda: set(_TELL_NOTHING))

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        value = self.file.metadata.get(f"{self.prefix}.{key}", default)
        # Stored as float32: 1e-5 comes back as 9.9999997e-06. The shortest text that means the same float32 undoes it.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str, default: Any = None) -> Any:
        value = self.get(key, default)
        if not isinstance(value, int | float):
            found = "one value per layer" if isinstance(value, list) else "nothing"
            raise ConfigError(f"{self.file.path}: {self.prefix}.{key} must be a number; the file has {found}")
        return value

    def refuse_unused(self) -> None:
        for key in self.file.metadata:
            if key.startswith(self.prefix + ".") and key[len(self.prefix) + 1 :] not in self.used:
                raise ConfigError(f"{self.file.path}: the setting {key} is not supported")


def _rope(settings: Settings, base: float) -> dict[str, Any]:
    """rope_parameters in the spelling of transformers 5."""
    kind = settings.get("rope.scaling.type", "none")
    factor = settings.get("rope.scaling.factor", 0.0)
    original = settings.get("rope.scaling.original_context_length", 0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": base}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if kind == "yarn" and factor and original:
        scaling = {"factor": factor, "original_max_position_embeddings": original}
        return {"rope_type": "yarn", "rope_theta": base, **scaling}
    raise ConfigError(f"{settings.file.path}: rope scaling of type {kind!r}, factor {factor} is not supported")


def _llama(settings: Settings, common: dict[str, Any]) -> dict[str, Any]:
    tensors = settings.file.tensors
    rope = _rope(settings, settings.get("rope.freq_base", 10000.0))
    if "rope_freqs.weight" in tensors:
        if rope["rope_type"] != "default":
            raise ConfigError(f"{settings.file.path} has both rope_freqs.weight and rope scaling")
        rope = _llama3_rope(settings.file, rope["rope_theta"], common["head_dim"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "rope_parameters": rope,
    }


def _llama3_rope(file: GGUFFile, base: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's frequency scaling, of which a GGUF only keeps the factor of each frequency.

    Every published Llama 3.1, 3.2 and 3.3 shares all parameters but `factor`, which is the largest of the factors. The
    formula is the one of transformers' `rope_type: llama3`; if it does not give the stored factors, they are refused.
    """
    stored = file.read("rope_freqs.weight")
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelength = 2 * pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    if stored.shape != smooth.shape or not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ConfigError(f"{file.path}: rope_freqs.weight holds factors other than those of Llama 3.1 to 3.3")
    return {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _qwen2(settings: Settings, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": _rope(settings, settings.get("rope.freq_base", 10000.0)),
    }


def _gemma3(settings: Settings, common: dict[str, Any]) -> dict[str, Any]:
    """The file leaves out what all Gemma 3 text models share; those values are the published ones."""
    pattern = settings.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int) or pattern < 1:
        raise ConfigError(f"{settings.file.path}: sliding_window_pattern must be one number")
    layers, hidden, heads = (common[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    local = {"rope_type": "default", "rope_theta": settings.get("rope.freq_base_swa", 10000.0)}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": settings.need("attention.sliding_window"),
        "layer_types": ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)],
        # Only the 27B model, known by its 62 layers, scales by something other than its head size.
        "query_pre_attn_scalar": hidden // heads if layers == 62 else common["head_dim"],
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": _rope(settings, settings.get("rope.freq_base", 1_000_000.0)),
            "sliding_attention": local,
        },
    }


ARCHITECTURES = {
    "llama": Architecture(_NORMS, _llama, interleaved_rope=True),
    "qwen2": Architecture(_NORMS, _qwen2, biases=("attn_q", "attn_k", "attn_v")),
    "gemma3": Architecture(_GEMMA_NORMS, _gemma3, norm_offset=1.0),
}


def _architecture(file: GGUFFile) -> Architecture:
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{file.path}: GGUF architecture {name!r} is not supported; these are: {known}")
    if file.metadata.get("split.count", 0) > 1:
        raise ConfigError(f"{file.path} is one part of a split GGUF; merge the parts first (llama-gguf-split --merge)")
    return ARCHITECTURES[name]


def model_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that transformers would load for this model. Raises ConfigError for what it cannot express."""
    architecture = _architecture(file)
    settings = Settings(file, file.metadata["general.architecture"])
    if settings.get("expert_count", 0):
        raise ConfigError(f"{file.path}: mixture-of-experts models are not supported")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path}: tensor token_embd.weight is missing")
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    if len(file.metadata.get("tokenizer.ggml.tokens", ())) > vocab_size:
        raise ConfigError(f"{file.path}: the vocabulary is larger than token_embd.weight, which has {vocab_size} rows")
    hidden, heads = settings.need("embedding_length"), settings.need("attention.head_count")
    head_dim = settings.need("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.get(key, head_dim) != head_dim:
            raise ConfigError(f"{file.path}: {settings.prefix}.{key} differs from the head size {head_dim}")
    common = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": settings.need("feed_forward_length"),
        "num_hidden_layers": settings.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.need("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": settings.need("context_length"),
        "rms_norm_eps": settings.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    config = {**architecture.specifics(settings, common), **common, **token_ids(file.metadata)}
    settings.refuse_unused()
    tensor_names(file, config)
    return config


def _dtype(file: GGUFFile) -> str:
    """float32 where the weights were stored so; for all others bfloat16, which holds what quantisation left of them."""
    return "float32" if file.tensors["token_embd.weight"].type == GGMLQuantizationType.F32 else "bfloat16"


def token_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    """bos_token_id, eos_token_id (one id, or a list where the model has several ways to end) and pad_token_id."""
    eos = stop_token_ids(metadata)
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


# --- tensors --------------------------------------------------------------------------------------------------------


def tensor_names(file: GGUFFile, config: dict[str, Any]) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every weight. ConfigError names what is missing or unknown."""
    architecture = _architecture(file)
    biased = set(architecture.biases)
    if config["model_type"] == "llama":
        biased |= set(_ATTENTION if config["attention_bias"] else ()) | set(_MLP if config["mlp_bias"] else ())
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config["num_hidden_layers"]):
        for source, target in {**_ATTENTION, **_MLP, **architecture.norms}.items():
            for kind in ("weight", "bias") if source in biased else ("weight",):
                names[f"blk.{layer}.{source}.{kind}"] = f"model.layers.{layer}.{target}.{kind}"
    missing = sorted(names.keys() - file.tensors.keys())
    in_config = {"rope_freqs.weight"} if config["model_type"] == "llama" else set()
    unknown = sorted(file.tensors.keys() - names.keys() - in_config)
    if missing or unknown:
        listed = missing or unknown
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        raise ConfigError(f"{file.path}: {'missing' if missing else 'unknown'} tensors: {', '.join(listed[:3])}{more}")
    return names


def iter_tensors(gguf: Path) -> Iterator[tuple[str, Tensor]]:
    """Each weight as (Hugging Face name, float32 tensor in Hugging Face layout), one at a time. Raises ConfigError."""
    file = GGUFFile(gguf)
    config, architecture = model_config(file), _architecture(file)
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for source, target in tensor_names(file, config).items():
        weight = file.read(source)
        part = source.split(".")[-2]
        if architecture.interleaved_rope and part in num_heads:
            if weight.shape[0] % (2 * num_heads[part]):
                raise ConfigError(
                    f"{gguf}: {source} has {weight.shape[0]} rows, which {num_heads[part]} heads cannot share"
                )
            weight = _deinterleave(weight, num_heads[part])
        if part.endswith("norm"):
            weight -= np.float32(architecture.norm_offset)
        yield target, torch.from_numpy(weight)


def _deinterleave(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """[num_heads * head_dim, ...]: GGUF rotates rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + head_dim / 2)."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


# --- the folder -----------------------------------------------------------------------------------------------------


def write_model_folder(gguf: Path, folder: Path, *, with_weights: bool) -> None:
    """Fill an existing folder with a Hugging Face model: configuration, tokenizer, and `model.safetensors`, or (without
    weights) a link `model.gguf` that the loader reads. Raises ConfigError for a file that is not supported, OSError.
    """
    file = GGUFFile(gguf)
    config = model_config(file)
    documents = {
        "config.json": config,
        "generation_config.json": {key: value for key, value in token_ids(file.metadata).items() if value is not None},
        "tokenizer.json": tokenizer_json(file.metadata),
        "tokenizer_config.json": tokenizer_config(file.metadata, config["max_position_embeddings"]),
    }
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=None if name == "tokenizer.json" else 2)
        (folder / name).write_text(text, encoding="utf-8")
    if with_weights:
        dtype = getattr(torch, config["dtype"])
        weights = {name: tensor.to(dtype) for name, tensor in iter_tensors(gguf)}
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private; a server may run as another user
    else:
        (folder / "model.gguf").symlink_to(gguf.resolve())


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m ropeway.model.gguf SOURCE FOLDER [--link]`; a ConfigError is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m ropeway.model.gguf", description=write_model_folder.__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--link", action="store_true", help="link to the weights instead of converting them")
    arguments = parser.parse_args(argv)
    try:
        write_model_folder(arguments.gguf, arguments.folder, with_weights=not arguments.link)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename or arguments.folder}: {error.strerror}", file=sys.stderr)
        return 2
    except SafetensorError as error:  # a full disk, for one
        print(f"{arguments.folder}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
