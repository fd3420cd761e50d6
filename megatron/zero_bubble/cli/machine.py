"""The GPU of this machine, without torch."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.planning.job.facts import gpu_kind

ASSUMED = "h100"
"""The GPU to estimate for where another is not known."""


class Gpu(NamedTuple):
    """A GPU, as far as its driver tells.

    Attributes:
        name: that of the estimates, if they have it, else the driver's; None if unknown.
        memory: its size, as flags take it; None if unknown.
    """

    name: str | None = None
    memory: str | None = None

    @property
    def estimated(self) -> str:
        """The GPU to estimate for."""
        return self.name if self.name in DEVICES else ASSUMED

    @property
    def flags(self) -> list[str]:
        """The flags for ``zero-bubble advise``; what they leave out is assumed there."""
        return ["--gpu", self.estimated, *(["--gpu-memory", self.memory] if self.memory else [])]


def gpu_here() -> Gpu:
    """Ask the driver; nothing is known without one."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        name, _, mebibytes = text.splitlines()[0].rpartition(",")
        return Gpu(gpu_kind(name.strip()), f"{int(mebibytes) / 1024:.1f}GiB")
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return Gpu()
