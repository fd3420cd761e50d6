"""``zero-bubble report``: the environment, in the form that a bug report needs.

Nothing here needs torch or megatron-core to be installed: what is missing is part of the report.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from megatron.zero_bubble import __version__
from megatron.zero_bubble.core.search.loops import compiled
from megatron.zero_bubble.planning.job.installed import INSTALL

_NAMES = "megatron-core names (seams)"
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
    facts: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's imports warn about optional packages, which are listed here
        for name, part in _PARTS.items():
            try:
                facts.update(part())
            except Exception as error:  # noqa: BLE001 - this report exists for parts that fail, and shows the error
                facts[name] = f"broken: {type(error).__name__}: {error}"
    if form == "json":
        return json.dumps(facts, indent=2) + "\n"
    width = max(map(len, facts)) + 2
    return "".join(f"{name:{width}}{text}\n" for name, text in facts.items())


def _versions() -> Iterator[tuple[str, str]]:
    yield "zero-bubble", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})"
    yield "machine", f"{platform.machine()}, {platform.platform()}"
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"


def _planner() -> Iterator[tuple[str, str]]:
    yield "planner", "compiled" if compiled() else "Python (about fifty times slower, searches with a smaller budget)"


def _devices() -> Iterator[tuple[str, str]]:
    if find_spec("torch") is None:
        return
    from megatron.zero_bubble.engine import kernels
    from megatron.zero_bubble.engine.platforms import select
    from megatron.zero_bubble.engine.platforms.cuda import CudaPlatform

    device = select("auto")
    yield "device", device.describe()
    yield from CudaPlatform().versions()
    yield "weight gradients", f"{kernels.select(device.name).words}, on {device.name}"


def _megatron() -> Iterator[tuple[str, str]]:
    """Check every name of megatron-core that we replace or use, and list the functions with unknown bodies."""
    missing = [module for module in ("torch", "megatron.core") if find_spec(module) is None]
    if missing:
        yield "training", f"not available without {' and '.join(missing)}; run {INSTALL}"
        return
    from megatron.zero_bubble.engine.platforms import select

    select("auto").setup(0)  # on a machine without a GPU, megatron-core cannot be imported before this
    import megatron.core

    from megatron.zero_bubble.integration.patching import Seam, bodies
    from megatron.zero_bubble.integration.patching.seams import installed_seams

    seams = installed_seams()
    found = [getattr(seams, field.name) for field in fields(seams)]
    replaced = [seam for seam in found if isinstance(seam, Seam) and seam.module.startswith("megatron.core.")]
    for seam in replaced:
        seam.resolve()
    yield _NAMES, f"all found: {len(replaced)} replaced and {len(seams.used)} used"
    changed = bodies.changed_bodies(megatron.core.__version__, bodies.SCHEDULE)
    yield "changed functions", "; ".join(changed) or "none"


_PARTS: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {
    "versions": _versions,
    "planner": _planner,
    "device": _devices,
    _NAMES: _megatron,
}
"""What yields the facts, by the name under which a failure is reported."""
