"""The CPU platform: lets an unmodified megatron-core train on gloo ranks without a GPU.

megatron-core uses CUDA throughout: ``device=torch.cuda.current_device()``, ``device="cuda"``, ``.cuda()``, CUDA random
states, the string ``"torch.cuda.FloatTensor"``. :func:`install` replaces these names with CPU equivalents, and
:func:`revert` restores the originals. The table :data:`POINTS` and the class :class:`CudaMeansCpu` define all
replacements and their reasons. ``torch.cuda.is_available()`` is not changed.
"""

from megatron.zero_bubble.platforms.cpu.install import install, installed, revert
from megatron.zero_bubble.platforms.cpu.platform import CPU, CpuPlatform
from megatron.zero_bubble.platforms.cpu.points import POINTS, Point, always
from megatron.zero_bubble.platforms.cpu.stand_ins import NoEvent, NoStream

__all__ = ["CPU", "POINTS", "CpuPlatform", "NoEvent", "NoStream", "Point", "always", "install", "installed", "revert"]
