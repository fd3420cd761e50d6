"""Packaging: ``megatron.zero_bubble`` installs beside ``megatron.core``, in the namespace they share.

Ranges here say what the code works with; ``scripts/constraints.txt`` pins what it is tested with.
"""

import re
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

ROOT = Path(__file__).parent
(VERSION,) = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "megatron/zero_bubble/__init__.py").read_text(), re.MULTILINE
)

setup(
    name="megatron-zero-bubble",
    version=VERSION,
    description="Zero-bubble pipeline schedules for stock megatron-core, on GPUs or CPU cores",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["megatron.zero_bubble", "megatron.zero_bubble.*"]),
    ext_modules=[
        Extension(
            "megatron.zero_bubble._planner",
            sources=["csrc/planner.cpp"],
            depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/planner/*.h")),
            # No fused multiply-add: the search's results are the same to the last bit on every machine.
            extra_compile_args=["-std=c++17", "-O2", "-ffp-contract=off"],
            optional=True,  # without it the same search runs in Python, on a smaller budget
        )
    ],
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
