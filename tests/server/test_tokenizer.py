"""The tokenizer against transformers' fast tokenizers, its tables, and broken folders."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from small_tokenizers import BYTE_TOKENS, KINDS, TEXTS, small_tokenizer, write_folder

from ropeway.errors import ConfigError, RequestError
from ropeway.server.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def reference():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_transformers(kind: str, tmp_path: Path, reference) -> None:
    theirs = reference(write_folder(kind, tmp_path))
    ours = Tokenizer.load(tmp_path)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
    rng = random.Random(1)
    sequences = [theirs.encode(text) for text in TEXTS]
    sequences += [[rng.randrange(ours.vocab_size + 3) for _ in range(rng.randrange(30))] for _ in range(200)]
    for ids in sequences:
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip) == expected
            assert ours.decode(ids, skip, spaces_between_special_tokens=False) == expected


@pytest.mark.real_model
def test_demo_model_same_as_transformers(reference) -> None:
    from ropeway.hub import resolve_model

    folder = resolve_model("")
    theirs, ours = reference(folder), Tokenizer.load(folder)
    assert ours.vocab_size == 49152
    assert 2 in ours.eos_token_ids
    assert ours.has_chat_template
    assert ours.token_bytes(10813) == b"\xf0\x9f"
    assert ours.token_text(3) == "<repo_name>"
    assert 3 in ours.special_ids
    rng = random.Random(2)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    for _ in range(300):
        ids = [rng.randrange(49152) for _ in range(rng.randrange(40))]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert b"".join(map(ours.token_bytes, ids)).decode("utf-8", "replace") == ours.decode(ids, False)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hello "}]
    for flag in (True, False):
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=flag)
        assert ours.render_chat(chat, add_generation_prompt=flag) == expected
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode(ours.render_chat(chat), add_special_tokens=False) == ids


def test_clean_up_is_only_for_those_that_ask(tmp_path: Path, reference) -> None:
    ids = small_tokenizer("unigram").encode("well , yes . no")
    for name, wish in (("yes", True), ("no", False)):
        folder = write_folder("unigram", tmp_path / name, clean_up_tokenization_spaces=wish)
        assert Tokenizer.load(folder).decode(ids) == reference(folder).decode(ids)
    assert Tokenizer.load(tmp_path / "yes").decode(ids) != Tokenizer.load(tmp_path / "no").decode(ids)
    forced = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    folder = write_folder("llama2", tmp_path / "forced", clean_up_tokenization_spaces=True, **forced)
    ids = Tokenizer.load(folder).encode("well , yes .")
    assert Tokenizer.load(folder).decode(ids) == reference(folder).decode(ids, skip_special_tokens=True) == "well, yes."


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_make_up_the_text(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8")
        whole = tokenizer.raw_decode(ids, skip_special_tokens=False)
        if kind == "end_of_word":  # its spaces come between tokens and belong to none
            assert joined.replace(" ", "") == whole.replace(" ", "")
        else:
            assert joined in (whole, " " + whole)  # the decoder takes the first token's space


def test_token_bytes_of_parts_of_characters() -> None:
    level, fallback = small_tokenizer("byte_level"), small_tokenizer("llama2")
    for tokenizer in (level, fallback):
        ids = tokenizer.encode("😁", add_special_tokens=False)
        pieces = [tokenizer.token_bytes(id) for id in ids]
        assert len(pieces) > 1
        assert b"".join(pieces).lstrip() == "😁".encode()
        assert b"\xef\xbf\xbd" not in pieces
        assert "\ufffd" in tokenizer.token_text(ids[-1])
    for byte, token in enumerate(BYTE_TOKENS):
        assert fallback.token_bytes(fallback.token_id(token)) == bytes([byte])
    assert level.token_bytes(level.token_id("<|im_end|>")) == b"<|im_end|>"
    assert level.token_bytes(level.token_id("two words")) == b"two words"
    assert fallback.token_bytes(fallback.token_id("▁▁")) == b"  "
    for id in (-1, level.vocab_size, 2**40):
        assert level.token_bytes(id) == b""
        assert not level.is_known(id)


def test_byte_named_tokens_are_plain_text_without_byte_fallback() -> None:
    import tokenizers as library
    from tokenizers import decoders, models

    from ropeway.server.chat_template import ChatTemplate

    backend = library.Tokenizer(models.WordLevel({"<0x41>": 0, "x": 1}, unk_token="x"))
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend, {}, [], ChatTemplate({}, {}))
    assert tokenizer.token_bytes(0) == b"<0x41>" == tokenizer.decode([0]).encode()
    assert tokenizer.byte_token_ids == frozenset()


def test_end_tokens_come_from_three_files_in_order(tmp_path: Path) -> None:
    folder = write_folder("byte_level", tmp_path)
    own = small_tokenizer("byte_level").token_id("<|im_end|>")
    assert own is not None
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (folder / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": [9, 7]}}')
    assert Tokenizer.load(folder).eos_token_ids == (7, 5, 9, own)
    other = write_folder("byte_level", tmp_path / "other")
    assert Tokenizer.load(other, model_folder=folder).eos_token_ids == (7, 5, 9, own)
    assert Tokenizer.load(other).eos_token_ids == (own,)
    (folder / "config.json").write_text('{"eos_token_id": null}')
    assert Tokenizer.load(folder).eos_token_ids == (7, 5, own)
    (folder / "config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(ConfigError, match=r"config\.json.*eos_token_id"):
        Tokenizer.load(folder)


def test_tokens_that_only_the_configuration_knows(tmp_path: Path, reference) -> None:
    known = small_tokenizer("byte_level")
    size = known.vocab_size
    folder = write_folder(
        "byte_level",
        tmp_path,
        added_tokens_decoder={
            str(size): {"content": "<think>", "special": False, "normalized": False},
            str(size + 1): {"content": "<|tool|>", "special": True, "normalized": False},
        },
        extra_special_tokens=["<tool>"],
        eos_token={"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False},
    )
    ours, theirs = Tokenizer.load(folder), reference(folder)
    text = "a<think>b<|tool|>c<tool>d</tool>"
    assert ours.encode(text) == theirs.encode(text)
    assert size in ours.encode(text)
    listed = {id for id, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == listed > {size + 1}
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert (
        ours.decode(ours.encode(text)) == "a<think>bc<tool>d</tool>"
    )  # <tool> is listed as not special in tokenizer.json


def test_a_named_token_of_the_plain_vocabulary_becomes_special(tmp_path: Path, reference) -> None:
    folder = write_folder("byte_level", tmp_path, sep_token="re")
    ours, theirs = Tokenizer.load(folder), reference(folder)
    assert ours.vocab_size == len(theirs) == small_tokenizer("byte_level").vocab_size
    assert theirs.sep_token_id in ours.special_ids
    ids = theirs.encode("a re")
    assert ours.encode("a re") == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a "


def test_a_named_token_without_an_id_stays_outside(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder("byte_level", tmp_path, pad_token="[PAD]"))
    assert tokenizer.vocab_size == small_tokenizer("byte_level").vocab_size
    assert max(tokenizer.encode("[PAD]")) < tokenizer.vocab_size


def test_old_special_tokens_map(tmp_path: Path) -> None:
    folder = write_folder("llama2", tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}, "bos_token": "<s>"}')
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


def test_baked_in_truncation_and_padding_are_off(tmp_path: Path) -> None:
    folder = write_folder("byte_level", tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    text = TEXTS[0]
    assert Tokenizer.load(folder).encode(text) == small_tokenizer("byte_level").encode(text)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("tokenizer.json", None, r"tokenizer\.json is missing.*--tokenizer"),
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read"),
        ("tokenizer.json", '{"model": {}}', r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", "{]", r"tokenizer_config\.json cannot be read"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json must hold"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', r"added_tokens_decoder"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"content": 3}}}', r"added_tokens_decoder"),
        ("tokenizer_config.json", '{"chat_template": 3}', r"chat_template must be"),
        ("generation_config.json", "\x00", r"generation_config\.json cannot be read"),
        ("chat_template.json", "{", r"chat template in .* cannot be read"),
    ],
)
def test_broken_folder_is_a_clear_error(tmp_path: Path, name: str, text: str | None, match: str) -> None:
    folder = write_folder("byte_level", tmp_path)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=match) as error:
        Tokenizer.load(folder)
    assert str(tmp_path) in str(error.value)


def test_bad_input_is_a_request_error() -> None:
    tokenizer = small_tokenizer("byte_level")
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud83d")
    for ids in ([-1], [2**40]):
        with pytest.raises(RequestError, match="between 0"):
            tokenizer.decode(ids)


def test_async_forms_give_the_same() -> None:
    tokenizer = small_tokenizer("llama2")
    long = "\n".join(TEXTS) * 20

    async def run() -> None:
        for text in ("short", long):
            ids = await tokenizer.encode_async(text)
            assert ids == tokenizer.encode(text)
            assert await tokenizer.encode_async(text, False) == ids[1:]
            assert await tokenizer.decode_async(ids) == tokenizer.decode(ids)
        texts = [f"{number} {long}" for number in range(8)]
        assert await asyncio.gather(*map(tokenizer.encode_async, texts)) == [tokenizer.encode(text) for text in texts]
        with pytest.raises(RequestError, match="surrogate"):
            await tokenizer.encode_async(long + "\ud83d")

    asyncio.run(run())


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, ropeway.server.stream, ropeway.server.tokenizer\n"
        "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
