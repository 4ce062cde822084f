"""Every instruction set of the native CPU kernels that this machine can run, side by side in one process.

Owns: loading the library once per set. Must not know: what is tested. Called by: tests of the native kernels.
A loaded library serves one set, so each set gets a copy of the file.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from ropeway_kernels import cpu


@functools.cache
def native(isa: str | None) -> cpu.NativeKernels:
    """The kernels as `cpu.load` gives them to a process with ROPEWAY_CPU_ISA=isa (None: unset), and its errors."""
    assert cpu._LIBRARY.exists()
    with TemporaryDirectory() as folder:  # the system keeps a loaded file's contents when its name goes
        copy = Path(shutil.copy(cpu._LIBRARY, folder))
        environment = {key: value for key, value in os.environ.items() if key != cpu.ISA_VARIABLE}
        if isa is not None:
            environment[cpu.ISA_VARIABLE] = isa
        with patch.object(cpu, "_LIBRARY", copy), patch.dict(os.environ, environment, clear=True):
            kernels, why_not = cpu._open.__wrapped__()
    assert kernels is not None, why_not
    return kernels


def usable() -> list[str]:
    """Names of the sets that this build and this processor have, the widest first; none without the library."""

    def works(isa: str) -> bool:
        try:
            native(isa)
        except ValueError:
            return False
        return True

    return [isa for isa in cpu.ISAS if works(isa)] if cpu._LIBRARY.exists() else []
