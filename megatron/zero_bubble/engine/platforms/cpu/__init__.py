"""The CPU platform: lets an unmodified megatron-core train on gloo ranks without a GPU.

megatron-core uses CUDA throughout: ``device=torch.cuda.current_device()``, ``device="cuda"``, ``.cuda()``, CUDA random
states, the string ``"torch.cuda.FloatTensor"``. :func:`install` replaces these names with CPU equivalents, and
:func:`revert` restores the originals. The table :data:`POINTS` and the class :class:`CudaMeansCpu` define all
replacements and their reasons. ``torch.cuda.is_available()`` is not changed.
"""

import sys

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.platforms.cpu.install import install, installed, revert
from megatron.zero_bubble.engine.platforms.cpu.platform import CpuPlatform
from megatron.zero_bubble.engine.platforms.cpu.points import POINTS, Point, always
from megatron.zero_bubble.engine.platforms.cpu.stand_ins import CPU, NoEvent, NoStream

__all__ = [
    "CPU",
    "POINTS",
    "CpuPlatform",
    "NoEvent",
    "NoStream",
    "Point",
    "always",
    "install",
    "installed",
    "revert",
    "use_cpu_ranks",
]


def use_cpu_ranks() -> None:
    """Make megatron-core, unmodified, run in this process without a GPU, for a training loop of one's own.

    Its ranks then communicate with gloo: ``torch.distributed.init_process_group("gloo")``. A second call does nothing.

    Raises:
        UserError: when megatron-core has been imported already, in this process without the CPU platform.
    """
    if not installed() and "megatron.core.parallel_state" in sys.modules:
        raise UserError(
            "CPU ranks must be chosen before megatron.core is imported; got a process that has imported it; call "
            "megatron.zero_bubble.use_cpu_ranks() at the start of the script"
        )
    CpuPlatform().setup(0)
