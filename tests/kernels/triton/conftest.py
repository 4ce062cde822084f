"""These tests run the Triton kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import importlib.util
import os

# Read when a kernel is defined, Triton's own included: so before anything here imports one.
os.environ["TRITON_INTERPRET"] = "1"

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
