"""The one part of the build that pyproject.toml cannot say: an optional extension in C.

Without a compiler, or with one that fails, the build goes on without it and numpy does the work
(collectives/native.py).
"""

from __future__ import annotations

import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "collectives/native"
SOURCES = ("module", "buffers", "dynamic", "kernels_base", "kernels_avx2", "kernels_avx512")
BODIES = (
    "bits",
    "blocks",
    "flat",
    "gram",
    "halves",
    "levels",
    "random",
    "rows",
    "sketch",
    "topk",
    "vectors",
)
HEADERS = ("buffers", "kernels", "kernels_body", *(f"body_{name}" for name in BODIES))

# Every replica must get the same bits: no contraction into fused multiply-adds, no fast-math. They
# come after CFLAGS, so they win. -O3 is what makes gcc vectorize.
FLAGS = {
    "unix": [
        "-std=c11",
        "-O3",
        "-fno-fast-math",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
    ],
    "mingw32": ["-std=c11", "-O3", "-fno-fast-math", "-ffp-contract=off"],
    "msvc": ["/std:c11", "/O2", "/fp:precise"],
}

# One library, and one wheel, for every Python from 3.11 on, the first whose stable ABI has buffers.
# Builds of Python without the GIL have no stable ABI; there it is for that version alone.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildKernels(build_ext):
    """Builds with the flags of the compiler that was found."""

    def build_extension(self, ext: Extension) -> None:
        ext.extra_compile_args = FLAGS.get(self.compiler.compiler_type, [])
        ext.libraries = ["m"] if self.compiler.compiler_type == "unix" else []
        super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "atoll._kernels",
            sources=[f"{FOLDER}/{name}.c" for name in SOURCES],
            depends=[f"{FOLDER}/{name}.h" for name in HEADERS],
            include_dirs=[FOLDER],
            define_macros=[("Py_LIMITED_API", "0x030b0000")] if STABLE else [],
            py_limited_api=STABLE,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
