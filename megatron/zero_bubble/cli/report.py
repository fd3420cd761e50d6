"""``zero-bubble report``: the environment, in the form that a bug report needs, and what to fix in it.

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
from typing import NamedTuple

from megatron.zero_bubble import __version__
from megatron.zero_bubble.core.search.loops import compiled
from megatron.zero_bubble.planning.job.installed import INSTALL

_OPS = "pip install --no-build-isolation --force-reinstall --no-deps megatron-zero-bubble"
_NAMES = "megatron-core names (seams)"
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "triton", "numpy")


def add_report(verb: argparse.ArgumentParser) -> None:
    """The flags of ``report``."""
    verb.description = (
        "Print versions, compiled parts and devices, whether megatron-core has every name that this package replaces "
        "or uses, and what to do about what is missing."
    )
    verb.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")
    verb.set_defaults(command=lambda options: report(options.format))


class Fact(NamedTuple):
    """A line of the report.

    Attributes:
        remedy: what to do about it; empty if nothing.
    """

    name: str
    text: str
    remedy: str = ""


def report(form: str = "text") -> str:
    """Versions, compiled parts, devices, the state of the seams and what to do, as aligned lines or a JSON object."""
    facts: list[Fact] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's imports warn about optional packages, which are listed here
        for name, part in _PARTS.items():
            try:
                facts += part()
            except Exception as error:  # noqa: BLE001 - this report exists for parts that fail, and shows the error
                facts.append(Fact(name, f"broken: {type(error).__name__}: {error}", "fix what the error names"))
    to_do = [f"{fact.name}: {fact.remedy}" for fact in facts if fact.remedy]
    if form == "json":
        return json.dumps({fact.name: fact.text for fact in facts} | {"to do": to_do}, indent=2) + "\n"
    width = max(len(fact.name) for fact in facts) + 2
    lines = [f"{fact.name:{width}}{fact.text}" for fact in facts]
    return "\n".join([*lines, "", "To do:" if to_do else "Nothing to do.", *(f"- {line}" for line in to_do)]) + "\n"


def _versions() -> Iterator[Fact]:
    yield Fact("zero-bubble", __version__)
    yield Fact("python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})")
    yield Fact("machine", f"{platform.machine()}, {platform.platform()}")
    for package in _PACKAGES:
        try:
            yield Fact(package, version(package))
        except PackageNotFoundError:
            yield Fact(package, "not installed")


def _planner() -> Iterator[Fact]:
    if compiled():
        yield Fact("planner", "compiled")
    else:
        text = "Python (about fifty times slower, searches with a smaller budget)"
        yield Fact("planner", text, f"install a C++ compiler and pybind11, then run {_OPS}")


def _devices() -> Iterator[Fact]:
    if find_spec("torch") is None:
        return
    from megatron.zero_bubble.engine import kernels
    from megatron.zero_bubble.engine.platforms import select
    from megatron.zero_bubble.engine.platforms.cuda import CudaPlatform

    device = select("auto")
    yield Fact("device", device.describe())
    yield from (Fact(name, text) for name, text in CudaPlatform().versions())
    ops = kernels.select(device.name)
    remedy = "" if ops.is_compiled else f"install a C++ compiler, then run {_OPS} where torch is"
    yield Fact("weight gradients", f"{ops.words}, on {device.name}", remedy)


def _megatron() -> Iterator[Fact]:
    """Check every name of megatron-core that we replace or use, and list the functions with unknown bodies."""
    missing = [module for module in ("torch", "megatron.core") if find_spec(module) is None]
    if missing:
        yield Fact("training", f"not available without {' and '.join(missing)}", f"to train, run {INSTALL}")
        return
    from megatron.zero_bubble.engine.platforms import select

    select("auto").setup(0)  # on a machine without a GPU, megatron-core cannot be imported before this
    import megatron.core

    from megatron.zero_bubble.integration.patching import Seam, bodies
    from megatron.zero_bubble.integration.patching.seams import installed_seams

    seams = installed_seams()
    found = [getattr(seams, field.name) for field in fields(seams)]
    if not seams.graphed.exists():  # only an installed TransformerEngine has it
        found.remove(seams.graphed)
    replaced = [seam for seam in found if isinstance(seam, Seam) and seam.module.startswith("megatron.core.")]
    for seam in replaced:
        seam.resolve()
    yield Fact(_NAMES, f"all found: {len(replaced)} replaced and {len(seams.used)} used")
    changed = list(bodies.changed_bodies(megatron.core.__version__, bodies.SCHEDULE))
    remedy = "compare a few iterations with stock, or use a release that the documentation lists" if changed else ""
    yield Fact("changed functions", "; ".join(changed) or "none", remedy)


_PARTS: dict[str, Callable[[], Iterable[Fact]]] = {
    "versions": _versions,
    "planner": _planner,
    "device": _devices,
    _NAMES: _megatron,
}
"""What yields the facts, by the name under which a failure is reported."""
