"""The compiled parts of ``megatron.zero_bubble`` and its page on a registry; the rest is in ``pyproject.toml``.

``ZB_BUILD`` selects the compiled ops, see ``_ops``. ``ZB_PROJECT_URL`` is the address of the project's repository, to
which links lead from the page on a registry, and ``ZB_SITE_URL`` that of its site, which has the playground.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
PACKAGE = "megatron.zero_bubble"
CUDA_SOURCES = ("csrc/ops_cuda.cpp", "csrc/wgrad/cublaslt.cpp")
# Headers that our CUDA sources include, and their packages. torch's wheels for CUDA 13 require only the first two.
CUDA_PACKAGES = {
    "cublasLt.h": "nvidia-cublas",
    "cuda_runtime_api.h": "nvidia-cuda-runtime",
    "crt/host_defines.h": "nvidia-cuda-crt",
    "nv/target": "nvidia-cuda-cccl",
}
PAGES = {"Homepage": "", "Documentation": "/blob/HEAD/docs/index.md", "Changelog": "/blob/HEAD/CHANGELOG.md"}
SITE_PAGES = {"Documentation": "/index.html", "Playground": "/playground/index.html"}
_LINK = re.compile(r"(!?\[([^]]*)\])\((?!https?:|#)([^)\s]+)\)")  # relative ones: [text](target), ![text](target)


def _headers(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"csrc/{folder}/*.h"))


def _planner() -> list[Extension]:
    """The compiled loops of the search. Without them, the search runs in Python with a smaller budget."""
    try:
        import pybind11
    except ImportError as error:
        remedy = "install pybind11 first, then this package with `pip install --no-build-isolation`"
        return _say(f"no compiled search: pybind11 is not importable in the build environment ({error}); {remedy}")
    planner = Extension(
        f"{PACKAGE}.core.search._planner",
        sources=["csrc/planner.cpp"],
        depends=_headers("planner"),
        include_dirs=[pybind11.get_include()],
        # Without fused multiply-add, the results of the search are the same bit for bit on every machine.
        extra_compile_args=["-std=c++17", "-O2", "-g0", "-ffp-contract=off", "-fvisibility=hidden"],
        optional=True,
    )
    return [planner]


def _ops() -> tuple[list[Extension], dict]:
    """The extension with the weight-gradient ops, compiled against the installed torch, and its build command.

    ``ZB_BUILD`` selects the backend: ``auto`` (the default) builds what this machine supports, at least the ops for the
    CPU; with ``cpu`` or ``cuda``, a failed build is an error; ``none`` builds nothing. Nothing is downloaded.
    """
    wanted = os.environ.get("ZB_BUILD", "auto")
    if wanted not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"setup.py: ZB_BUILD must be auto, cpu, cuda or none; got {wanted!r}")
    if wanted == "none":
        return _say("no compiled ops, because ZB_BUILD=none"), {}
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        remedy = "install torch first, then this package with `pip install --no-build-isolation`"
        if wanted != "auto":
            raise SystemExit(
                f"setup.py: ZB_BUILD={wanted} needs torch in the build environment ({error}); {remedy}"
            ) from error
        return _say(f"no compiled ops: torch is not importable in the build environment ({error}); {remedy}"), {}
    folders, missing = [], "a CUDA build of torch; install one"
    if torch.version.cuda is not None and wanted != "cpu":
        folders, missing = _cuda_headers(Path(torch.__file__).parents[1] / "nvidia", _toolkits(), torch.version.cuda)
    if wanted == "cuda" and missing:
        raise SystemExit(f"setup.py: ZB_BUILD=cuda needs {missing}, or set ZB_BUILD=cpu")
    cuda = wanted != "cpu" and not missing
    lack = f"CUDA needs {missing}" if wanted != "cpu" else "this is what ZB_BUILD=cpu asks for"
    _say("compiled ops for " + ("CPU and CUDA" if cuda else f"the CPU only; {lack}"))
    # All sources are host code: the kernels are those of cuBLASLt, which torch has loaded.
    ops = cpp_extension.CppExtension(
        f"{PACKAGE}._ops",
        sources=["csrc/ops.cpp", *(CUDA_SOURCES if cuda else ())],
        depends=_headers("wgrad"),
        include_dirs=folders,
        # The linker would drop libraries of torch that no symbol refers to directly, and with them cuBLASLt. Setuptools
        # puts `libraries` in front of the flag, where it has no effect.
        extra_link_args=["-Wl,--no-as-needed", "-lc10_cuda", "-ltorch_cuda"] if cuda else [],
        extra_compile_args=["-O2"],
        optional=wanted == "auto",  # without it, the reference in torch runs with a warning
    )
    build = cpp_extension.BuildExtension.with_options(use_ninja=False)
    return [ops], {"build_ext": _with_a_trial(build, ops, falls_back=wanted == "auto") if cuda else build}


def _with_a_trial(command: type, ops: Extension, falls_back: bool) -> type:
    """The command that builds and then loads ``ops`` for CUDA. If that fails, it may build the ops for the CPU."""

    class Build(command):
        def build_extension(self, extension: Extension) -> None:
            try:
                super().build_extension(extension)
                if extension is ops:
                    self._load(self.get_ext_fullpath(extension.name))
            except Exception as error:
                if extension is not ops or not falls_back:
                    raise
                _say(f"the ops for CUDA cannot be used, see above ({str(error)[-500:]}); compiled ops for the CPU only")
                extension.sources = [source for source in extension.sources if source not in CUDA_SOURCES]
                extension.extra_link_args = []
                super().build_extension(extension)

        def _load(self, built: str) -> None:
            # In a folder without Python files, which cannot hide modules that torch imports.
            load = "import sys, torch; torch.ops.load_library(sys.argv[1])"
            command = [sys.executable, "-c", load, str(Path(built).resolve())]
            result = subprocess.run(command, cwd=self.build_temp, capture_output=True, text=True, check=False)
            if result.returncode:
                raise CompileError(f"what was built does not load: {result.stderr.strip()[-400:]}")

    return Build


def _cuda_headers(wheels: Path, toolkits: list[Path], version: str) -> tuple[list[str], str]:
    """The include folders of CUDA's headers, first from torch's NVIDIA wheels, and what to install if some are missing.

    Args:
        wheels: the folder ``nvidia`` next to torch.
        toolkits: the folders of installed CUDA toolkits.
        version: torch's version of CUDA.
    """
    layouts = ("include", "include/cccl", "targets/*/include", "targets/*/include/cccl")
    folders = sorted(wheels.glob("*/include"))
    for toolkit in toolkits:
        candidates = [folder for layout in layouts for folder in sorted(toolkit.glob(layout))]
        if any(_major(folder) == version.partition(".")[0] for folder in candidates):
            folders += candidates
    found = {name: next((str(i) for i in folders if (i / name).exists()), None) for name in CUDA_PACKAGES}
    packages = []
    for package in (package for name, package in CUDA_PACKAGES.items() if found[name] is None):
        if version.startswith("12."):  # names of these packages end in the version; nvcc's has the folder crt
            package = package.replace("-crt", "-nvcc") + "-cu12"
        packages.append(package if "cublas" in package else f"'{package}=={version}.*'")
    if packages:
        names = ", ".join(name for name in CUDA_PACKAGES if found[name] is None)
        return [], f"CUDA's headers ({names}); `pip install {' '.join(packages)}`"
    # In the order in which they were searched, so that a toolkit's headers never hide those of the wheels.
    return [folder for folder in map(str, folders) if folder in found.values()], ""


def _major(folder: Path) -> str | None:
    """The major version of CUDA whose headers are in this folder."""
    header = folder / "cuda_runtime_api.h"
    found = re.search(r"#define CUDART_VERSION\s+(\d+)\d{3}\b", header.read_text()) if header.exists() else None
    return found[1] if found else None


def _toolkits() -> list[Path]:
    """The folders of CUDA toolkits: the one that the environment names, or else nvcc's and the usual one."""
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return [Path(named)]
    tops = []
    if nvcc := shutil.which("nvcc"):  # may be a script that calls the real one, which lies in another folder
        says = subprocess.run([nvcc, "--dryrun", "-c", "none.cu"], capture_output=True, text=True, check=False).stderr
        tops = [Path(top).resolve() for top in re.findall(r"^#\$ TOP=(.+?)\s*$", says, re.MULTILINE)]
    return [*tops, Path("/usr/local/cuda")]


def _say(text: str) -> list[Extension]:
    print(f"megatron-zero-bubble: {text}", flush=True)
    return []


def _readme(url: str, site: str) -> str:
    """README.md for a registry's page, where relative links lead nowhere: they lead to this version of the project.

    Args:
        url: address of the project's repository; without one, links become their text and pictures are left out.
        site: address of its site, or "".
    """
    text = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else ""
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "megatron/zero_bubble/__init__.py").read_text(), re.MULTILINE
    )
    if site:
        text = text.replace("](docs/playground.md)", f"]({site}{SITE_PAGES['Playground']})")
    if url:
        return _LINK.sub(
            lambda link: f"{link[1]}({url}/{'raw' if link[1][0] == '!' else 'blob'}/v{version}/{link[3]})", text
        )
    return _LINK.sub(lambda link: "" if link[1][0] == "!" else link[2], text)


OPS, COMMANDS = _ops()
URL, SITE = (os.environ.get(name, "").rstrip("/") for name in ("ZB_PROJECT_URL", "ZB_SITE_URL"))
OF_PROJECT = {name: URL + path for name, path in PAGES.items()}
OF_SITE = {name: SITE + path for name, path in SITE_PAGES.items()}
setup(
    license="Apache-2.0",
    long_description=_readme(URL, SITE),
    long_description_content_type="text/markdown",
    project_urls=(OF_PROJECT if URL else {}) | (OF_SITE if SITE else {}),
    ext_modules=[*_planner(), *OPS],
    cmdclass=COMMANDS,
    options={"build_ext": {"force": True}},  # a build for another torch, or without CUDA, would look up to date
)
