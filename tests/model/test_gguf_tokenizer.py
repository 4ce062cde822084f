"""Tokenizers made from GGUF metadata against the ones they stand for: same ids, same text back.

Byte-level ones are compared with reference pipelines built by hand or by transformers' own classes, over vocabularies
trained here; SentencePiece ones with the algorithm itself, written out naively below.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ropeway.errors import ConfigError
from ropeway.hub import resolve_model
from ropeway.model.gguf_tokenizer import stop_token_ids, tokenizer_config, tokenizer_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CORPUS = [
    "The cabins pass at a steady pace; riders step on and off while it moves. It's 1234567 steps, isn't it?",
    "def f(x):\n    return x + 1\n\n\n\tif y == 3.14159:\n\t\tpass\n",
    "naïve café, Ünïcode, ÄÖÜ, 日本語のテキスト, Привет мир, 한국어, 🙂🙂👩‍👩‍👧",
    "We've, we'll, I'd, THEY'RE, don't   stop    the      spaces  12 123 1234 ２３ ½",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   ",
    "\n\n \n",
    "a",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<tool_call>y</tool_call>z",
    "  <|im_end|>  ",
    "\x00\x7f\u00a0\u2028",
    "12345678901",
    "e\u0301 \u1e9b\u0323",
]
ALPHABET = " \n\tabcethSs'’.,0129é日П🙂\u0301<|>_im"

texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=ALPHABET, max_size=40),
    st.lists(st.sampled_from(CORPUS[3].split())).map(" ".join),
)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def qwen2_split() -> Any:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    return split(PRETOKENIZE_REGEX)


# Llama 3's expression, as its tokenizer.json has it.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PIPELINES: dict[str, Any] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "default": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": qwen2_split,
    "llama-bpe": lambda: split(LLAMA3),
}


def byte_level_pair(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A reference tokenizer over a vocabulary trained here, and the GGUF metadata that describes it."""
    reference = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    reference.pre_tokenizer = PIPELINES[pre]()
    reference.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        reference.normalizer = normalizers.NFC()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    reference.train_from_iterator(CORPUS * 3, trainer)
    reference.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    model = json.loads(reference.to_str())["model"]
    tokens = [reference.id_to_token(index) for index in range(reference.get_vocab_size())]
    types = [CONTROL if token in specials else USER_DEFINED if token == "<tool_call>" else NORMAL for token in tokens]
    for _ in range(3):  # rows that pad the embedding
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(UNUSED)
    return reference, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))


@pytest.mark.parametrize("pre", PIPELINES)
def test_byte_level_matches_the_reference(pre: str) -> None:
    reference, metadata = byte_level_pair(pre)
    tokenizer = build(metadata)

    def check(text: str) -> None:
        encoding = tokenizer.encode(text)
        assert encoding.ids == reference.encode(text).ids
        normal = reference.normalizer.normalize_str(text) if reference.normalizer else text
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == normal

    for text in TEXTS:
        check(text)
    settings(max_examples=150, deadline=None)(given(texts)(check))()


def test_pipelines_differ_where_the_models_do() -> None:
    """The references are not all alike: digits one by one, in threes, or whole."""
    pieces = {pre: [piece for piece, _ in make().pre_tokenize_str("x12345")] for pre, make in PIPELINES.items()}
    assert pieces["gpt-2"] == ["x", "12345"]
    assert pieces["smollm"] == pieces["qwen2"] == ["x", "1", "2", "3", "4", "5"]
    assert pieces["llama-bpe"] == ["x", "123", "45"]


def test_added_tokens_keep_their_ids_and_kind() -> None:
    _, metadata = byte_level_pair("smollm")
    tokenizer = build(metadata)
    added = tokenizer.get_added_tokens_decoder()
    tool = metadata["tokenizer.ggml.tokens"].index("<tool_call>")
    assert {index: (token.content, token.special) for index, token in added.items()} == {
        0: ("<|endoftext|>", True),
        1: ("<|im_start|>", True),
        2: ("<|im_end|>", True),
        tool: ("<tool_call>", False),
    }
    ids = tokenizer.encode("a<|im_end|><tool_call>").ids
    assert ids[-2:] == [2, tool]
    assert tokenizer.decode(ids) == "a<tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|><tool_call>"


def test_padding_rows_are_not_words() -> None:
    _, metadata = byte_level_pair("llama-bpe")
    tokenizer = build(metadata)
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.token_to_id(f"[PAD{last}]") is None
    assert tokenizer.decode([last]) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pre": "smollm"}, []),
        ({"pre": "smollm", "add_bos": True}, [1]),
        ({"pre": "llama-bpe"}, [1]),  # llama.cpp's default for this one
        ({"pre": "llama-bpe", "add_bos": False}, []),
        ({"pre": "qwen2", "add_bos": True, "add_eos": True}, [1, 2]),
    ],
)
def test_bos_and_eos_around_a_text(changes: dict[str, Any], expected: list[int]) -> None:
    _, metadata = byte_level_pair("gpt-2")
    metadata["tokenizer.ggml.pre"] = changes["pre"]
    del metadata["tokenizer.ggml.add_bos_token"]
    for end in ("bos", "eos"):
        if f"add_{end}" in changes:
            metadata[f"tokenizer.ggml.add_{end}_token"] = changes[f"add_{end}"]
    tokenizer = build(metadata)
    plain = tokenizer.encode("ab", add_special_tokens=False).ids
    wrapped = tokenizer.encode("ab").ids
    assert [token_id for token_id in wrapped if token_id in (1, 2)] == expected
    assert wrapped == expected[:1] + plain + expected[1:]
    assert tokenizer_config(metadata, 10)["add_bos_token"] == (1 in expected)


# --- SentencePiece --------------------------------------------------------------------------------------------------

PIECES = [
    "t",
    "h",
    "e",
    "a",
    "o",
    "s",
    "n",
    "i",
    "d",
    "é",
    "▁",
    "▁t",
    "he",
    "th",
    "the",
    "▁the",
    "▁a",
    "an",
    "and",
    "▁and",
    "▁▁",
    "▁▁▁▁",
    "in",
    "on",
    "▁o",
    "▁s",
    "ti",
    "tion",
    "▁the▁",
    "nn",
]


def sentencepiece_metadata(seed: int, architecture: str) -> dict[str, Any]:
    """Pieces in a random order of merit, bytes to fall back on, and what Gemma spells otherwise."""
    rng = random.Random(seed)
    pieces = list(PIECES)
    rng.shuffle(pieces)
    if architecture == "gemma3":
        pieces = [" " * len(piece) if set(piece) == {"▁"} and len(piece) > 1 else piece for piece in pieces]
    tokens = ["<unk>", "<s>", "</s>", "<tag>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED] + [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = [0.0] * 260 + [-float(rank) for rank in range(len(pieces))]
    if architecture == "gemma3":
        scores = [-1000.0] * len(tokens)  # they say nothing there
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **({"tokenizer.ggml.add_space_prefix": False} if architecture == "gemma3" else {}),
    }


def sentencepiece_encode(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's own way: join the adjacent pair that makes the best piece, until none does. No special tokens."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token.replace(" ", "▁"): index for index, token in enumerate(tokens)}
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    symbols = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        joined = [(ids[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not joined:
            break
        _, at = min(joined)  # ids are in order of merit here
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    spelled = [[ids[s]] if s in ids else [ids[f"<0x{byte:02X}>"] for byte in s.encode()] for s in symbols]
    return [token_id for part in spelled for token_id in part]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", range(6))
def test_sentencepiece_matches_the_algorithm(architecture: str, seed: int) -> None:
    metadata = sentencepiece_metadata(seed, architecture)
    tokenizer = build(metadata)

    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == sentencepiece_encode(metadata, text)
        assert tokenizer.decode(ids) == text.replace("▁", " ")

    check("the and  the      tion é x🙂\n\tan")
    alphabet = st.text(alphabet="theaosndi   é▁x🙂\n", max_size=30)
    settings(max_examples=80, deadline=None)(given(alphabet)(check))()


def test_sentencepiece_special_tokens_and_prefix() -> None:
    metadata = sentencepiece_metadata(0, "llama")
    tokenizer = build(metadata)
    the = metadata["tokenizer.ggml.tokens"].index("▁the")
    assert tokenizer.encode("the").ids == [1, the]
    assert tokenizer.encode("<s>the</s>", add_special_tokens=False).ids == [1, the, 2]
    assert tokenizer.encode("<tag>", add_special_tokens=False).ids == [3]
    assert tokenizer.decode([1, the, 2]) == "the"
    gemma = build(sentencepiece_metadata(0, "gemma3"))
    assert gemma.decode(gemma.encode("<s> the").ids) == " the"  # no prefix there, so none is taken away
    assert gemma.encode("").ids == [1]


def test_sentencepiece_agrees_with_transformers_classes() -> None:
    from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
    from transformers.models.llama.tokenization_llama import LlamaTokenizer

    for architecture, make in (("llama", LlamaTokenizer), ("gemma3", GemmaTokenizer)):
        metadata = sentencepiece_metadata(3, architecture)
        mine = tokenizer_json(metadata)
        merges = [tuple(merge) for merge in mine["model"]["merges"]]
        theirs = make(
            vocab=dict(mine["model"]["vocab"]), merges=merges, bos_token="<s>", eos_token="</s>", pad_token="<unk>"
        )
        tokenizer = build(metadata)
        # No text begins with a space: LlamaTokenizer then leaves out the prefix, while SentencePiece and the published
        # tokenizer.json files of Llama 2 and Mistral do not.
        for text in ("the and the", "two   spaces  ", "tion\n\né🙂", "nothing known: XYZ 123"):
            found = tokenizer.encode(text, add_special_tokens=False).ids
            assert found == theirs(text, add_special_tokens=False)["input_ids"], (architecture, text)


# --- configuration and refusals -------------------------------------------------------------------------------------


def test_tokenizer_config() -> None:
    _, metadata = byte_level_pair("qwen2")
    metadata |= {"tokenizer.ggml.padding_token_id": 0, "tokenizer.chat_template": "{{ messages }}"}
    assert tokenizer_config(metadata, 4096) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": "{{ messages }}",
    }


def test_stop_ids_include_the_end_of_a_turn() -> None:
    _, metadata = byte_level_pair("qwen2")
    assert stop_token_ids(metadata) == [2]
    metadata["tokenizer.ggml.eos_token_id"] = 0
    assert stop_token_ids(metadata) == [0]
    metadata["tokenizer.ggml.eot_token_id"] = 5
    metadata["tokenizer.chat_template"] = "{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}<|eot_id|>"
    assert stop_token_ids(metadata) == [0, 5, 2]
    assert stop_token_ids({}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported; these are: gpt2, llama"),
        (
            {"tokenizer.ggml.pre": "tekken"},
            "pre-tokenizer 'tekken' .* is not supported; these are: gpt-2, default, smol",
        ),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "type for each token"),
        ({"tokenizer.ggml.merges": None}, "no merges"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "asks for BOS"),
        ({"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 10**6}, "names token id 1000000"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5]}, "score for each token"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], message: str) -> None:
    _, metadata = byte_level_pair("gpt-2")
    with pytest.raises(ConfigError, match=message):
        tokenizer_json(metadata | changes)


@pytest.mark.real_model
def test_demo_tokenizer() -> None:
    folder: Path = resolve_model("")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("Hello world").tokens == ["Hello", "Ġworld"]
    assert tokenizer.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]  # single digits
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "SmolLM" in settings["chat_template"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
