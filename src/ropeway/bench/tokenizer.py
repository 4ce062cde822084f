"""A model's tokenizer for the benchmark client, by the name the user or the server gives it.

Owns: from that name to a folder with tokenizer.json. Must not know: weights; none are fetched for this.
Called by: bench.serve.
"""

from __future__ import annotations

from pathlib import Path

from ropeway.errors import ConfigError
from ropeway.hub import DEMO_NAME, resolve_model
from ropeway.server.tokenizer import Tokenizer

FILES = ["tokenizer*.json", "special_tokens_map.json", "config.json", "generation_config.json", "*.jinja"]


def find_tokenizer(name: str) -> Tokenizer:
    """name: a folder, a .gguf file, a hub id, or the demo model. Raises ConfigError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return Tokenizer.load(path)
    if name == DEMO_NAME or path.suffix.lower() == ".gguf":
        return Tokenizer.load(resolve_model("" if name == DEMO_NAME else name))
    return Tokenizer.load(_from_hub(name))


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    advice = "give --tokenizer a folder, a .gguf file or a hub id"
    for is_local in (True, False):  # what was fetched before is good enough, and needs no network
        try:
            folder = Path(snapshot_download(name, allow_patterns=FILES, local_files_only=is_local))
        except Exception as error:  # the library's and its HTTP client's are many
            if not is_local:
                reason = str(error).strip().partition("\n")[0]
                raise ConfigError(f"no tokenizer found for {name} ({reason}); {advice}") from None
        else:
            if (folder / "tokenizer.json").is_file():
                return folder
    raise ConfigError(f"{name} on the hub has no tokenizer.json; {advice}")
