"""``zero-bubble report``: the environment, in the form that a bug report needs.

Nothing here needs torch or megatron-core to be installed: what is missing is part of the report.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from megatron.zero_bubble import __version__
from megatron.zero_bubble.errors import SeamError, UserError
from megatron.zero_bubble.job.installed import INSTALL
from megatron.zero_bubble.search.loops import compiled

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "triton", "numpy")


def add_report(verb: argparse.ArgumentParser) -> None:
    """The flags of ``report``."""
    verb.description = (
        "Print versions, compiled parts and devices, and whether megatron-core has every name that this package "
        "replaces or uses."
    )
    verb.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")
    verb.set_defaults(command=lambda options: report(options.format))


def report(form: str = "text") -> str:
    """Versions, compiled parts, devices and the state of the seams, as aligned lines or as one JSON object."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's imports warn about optional packages, which are listed here
        facts = dict(_facts())
    if form == "json":
        return json.dumps(facts, indent=2) + "\n"
    width = max(map(len, facts)) + 2
    return "".join(f"{name:{width}}{text}\n" for name, text in facts.items())


def _facts() -> Iterator[tuple[str, str]]:
    yield "zero-bubble", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})"
    yield "machine", f"{platform.machine()}, {platform.platform()}"
    for package in _PACKAGES:
        yield package, _version(package)
    yield "planner", _planner()
    if find_spec("torch") is None:
        yield "training", f"not available without torch: {INSTALL}"
        return
    from megatron.zero_bubble import kernels
    from megatron.zero_bubble.platforms import select
    from megatron.zero_bubble.platforms.cuda import CudaPlatform

    device = select("auto")
    yield "device", device.describe()
    yield from CudaPlatform().versions()
    yield "weight gradients", f"{kernels.select(device.name).words}, on {device.name}"
    if find_spec("megatron.core") is None:
        yield "training", f"not available without megatron-core: {INSTALL}"
        return
    device.setup(0)  # megatron-core cannot be imported on a machine without a GPU otherwise
    yield from _megatron()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _planner() -> str:
    try:
        return "compiled" if compiled() else "Python (about fifty times slower, searches with a smaller budget)"
    except UserError as error:
        return f"broken: {error}"


def _megatron() -> Iterator[tuple[str, str]]:
    """Whether every name of megatron-core that we replace or use is there, and which functions have unknown bodies."""
    try:
        import megatron.core

        from megatron.zero_bubble.patching import Seam, bodies
        from megatron.zero_bubble.patching.seams import installed_seams

        seams = installed_seams()
        found = [getattr(seams, field.name) for field in fields(seams)]
        replaced = [seam for seam in found if isinstance(seam, Seam) and seam.module.startswith("megatron.core.")]
        for seam in replaced:
            seam.resolve()
    except (SeamError, ImportError) as error:
        yield "seams", f"broken: {error}"
        return
    yield "seams", f"all found: {len(replaced)} replaced and {len(seams.used)} used names of megatron-core"
    changed = bodies.changed_bodies(megatron.core.__version__, bodies.SCHEDULE)
    yield "changed functions", "; ".join(changed) or "none"
