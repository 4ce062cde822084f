"""The packed-weight cache: the same bits back, a miss whenever something differs, and no start that fails because of it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropeway.errors import ConfigError
from ropeway.model import packed_cache
from ropeway.model.decoder import Decoder
from ropeway.model.packed_cache import KEEP, PackedCache
from ropeway.model.parallel import ProcessGroup
from ropeway_kernels import cpu
from tiny_models import load, paged_answers, random_prompts, save_checkpoint, tiny

pytestmark = pytest.mark.skipif(cpu.load() is None, reason=f"no native kernels: {cpu.why_not()}")

PROMPTS = random_prompts(11, 3)
FILE = "model.safetensors"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "untied": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "biased": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qk_norm": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma": ("Gemma3ForCausalLM", {"head_dim": 16, "layer_types": ["full_attention"] * 3}),
}


@pytest.fixture(autouse=True)
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's files are younger than the cache would trust."""
    monkeypatch.setattr(packed_cache, "_SETTLED_NS", 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model", tiny("LlamaForCausalLM", tie_word_embeddings=False))
    return tmp_path / "model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def start(model: Path, folder: Path, **options: Any) -> tuple[Decoder, bool]:
    """One server's start: (decoder, whether it came from the cache)."""
    cache = PackedCache(folder)
    decoder = load(model, native=cpu.load(), cache=cache, **options)
    cache.write()
    return decoder, cache.mapped_bytes > 0


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def logits(decoder: Decoder) -> torch.Tensor:
    return torch.stack([answer.logits for answer in paged_answers(decoder, PROMPTS, 4)])


def change_weights(model: Path) -> None:
    tensors = load_file(model / FILE)
    save_file({name: tensor * 0.5 for name, tensor in tensors.items()}, model / FILE, {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_second_start_computes_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path, folder: Path) -> None:
    architecture, changes = MODELS[name]
    save_checkpoint(tmp_path / "model", tiny(architecture, **changes))
    first, cached = start(tmp_path / "model", folder, dtype=dtype)
    assert not cached
    second, cached = start(tmp_path / "model", folder, dtype=dtype)
    assert cached
    assert torch.equal(logits(first), logits(second))
    assert len(entries(folder)) == 1


def test_sharded_checkpoint(tmp_path: Path, folder: Path) -> None:
    save_checkpoint(tmp_path / "model", tiny("LlamaForCausalLM"), max_shard_size="40KB")
    first, _ = start(tmp_path / "model", folder)
    second, cached = start(tmp_path / "model", folder)
    assert cached
    assert torch.equal(logits(first), logits(second))
    (tmp_path / "model" / "config.json").write_text((tmp_path / "model" / "config.json").read_text() + "\n")
    assert not start(tmp_path / "model", folder)[1]


def test_the_file_is_valid_safetensors_and_aligned(model: Path, folder: Path) -> None:
    decoder, _ = start(model, folder)
    stored = load_file(entries(folder)[0])
    state = decoder.finalized()
    assert state is not None
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in state.items())
    mapped = start(model, folder)[0].finalized()
    assert mapped is not None
    packed = [tensor for name, tensor in mapped.items() if name.endswith(".packed")]
    assert len(packed) == 4 * 3 + 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in packed)


def test_weights_are_mapped_not_copied(model: Path, folder: Path) -> None:
    start(model, folder)
    decoder, _ = start(model, folder)
    state = decoder.finalized()
    assert state is not None
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(entries(folder)[0]))
    ]
    assert all(any(low <= tensor.data_ptr() < high for low, high in ranges) for tensor in state.values())


def test_changed_content_is_noticed_at_equal_size_and_modification_time(model: Path, folder: Path) -> None:
    start(model, folder)
    before = (model / FILE).stat()
    change_weights(model)
    os.utime(model / FILE, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (model / FILE).stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second, cached = start(model, folder)
    assert not cached
    assert torch.equal(logits(second), logits(load(model, native=cpu.load())))
    assert start(model, folder)[1]
    assert len(entries(folder)) == 2


def test_files_that_may_change_unseen_are_not_trusted(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of the file system's clock a second write leaves the times as they are."""
    monkeypatch.setattr(packed_cache, "_SETTLED_NS", 3600 * 10**9)
    start(model, folder)
    assert not start(model, folder)[1]
    assert not entries(folder)


def test_files_that_change_while_they_are_loaded_are_not_kept(model: Path, folder: Path) -> None:
    cache = PackedCache(folder)
    load(model, native=cpu.load(), cache=cache)
    change_weights(model)
    cache.write()
    assert not entries(folder)
    assert not start(model, folder)[1]


def test_equal_content_elsewhere_shares_the_entry(model: Path, folder: Path, tmp_path: Path) -> None:
    start(model, folder)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert not start(copy, folder)[1]  # its digest is not known yet
    assert start(copy, folder)[1]
    assert len(entries(folder)) == 1


def test_weight_files_are_not_read_again(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(model, folder)
    monkeypatch.setattr(packed_cache.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert start(model, folder)[1]


def test_type_rank_and_layout_have_entries_of_their_own(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Second(ProcessGroup):
        rank, size = 1, 2

    def has_new_entry(**options: Any) -> bool:
        before = len(entries(folder))
        assert not start(model, folder, **options)[1]
        return len(entries(folder)) == before + 1

    assert has_new_entry()
    assert has_new_entry(dtype=torch.bfloat16)
    assert has_new_entry(group=Second())
    monkeypatch.setattr(packed_cache, "FORMAT", packed_cache.FORMAT + 1)
    assert has_new_entry()


def test_layout_names_the_panels_of_the_kernels(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[str] = []
    monkeypatch.setattr(PackedCache, "find", lambda self, files, layout: layouts.append(layout))
    native = cpu.load()
    assert native is not None
    for panel in (native.panel, 2 * native.panel):
        monkeypatch.setattr(native, "panel", panel)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ropeway.model.loader._load", lambda *_: None)
            patch.setattr(Decoder, "finalized", lambda self: None)
            load(model, native=native, cache=PackedCache(folder))
    assert layouts[0] != layouts[1]


@pytest.mark.parametrize("damage", ["empty", "header", "cut", "longer", "not json", "no offsets", "bad dtype"])
def test_damaged_file_is_made_anew(damage: str, model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = start(model, folder)
    (place,) = entries(folder)
    good = place.read_bytes()
    header = int.from_bytes(good[:8], "little")
    table = json.loads(good[8 : 8 + header])
    if damage == "no offsets":
        del table["norm.weight"]["data_offsets"]
    else:
        table["norm.weight"]["dtype"] = "F64"
    text = json.dumps(table).encode().ljust(header)
    bad = {
        "empty": b"",
        "header": good[:100],
        "cut": good[:-1],
        "longer": good + b"\0",
        "not json": good[:8] + b"?" * header + good[8 + header :],
        "no offsets": good[:8] + text + good[8 + header :],
        "bad dtype": good[:8] + text + good[8 + header :],
    }[damage]
    place.unlink()  # the first decoder still reads the old file
    place.write_bytes(bad)
    with caplog.at_level(logging.WARNING):
        second, cached = start(model, folder)
    assert not cached
    assert "is damaged" in caplog.text
    assert torch.equal(logits(first), logits(second))
    assert place.read_bytes() == good
    assert start(model, folder)[1]


def test_file_of_another_shape_is_made_anew(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = start(model, folder)
    (place,) = entries(folder)
    good = place.read_bytes()
    tensors = load_file(place)
    tensors["norm.weight"] = torch.zeros(7)
    save_file(tensors, place, {"layout": "?"})
    with caplog.at_level(logging.WARNING):
        second, cached = start(model, folder)
    assert not cached
    assert "norm.weight" in caplog.text
    assert torch.equal(logits(first), logits(second))
    assert place.read_bytes() == good


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"/x": 3}'])
def test_damaged_index_costs_one_start(text: str, model: Path, folder: Path) -> None:
    start(model, folder)
    (folder / "index.json").write_text(text)
    assert not start(model, folder)[1]
    assert start(model, folder)[1]


def test_a_folder_that_cannot_be_made_is_a_warning(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file")
    with caplog.at_level(logging.WARNING):
        decoder, cached = start(model, folder)
    assert not cached
    assert str(folder) in caplog.text
    assert logits(decoder).isfinite().all()


def test_a_full_disk_is_a_warning_and_leaves_nothing(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(packed_cache.os, "fsync", fail)
        start(model, folder)
    assert "No space left on device" in caplog.text
    assert [path.name for path in folder.iterdir()] == [".lock"]
    assert not start(model, folder)[1]
    assert start(model, folder)[1]


def test_no_file_that_takes_most_of_the_room(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = packed_cache.shutil.disk_usage(model)._replace(free=100)
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda _: usage)
    with caplog.at_level(logging.WARNING):
        start(model, folder)
    assert "free room" in caplog.text
    assert not entries(folder)


def test_servers_that_start_at_once(model: Path, folder: Path) -> None:
    caches = [PackedCache(folder) for _ in range(4)]
    for cache in caches:
        load(model, native=cpu.load(), cache=cache)
    threads = [thread for cache in caches if (thread := cache.write_in_background())]
    assert len(threads) == len(caches)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(entries(folder)) == 1
    assert not list(folder.glob("*.tmp"))
    assert start(model, folder)[1]


def test_left_over_files_of_a_killed_writer_go(model: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "0123.safetensors.tmp").write_bytes(b"half")
    start(model, folder)
    assert not list(folder.glob("*.tmp"))


def test_the_entries_used_last_stay(model: Path, folder: Path) -> None:
    folder.mkdir()
    for age in range(KEEP + 2):
        path = folder / f"{age}.safetensors"
        path.write_bytes(b"")
        os.utime(path, (10**9 - age, 10**9 - age))
    start(model, folder)
    names = {path.stem for path in entries(folder)}
    assert len(names) == KEEP
    assert {str(age) for age in range(KEEP - 1)} < names


def test_index_forgets_files_that_are_gone(model: Path, folder: Path, tmp_path: Path) -> None:
    start(model, folder)
    model.rename(tmp_path / "moved")
    start(tmp_path / "moved", folder)
    paths = json.loads((folder / "index.json").read_text()).keys()
    assert paths == {str((tmp_path / "moved" / name).resolve()) for name in ("config.json", FILE)}


def test_dummy_weights_are_not_kept(model: Path, folder: Path) -> None:
    assert not start(model, folder, load_format="dummy")[1]
    assert not folder.exists()


def test_a_broken_checkpoint_is_refused_as_ever(model: Path, folder: Path) -> None:
    (model / FILE).write_bytes((model / FILE).read_bytes()[:-10])
    with pytest.raises(ConfigError, match=FILE):
        start(model, folder)
    assert not entries(folder)
