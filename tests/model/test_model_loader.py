"""Loading checkpoints: whole and sharded, tied in every form, and everything that can be wrong with the files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropeway.errors import ConfigError
from ropeway.model.decoder import Decoder
from tiny_models import edit_config, load, paged_answers, random_prompts, save_checkpoint, tiny

INDEX = "model.safetensors.index.json"
FILE = "model.safetensors"
PROMPTS = random_prompts(11, 3)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, tiny("LlamaForCausalLM", tie_word_embeddings=True))
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three shards or more, with an index."""
    save_checkpoint(tmp_path, tiny("LlamaForCausalLM"), max_shard_size="40KB")
    assert len(shards(tmp_path)) >= 3
    return tmp_path


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def logits(decoder: Decoder) -> torch.Tensor:
    return torch.stack([answer.logits for answer in paged_answers(decoder, PROMPTS, 4)])


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"})


def test_shards_with_and_without_index_equal_one_file(sharded: Path, tmp_path: Path) -> None:
    with_index = logits(load(sharded))
    (sharded / INDEX).unlink()
    assert torch.equal(logits(load(sharded)), with_index)
    merged: dict[str, torch.Tensor] = {}
    for shard in shards(sharded):
        merged |= load_file(shard)
        shard.unlink()
    save_file(merged, sharded / FILE)
    assert torch.equal(logits(load(sharded)), with_index)


def test_a_second_copy_in_training_names_is_left_alone(tied: Path) -> None:
    expected = logits(load(tied))
    save_file({"tok_embeddings.weight": torch.zeros(2)}, tied / "consolidated.safetensors")
    assert torch.equal(logits(load(tied)), expected)


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = shards(sharded)[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load(sharded)


def test_truncated_shard_is_named(sharded: Path) -> None:
    shard = shards(sharded)[1]
    content = shard.read_bytes()
    for size in (len(content) // 2, 5, 0):
        shard.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=shard.name):
            load(sharded)


def test_tensor_absent_from_its_shard_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = "model.layers.1.mlp.down_proj.weight"
    index["weight_map"][name] = next(s.name for s in shards(sharded) if s.name != index["weight_map"][name])
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"{index['weight_map'][name]}.*{name}"):
        load(sharded)


def test_interrupted_download_without_index_names_what_is_missing(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    gone = next(shard for shard in shards(sharded) if "model.layers.1.input_layernorm.weight" in load_file(shard))
    gone.unlink()
    with pytest.raises(ConfigError, match=r"lacks 13 tensors: model\.layers\.1\."):
        load(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../elsewhere"}}'])
def test_unusable_index_is_named(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json"):
        load(sharded)


def test_the_same_tensor_in_two_files(tied: Path) -> None:
    (tied / "copy.safetensors").write_bytes((tied / FILE).read_bytes())
    with pytest.raises(ConfigError, match="more than one file"):
        load(tied)


def test_wrong_vocab_size_names_tensor_and_shapes(tied: Path) -> None:
    edit_config(tied, vocab_size=160)
    with pytest.raises(ConfigError, match=r"embed_tokens.*\[151, 32\].*\[160, 32\]"):
        load(tied)


def test_quantised_tensors_are_refused(tied: Path) -> None:
    rewrite(tied, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*int8"):
        load(tied)


def test_no_weights_at_all(tied: Path) -> None:
    (tied / FILE).rename(tied / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
        load(tied)
    with pytest.raises(ConfigError, match=r"no \.gguf"):
        load(tied, load_format="gguf")


def test_tied_checkpoint_with_a_stored_head_as_well(tied: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(load(tied))
    rewrite(tied, lambda t: t.update({"lm_head.weight": torch.randn(151, 32)}))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(load(tied)), expected)
    assert not caplog.records


def test_untied_with_its_own_head(tied: Path) -> None:
    expected = logits(load(tied))
    edit_config(tied, tie_word_embeddings=False)
    rewrite(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load(tied)), expected)
    rewrite(tied, lambda t: t.update({"lm_head.weight": 2 * t["lm_head.weight"]}))
    torch.testing.assert_close(logits(load(tied)), 2 * expected)


@pytest.mark.parametrize("drop", [False, True])
def test_untied_without_a_head_is_refused(drop: bool, tied: Path) -> None:
    """``drop``: the key is absent, and Llama's default is untied."""
    edit_config(tied, drop=("tie_word_embeddings",) if drop else (), tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        load(tied)


def test_unexpected_tensors_are_named_and_rotary_buffers_are_not(tied: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    rewrite(tied, lambda t: t.update(extra))
    with caplog.at_level(logging.WARNING):
        load(tied)
    assert "q_proj.bias" in caplog.text
    assert "inv_freq" not in caplog.text


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM", "Gemma3ForCausalLM"]
)
def test_slots_are_the_checkpoint_s_tensors(architecture: str, tmp_path: Path) -> None:
    """Each missing one is named: nothing that the reference saves can stay unfilled."""
    save_checkpoint(tmp_path, tiny(architecture))
    for name in load_file(tmp_path / FILE):
        if "layers.1" in name or "layers" not in name:
            whole = (tmp_path / FILE).read_bytes()
            rewrite(tmp_path, lambda t, name=name: t.pop(name))
            with pytest.raises(ConfigError, match=f"lacks 1 tensors: {name}"):
                load(tmp_path)
            (tmp_path / FILE).write_bytes(whole)


def test_checkpoint_type_is_converted(tied: Path) -> None:
    rewrite(tied, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    rounded = logits(load(tied))
    rewrite(tied, lambda t: t.update({name: tensor.float() for name, tensor in t.items()}))
    assert torch.equal(logits(load(tied)), rounded)


def test_gguf_beside_the_config(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose weights are a .gguf file gives its tensors through the reader of that format."""
    import ropeway.model.gguf as gguf

    expected = logits(load(tied))
    tensors = load_file(tied / FILE)
    (tied / FILE).unlink()
    (tied / "model.gguf").touch()
    seen: list[Path] = []

    def iter_tensors(path: Path) -> Any:
        seen.append(path)
        return iter(tensors.items())

    monkeypatch.setattr(gguf, "iter_tensors", iter_tensors)
    assert torch.equal(logits(load(tied)), expected)
    assert seen == [tied / "model.gguf"]
    (tied / "second.gguf").touch()
    with pytest.raises(ConfigError, match=r"2 \.gguf"):
        load(tied)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM", "Gemma3ForCausalLM"]
)
def test_dummy_weights_are_seeded_and_of_sensible_scale(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(tiny(architecture).to_json_string(use_diff=False))
    first = logits(load(tmp_path, load_format="dummy", seed=1))
    assert torch.equal(first, logits(load(tmp_path, load_format="dummy", seed=1)))
    assert not torch.allclose(first, logits(load(tmp_path, load_format="dummy", seed=2)))
    assert 0.1 < first.std() < 10


def test_plain_weights_are_dropped_after_packing(tied: Path) -> None:
    """What stays in memory: packed linears, the embedding's own table, norms."""
    decoder = load(tied)
    linears = [m for m in decoder.modules() if getattr(m, "_packed", None) is not None]
    if not linears:
        pytest.skip("no oneDNN in this build of torch")
    assert len(linears) == 4 * decoder.config.num_layers + 1
    names = {name for name, _ in decoder.named_parameters()}
    assert "embedding.weight" in names
    assert all(name == "embedding.weight" or "norm" in name for name in names)
