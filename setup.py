"""Builds the native CPU kernels when there is a C++ compiler; without one the package installs all the same.

Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/ropeway_kernels/cpu/csrc")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"]
# A source is compiled for its instruction set only; which one runs is decided on the user's machine.
FLAGS = {
    "isa_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512.cpp": AVX512,
    "isa_avx512bf16.cpp": [*AVX512, "-mavx512bf16"],
}
COMMON = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # sums are fused where the source says so, or an answer would depend on the compiler's mood
    "-Wall",
    "-pthread",
]


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        # A plain shared library, loaded through ctypes: it does not depend on the Python version.
        package, _, name = fullname.rpartition(".")
        return str(Path(*package.split("."), f"{name}.so"))

    def build_extension(self, ext: Extension) -> None:
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")

        def compile_one(source: str) -> str:
            flags = FLAGS.get(Path(source).name, []) if is_x86 else []
            [built] = self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=[*COMMON, *flags], depends=ext.depends
            )
            return built

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-pthread"],
            build_temp=self.build_temp,
            target_lang="c++",
        )


setup(
    ext_modules=[
        Extension(
            "ropeway_kernels.cpu.libropeway_cpu",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            optional=True,  # a failed build is a warning, and the torch path serves
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
