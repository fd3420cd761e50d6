"""The CPU platform: lets an unmodified megatron-core train on gloo ranks with no GPU.

megatron-core names CUDA throughout: ``device=torch.cuda.current_device()``, ``device="cuda"``, ``.cuda()``, CUDA
random states, the string ``"torch.cuda.FloatTensor"``. :func:`install` gives each of those names its CPU meaning
and :func:`revert` puts the originals back. What is replaced, and why, is the table :data:`POINTS` and the class
:class:`CudaMeansCpu`; nothing else is touched. ``torch.cuda.is_available()`` keeps telling the truth.
"""

from megatron.zero_bubble.platforms.cpu.install import install, installed, revert
from megatron.zero_bubble.platforms.cpu.platform import CPU, CpuPlatform
from megatron.zero_bubble.platforms.cpu.points import POINTS, Point, always
from megatron.zero_bubble.platforms.cpu.stand_ins import NoEvent, NoStream

__all__ = ["CPU", "POINTS", "CpuPlatform", "NoEvent", "NoStream", "Point", "always", "install", "installed", "revert"]
