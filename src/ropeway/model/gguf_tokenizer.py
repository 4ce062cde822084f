"""The Hugging Face tokenizer that a GGUF file's metadata describes.

Owns: tokenizer.json and tokenizer_config.json as plain dictionaries, made from `tokenizer.*` metadata. Must not know:
weights, torch, how the file is read. Called by: model.gguf.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from ropeway.errors import ConfigError

Metadata = dict[str, Any]
Json = dict[str, Any]

# Token types of llama.cpp.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

# How text is cut before byte-level BPE, by `tokenizer.ggml.pre`. The expressions are facts of the models: part of each
# one's published tokenizer.json. An empty one means GPT-2's, which is built into the ByteLevel step.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS = {
    "gpt-2": "",
    "default": "",
    "smollm": "",
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}

# Tokens that end a turn. A chat template that writes one means generation has to stop at it, whatever the file calls EOS.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


def tokenizer_json(metadata: Metadata) -> Json:
    """The content of tokenizer.json. Raises ConfigError for a kind of tokenizer that is not known."""
    model = metadata.get("tokenizer.ggml.model")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not tokens:
        raise ConfigError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens)")
    if not types or len(types) != len(tokens):
        raise ConfigError("the GGUF file does not give a type for each token (tokenizer.ggml.token_type)")
    if model == "gpt2":
        parts = _byte_level(metadata, tokens, types)
    elif model == "llama":
        tokens, parts = _sentencepiece(metadata, tokens)
    else:
        raise ConfigError(f"GGUF tokenizer model {model!r} is not supported; these are: gpt2, llama")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        **parts,
        "post_processor": _post_processor(metadata, tokens),
    }


def tokenizer_config(metadata: Metadata, max_length: int) -> Json:
    """The content of tokenizer_config.json. max_length: tokens the model can take."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = _token(tokens, token_id)
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def stop_token_ids(metadata: Metadata) -> list[int]:
    """Ids that end a generation: EOS first, then the end of a turn where the file or its chat template has one."""
    ids = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    template = metadata.get("tokenizer.chat_template", "")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ids += [tokens.index(token) for token in _TURN_ENDS if token in template and token in tokens]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _byte_level(metadata: Metadata, tokens: list[str], types: list[int]) -> Json:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise ConfigError(f"GGUF pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; these are: {known}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not _SPLITS[pre]}
    steps: list[Json] = [byte_level]
    if _SPLITS[pre]:
        split = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
        steps.insert(0, split)
    if pre == "smollm":
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    # Rows that only pad the embedding carry a made-up name, which must not become a word.
    padding = {index for index, kind in enumerate(types) if kind == _UNUSED and tokens[index] == f"[PAD{index}]"}
    vocab = {token: index for index, token in enumerate(tokens) if index not in padding}
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ConfigError("the GGUF file holds no merges (tokenizer.ggml.merges)")
    return {
        "normalizer": {"type": "NFC"} if _SPLITS[pre] == _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, [merge.split(" ", 1) for merge in merges], ignore_merges=_SPLITS[pre] == _LLAMA3),
    }


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> tuple[list[str], Json]:
    """Tokens (respelled where GGUF changed them) and the parts of a BPE with byte fallback, ▁ in place of spaces."""
    gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    if gemma:
        tokens = ["▁" * len(token) if token.strip(" ") == "" else token for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores")
    # Gemma's pieces are learnt merges in the order of their ids; what the file gives as scores does not order them.
    if gemma:
        scores = range(0, -len(tokens), -1)
    elif not scores or len(scores) != len(tokens):
        raise ConfigError("the GGUF file does not give a score for each token (tokenizer.ggml.scores)")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    normalizers: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return tokens, {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocab,
            _merges_from_scores(vocab, scores),
            unk_token=None if unknown is None else _token(tokens, unknown),
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges_from_scores(vocab: dict[str, int], scores: Any) -> list[list[str]]:
    """SentencePiece joins the adjacent pair whose piece scores highest. As BPE merges: every way to make a piece out of
    two others, best piece first; among the ways to make one piece, shorter left part first.
    """
    ranked = sorted(vocab.items(), key=lambda item: -scores[item[1]])  # stable: equal scores stay in the order of ids
    return [
        [piece[:cut], piece[cut:]]
        for piece, _ in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> Json:
    defaults = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"type": "BPE", **defaults, **options, "vocab": vocab, "merges": merges}


def _adds(metadata: Metadata, end: str) -> bool:
    """Whether text is encoded with BOS before or EOS after it; llama.cpp's defaults where the file is silent."""
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    llama3 = _SPLITS.get(metadata.get("tokenizer.ggml.pre", "")) == _LLAMA3
    default = end == "bos" and (sentencepiece or llama3)
    return bool(metadata.get(f"tokenizer.ggml.add_{end}_token", default))


def _post_processor(metadata: Metadata, tokens: list[str]) -> Json | None:
    ends = {end: metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", "eos") if _adds(metadata, end)}
    if not ends:
        return None
    names = {}
    for end, token_id in ends.items():
        if token_id is None:
            raise ConfigError(f"the GGUF file asks for {end.upper()} around a text but has no such token")
        names[end] = _token(tokens, token_id)

    def template(texts: str) -> list[Json]:
        wrapped = [
            [
                *([{"SpecialToken": {"id": names["bos"], "type_id": type_id}}] if "bos" in names else []),
                {"Sequence": {"id": text, "type_id": type_id}},
                *([{"SpecialToken": {"id": names["eos"], "type_id": type_id}}] if "eos" in names else []),
            ]
            for type_id, text in enumerate(texts)
        ]
        return list(chain.from_iterable(wrapped))

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("AB"),
        "special_tokens": {names[end]: {"id": names[end], "ids": [ends[end]], "tokens": [names[end]]} for end in names},
    }


def _token(tokens: list[str], token_id: int) -> str:
    if not 0 <= token_id < len(tokens):
        raise ConfigError(f"the GGUF file names token id {token_id}, but its vocabulary ends at {len(tokens) - 1}")
    return tokens[token_id]
