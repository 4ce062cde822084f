"""GGUF files against the Hugging Face models they were written from: logits, tensors, configuration, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig
from transformers.models.auto import AutoConfig, AutoModelForCausalLM

from gguf_files import COMMON, CONFIGS, LLAMA3_ROPE, gguf_tensors, rope, tiny_model, write_gguf
from ropeway.errors import ConfigError
from ropeway.model.gguf import GGUFFile, iter_tensors, main, model_config, write_model_folder

TOKENS = torch.tensor([[1, 17, 260, 9, 33, 262, 264, 5, 5, 287, 100, 42, 7, 261, 3, 200, 1, 90, 91, 92, 93]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_the_same_logits_from_the_folder(name: str, tmp_path: Path, folder: Path) -> None:
    model = tiny_model(name)
    write_model_folder(write_gguf(tmp_path / "m.gguf", model), folder, with_weights=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.dtype == torch.float32
    assert type(loaded) is type(model)
    with torch.no_grad():
        expected, found = model(TOKENS).logits, loaded(TOKENS).logits
    assert expected.std() > 0.1  # the comparison means something
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_weights_come_back_exactly(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    found = dict(iter_tensors(write_gguf(tmp_path / "m.gguf", model)))
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        shifted = name == "gemma3" and key.endswith("norm.weight")  # stored as w + 1, so the last bits are gone
        torch.testing.assert_close(tensor, expected[key], atol=1e-7 if shifted else 0, rtol=0)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1, Type.F16, Type.BF16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_quantised_weights_are_those_of_quantising_the_original(name: str, kind: Type, tmp_path: Path) -> None:
    model = tiny_model(name)
    found = dict(iter_tensors(write_gguf(tmp_path / "m.gguf", model, matrices=kind)))
    for key, tensor in found.items():
        weight = model.state_dict()[key].numpy()
        if weight.ndim == 2:
            expected = gguf.dequantize(gguf.quants.quantize(weight, kind), kind)
            np.testing.assert_array_equal(tensor.numpy(), expected, err_msg=key)
            assert np.abs(expected - weight).max() > 0


def test_a_quantised_model_is_saved_as_bfloat16(tmp_path: Path, folder: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), matrices=Type.Q8_0)
    write_model_folder(path, folder, with_weights=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    expected = dict(iter_tensors(path))["model.layers.1.self_attn.q_proj.weight"].bfloat16()
    assert torch.equal(loaded.model.layers[1].self_attn.q_proj.weight, expected)


@pytest.mark.parametrize("kind", [kind for kind in Type if kind.name.startswith(("Q", "IQ", "TQ", "MX", "NV"))])
def test_every_type_the_package_knows_is_read_as_it_reads_it(kind: Type, tmp_path: Path) -> None:
    """Random bytes, enough of them for several pieces. A type it cannot de-quantise is named in the error."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 600, 512
    raw = np.random.default_rng(kind).integers(0, 60, (rows, columns // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        try:
            expected = gguf.dequantize(raw, kind)
        except NotImplementedError:
            with pytest.raises(ConfigError, match=rf"tensor weight is quantised as {kind.name}"):
                GGUFFile(tmp_path / "t.gguf")
        else:
            found = GGUFFile(tmp_path / "t.gguf").read("weight")
            assert found.shape == (rows, columns)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_the_original_one(name: str, tmp_path: Path, folder: Path) -> None:
    model = tiny_model(name)
    write_model_folder(write_gguf(tmp_path / "m.gguf", model), folder, with_weights=False)
    found, expected = AutoConfig.from_pretrained(folder).to_dict(), model.config.to_dict()
    for key in ("transformers_version", "_name_or_path", "head_dim", "architectures"):  # head_dim: absent in Qwen2
        expected.pop(key, None)
    assert {key: found.get(key) for key in expected} == expected


def test_generation_config_and_link(tmp_path: Path, folder: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), settings={"tokenizer.ggml.eot_token_id": 7})
    write_model_folder(path, folder, with_weights=False)
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "pad_token_id": 0,
    }
    assert (folder / "model.gguf").resolve() == path.resolve()
    assert not (folder / "model.safetensors").exists()
    assert {name for name, _ in iter_tensors(folder / "model.gguf")} >= {"model.norm.weight"}


def test_gemma_27b_scales_by_hidden_over_heads(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    model.config.num_hidden_layers = 62  # only the header is read
    path = write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(ConfigError, match="missing tensors"):
        model_config(GGUFFile(path))
    layer = {name: array for name, array in gguf_tensors(model, "gemma3").items() if name.startswith("blk.0.")}
    more = {name.replace("blk.0.", f"blk.{i}."): array for i in range(7, 62) for name, array in layer.items()}
    path = write_gguf(tmp_path / "n.gguf", model, extra=more)
    assert model_config(GGUFFile(path))["query_pre_attn_scalar"] == 64 // 4


# --- refusals: one line each, naming what is wrong ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba' is not supported; these are: llama, qwen2, gemma3"),
        ({"split.count": 3}, "one part of a split GGUF"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.logit_scale": 0.5}, r"setting llama\.logit_scale is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling of type 'longrope'"),
        ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count differs from the head size 16"),
        (
            {"llama.attention.head_count": [4, 4]},
            r"llama\.attention\.head_count must be a number; the file has one val",
        ),
        ({"tokenizer.ggml.tokens": ["x"] * 300}, "vocabulary is larger than token_embd.weight, which has 288 rows"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported"),
    ],
)
def test_unsupported_metadata_is_refused(settings: dict, message: str, tmp_path: Path, folder: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), settings=settings)
    with pytest.raises(ConfigError, match=message):
        write_model_folder(path, folder, with_weights=False)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"missing tensors: blk\.1\.ffn_up\.weight"):
        list(iter_tensors(write_gguf(tmp_path / "a.gguf", model, drop="blk.1.ffn_up.weight")))
    with pytest.raises(ConfigError, match=r"token_embd\.weight is missing"):
        list(iter_tensors(write_gguf(tmp_path / "b.gguf", model, drop="token_embd.weight")))
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    with pytest.raises(ConfigError, match=r"unknown tensors: blk\.0\.attn_sinks\.weight"):
        list(iter_tensors(write_gguf(tmp_path / "c.gguf", model, extra=extra)))
    extra = {"rope_freqs.weight": np.ones(8, np.float32)}  # means nothing to Qwen2
    path = write_gguf(tmp_path / "d.gguf", tiny_model("qwen2"), extra=extra)
    with pytest.raises(ConfigError, match=r"unknown tensors: rope_freqs\.weight"):
        list(iter_tensors(path))


def test_rope_factors_of_another_formula_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), extra={"rope_freqs.weight": factors})
    with pytest.raises(ConfigError, match="factors other than those of Llama"):
        model_config(GGUFFile(path))
    other = {**LLAMA3_ROPE, "factor": 32.0}  # Llama 3.2's: same formula, found from the factors
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON, head_dim=128, rope_parameters=other))
    found = model_config(GGUFFile(write_gguf(tmp_path / "n.gguf", model)))["rope_parameters"]
    assert {**found, "factor": round(found["factor"], 4)} == other


def test_rows_that_heads_cannot_share(tmp_path: Path) -> None:
    extra = {"blk.0.attn_k.weight": np.zeros((30, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), extra=extra)
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_k\.weight has 30 rows, which 2 heads cannot share"):
        list(iter_tensors(path))


def test_damaged_files(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model("llama")).read_bytes()
    header = GGUFFile(tmp_path / "whole.gguf").tensors["token_embd.weight"].start
    cases = {
        "empty": (b"", "the file is empty"),
        "other": (b"PK\x03\x04" + whole[4:], "is not a GGUF file"),
        "version": (whole[:4] + b"\x01" + whole[5:], "GGUF version 1 is not supported"),
        "big-endian": (whole[:4] + whole[7:3:-1] + whole[8:], "is not supported, only 2 and 3"),
        "no weights": (whole[:header], "lies beyond the end of the file"),
        "last byte": (whole[:-64], "is cut short: tensor .* lies beyond the end of the file"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            GGUFFile(path)
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("part", [x / 20 for x in range(1, 20)])
def test_a_header_cut_anywhere_is_refused(part: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    header = GGUFFile(path).tensors["token_embd.weight"].start
    path.write_bytes(path.read_bytes()[: int(header * part)])
    with pytest.raises(ConfigError, match="cut short"):
        GGUFFile(path)


def test_command_says_in_one_line_what_is_wrong(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nothing of the sort")
    assert main([str(bad), str(folder)]) == 2
    assert capsys.readouterr().err.strip() == f"{bad} is not a GGUF file"
    good = write_gguf(tmp_path / "good.gguf", tiny_model("llama"))
    assert main([str(good), str(tmp_path / "absent")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert main([str(good), str(folder), "--link"]) == 0
    assert rope(100000.0) == json.loads((folder / "config.json").read_text())["rope_parameters"]
