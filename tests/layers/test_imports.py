"""Imports point downward, and the API process stays free of torch. The table is the plan of the house."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
KERNELS = ROOT / "kernels"

BASE = {"ropeway", "protocol", "errors", "hashing", "config"}
ALLOWED: dict[str, set[str]] = {  # room -> rooms that it may import, besides itself
    "ropeway": set(),
    "errors": set(),
    "hashing": set(),
    "protocol": set(),
    "config": {"errors"},
    "vocabulary": {"errors"},
    "constraint": set(),
    "engine": BASE,
    "attention": BASE | {"ropeway_kernels"},
    "model": BASE | {"attention", "ropeway_kernels"},
    "worker": BASE | {"model", "attention", "ropeway_kernels", "engine.step", "vocabulary", "constraint"},
    "hub": BASE,
    "metrics": BASE,
    "server": BASE | {"engine.client", "metrics", "vocabulary", "constraint"},
    "bench": BASE | {"hub", "engine.client", "engine.process_client", "server.tokenizer", "serve"},
}
COMPOSITION_ROOT = {"cli", "serve", "__main__"}  # may import everything
STANDARD_LIBRARY_ONLY = {"ropeway", "errors", "hashing", "protocol", "config"}
TORCH_FREE = {
    *STANDARD_LIBRARY_ONLY,
    *COMPOSITION_ROOT,
    "bench",
    "engine",
    "hub",
    "metrics",
    "server",
    "vocabulary",
    "constraint",
}
HEAVY = {"torch", "transformers", "triton", "safetensors"}


def module_of(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, module: str) -> set[str]:
    """Dotted names of all imported modules, wherever in the file, TYPE_CHECKING blocks and functions included."""
    found: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names if is_module(f"{base}.{alias.name}"))
    return found


def is_module(name: str) -> bool:
    path = ROOT / "src" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def room_of(module: str) -> str:
    """`ropeway.engine.step` is in `engine`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "ropeway" and len(parts) > 1 else parts[0]


def is_allowed(room: str, imported: str) -> bool:
    inner = imported.removeprefix("ropeway.")
    return room_of(imported) == room or any(
        inner == name or inner.startswith(name + ".") for name in ALLOWED[room] if name != "ropeway"
    )


def violations(path: Path, module: str) -> list[str]:
    room = room_of(module)
    wrong = []
    for imported in sorted(imports_of(path, module)):
        top = imported.split(".")[0]
        if top in ("ropeway", "ropeway_kernels") and imported != "ropeway" and room not in COMPOSITION_ROOT:
            if imported in ("ropeway.engine", "ropeway.server") and room_of(imported) != room:
                continue  # the parent of `ropeway.engine.step`, listed beside it
            if not is_allowed(room, imported):
                wrong.append(f"{module} imports {imported}")
        if top in HEAVY and room in TORCH_FREE:
            wrong.append(f"{module} imports {imported}, but {room} is a room without torch")
        if room in STANDARD_LIBRARY_ONLY and top != "ropeway" and top not in sys.stdlib_module_names:
            wrong.append(f"{module} imports {imported}, which is not in the standard library")
        if room == "engine" and top not in ("ropeway", "numpy") and top not in sys.stdlib_module_names:
            wrong.append(f"{module} imports {imported}; the engine knows numpy and the standard library only")
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    module = module_of(path, ROOT / "src")
    assert room_of(module) in {*ALLOWED, *COMPOSITION_ROOT}, "a new room: give it its place in the table"
    assert violations(path, module) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ropeway.engine.scheduler", "from ropeway.worker.runner import ModelRunner"),
        ("ropeway.engine.scheduler", "from ropeway.server import sse"),
        ("ropeway.engine.core", "import torch"),
        ("ropeway.engine.core", "import orjson"),
        ("ropeway.protocol", "import numpy"),
        ("ropeway.protocol", "from ropeway.engine.request import Request"),
        ("ropeway.server.stream", "from ropeway.engine.scheduler import Scheduler"),
        ("ropeway.server.stream", "from ropeway.engine import scheduler"),
        ("ropeway.server.stream", "from ..engine.scheduler import Scheduler"),
        ("ropeway.server.tokenizer", "def f():\n    from transformers import AutoTokenizer"),
        ("ropeway.model.decoder", "from ropeway.worker.batch import InputBatch"),
        ("ropeway.attention.base", "from ropeway.model.registry import DecoderConfig"),
        ("ropeway.worker.runner", "from ropeway.engine.core import EngineCore"),
        ("ropeway.hub", "import torch.nn"),
        ("ropeway.hashing", "from ropeway.cli import main"),
    ],
)
def test_the_test_sees_what_points_upward(module: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "probe.py"
    path.write_text(line)
    assert violations(path, module)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ropeway.server.stream", "from ropeway.engine.client import TokenDelta"),
        ("ropeway.worker.runner", "from ropeway.engine.step import SchedulerOutput"),
        ("ropeway.worker.runner", "import torch"),
        ("ropeway.engine.core", "import numpy as np\nfrom ropeway.protocol import StepOutputs"),
        ("ropeway.cli", "from ropeway.serve import serve"),
    ],
)
def test_the_test_lets_through_what_points_downward(module: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "probe.py"
    path.write_text(line)
    assert violations(path, module) == []


def test_kernels_know_nothing_of_the_house() -> None:
    assert not (KERNELS / "__init__.py").exists(), "a top-level package called `kernels` breaks transformers"
    for path in KERNELS.rglob("*.py"):
        for imported in imports_of(path, module_of(path, KERNELS)):
            top = imported.split(".")[0]
            assert top in {"torch", "triton", "numpy", "ropeway_kernels"} or top in sys.stdlib_module_names, (
                f"{path.relative_to(ROOT)} imports {imported}"
            )


def loaded_after(*modules: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that imported these."""
    code = f"import {', '.join(modules)}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_the_api_process_loads_no_torch() -> None:
    api = [module_of(path, ROOT / "src") for path in SOURCES]
    api = [module for module in api if room_of(module) in TORCH_FREE and not module.endswith("__main__")]
    loaded = loaded_after(*api)
    assert {"fastapi", "tokenizers"} <= loaded  # or the test would prove nothing
    assert not loaded & {"torch", "transformers", "triton"}


def test_the_spawned_engine_loads_no_http_stack() -> None:
    """What the child imports before its executor: the parent's main module, its own, and the executor factory's."""
    loaded = loaded_after("ropeway.cli", "ropeway.serve", "ropeway.engine.process")
    assert not loaded & {"torch", "fastapi", "starlette", "uvicorn", "pydantic", "tokenizers", "prometheus_client"}


def test_a_cpu_needs_no_triton() -> None:
    """It is an optional dependency, and slow to import: only what runs on a GPU may ask for it."""
    loaded = loaded_after("ropeway.worker.executor", "ropeway.worker.runner", "ropeway.model.loader")
    assert "torch" in loaded
    assert "triton" not in loaded
