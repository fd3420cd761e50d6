"""Packaging: ``megatron.zero_bubble`` installs beside ``megatron.core``, in the namespace they share.

Ranges here say what the code works with; ``scripts/constraints.txt`` pins what it is tested with.
"""

import os
import re
import shutil
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

ROOT = Path(__file__).parent
PACKAGE = "megatron.zero_bubble"
(VERSION,) = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "megatron/zero_bubble/__init__.py").read_text(), re.MULTILINE
)


def _headers(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"csrc/{folder}/*.h"))


def _planner() -> Extension:
    """The search's loops: plain C++."""
    return Extension(
        f"{PACKAGE}._planner",
        sources=["csrc/planner.cpp"],
        depends=_headers("planner"),
        # No fused multiply-add: the search's results are the same to the last bit on every machine.
        extra_compile_args=["-std=c++17", "-O2", "-ffp-contract=off"],
        optional=True,  # without it the same search runs in Python, on a smaller budget
    )


def _ops() -> tuple[list[Extension], dict]:
    """The ops of the weight gradients, compiled against the torch that is installed, and the command that does it.

    ``ZB_BUILD`` says which: ``auto`` (the default: what this machine can build), ``cpu``, ``cuda`` or ``none``; with
    the second and third, what cannot be built is an error. Nothing is downloaded.
    """
    wanted = os.environ.get("ZB_BUILD", "auto")
    if wanted not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"setup.py: ZB_BUILD must be auto, cpu, cuda or none; got {wanted!r}")
    if wanted == "none":
        return _say("no compiled ops, as ZB_BUILD=none asks"), {}
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        remedy = "install torch first, then install this with `pip install --no-build-isolation`"
        if wanted != "auto":
            raise SystemExit(f"setup.py: ZB_BUILD={wanted} needs torch where it builds ({error}); {remedy}") from error
        return _say(f"no compiled ops, because torch is not to be seen here ({error}): {remedy}"), {}
    missing = [
        what
        for what, found in (
            ("a CUDA build of torch", torch.version.cuda),
            ("a CUDA toolkit (nvcc on PATH, or CUDA_HOME)", cpp_extension.CUDA_HOME or shutil.which("nvcc")),
        )
        if not found
    ]
    if wanted == "cuda" and missing:
        raise SystemExit(f"setup.py: ZB_BUILD=cuda needs {' and '.join(missing)}; install that, or set ZB_BUILD=cpu")
    cuda = wanted != "cpu" and not missing
    _say(f"compiled ops for {'CPU and CUDA' if cuda else 'the CPU'}" + (f", without {missing[0]}" if missing else ""))
    make = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    ops = make(
        f"{PACKAGE}._ops",
        sources=["csrc/ops.cpp", *(("csrc/ops_cuda.cpp", "csrc/wgrad/cublaslt.cu") if cuda else ())],
        depends=_headers("wgrad"),
        libraries=["cublasLt"] if cuda else [],
        extra_compile_args=["-O2"] if not cuda else {"cxx": ["-O2"], "nvcc": ["-O2"]},
        optional=wanted == "auto",  # without it the reference in torch runs, and says so
    )
    return [ops], {"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=False)}


def _say(text: str) -> list[Extension]:
    print(f"megatron-zero-bubble: {text}", flush=True)
    return []


OPS, COMMANDS = _ops()
setup(
    name="megatron-zero-bubble",
    version=VERSION,
    description="Zero-bubble pipeline schedules for stock megatron-core, on GPUs or CPU cores",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["megatron.zero_bubble", "megatron.zero_bubble.*"]),
    ext_modules=[_planner(), *OPS],
    cmdclass=COMMANDS,
    install_requires=[
        "torch>=2.6",
        "megatron-core==0.16.1",
        "numpy",
        "psutil",  # megatron-core's checkpoint writers: without it a save never ends
        "pyyaml",
        'triton; platform_system == "Linux"',  # megatron-core imports it even where it launches no kernel
    ],
    extras_require={
        "dev": ["hypothesis", "import-linter", "mypy", "pytest", "pytest-timeout", "ruff", "types-pyyaml"],
        "exact": ["ortools"],
        "tensorboard": ["tensorboard"],
    },
    entry_points={"console_scripts": ["zero-bubble = megatron.zero_bubble.__main__:main"]},
)
