"""Unmodified clients against a running server: openai and Anthropic for Node, LangChain and LiteLLM for Python.

    python tests/clients/check.py http://127.0.0.1:8000

Installs them once, outside the repository (about 500 MB; needs npm), and runs calls.py and calls.mjs. The official Python
clients are part of the ordinary tests. Prints one line per call; exit status 1 if one failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("ROPEWAY_HOME", Path.home() / ".cache" / "ropeway")) / "clients"
PYTHON_PACKAGES = ["langchain-openai", "litellm"]
NODE_PACKAGES = ["openai", "@anthropic-ai/sdk"]


def set_up() -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    if not (HOME / "venv").is_dir():
        venv.create(HOME / "venv", with_pip=True)
        subprocess.run([HOME / "venv/bin/python", "-m", "pip", "install", "--quiet", *PYTHON_PACKAGES], check=True)
    if not (HOME / "node_modules").is_dir():
        subprocess.run(["npm", "install", "--silent", "--prefix", HOME, *NODE_PACKAGES], check=True)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    url = sys.argv[1].rstrip("/")
    set_up()
    # Node looks for packages beside the script's own path, so it reads the script from its standard input.
    failed = subprocess.run([HOME / "venv/bin/python", HERE / "calls.py", url], timeout=600).returncode
    script = (HERE / "calls.mjs").read_bytes()
    command = ["node", "--input-type=module", "-", url]
    failed |= subprocess.run(command, input=script, cwd=HOME, timeout=600).returncode
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
