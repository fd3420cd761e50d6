"""Put zero-bubble schedules into megatron-core, and take them out again: ``apply``, ``revert``, ``report``."""

from megatron.zero_bubble.patching.patches import apply, observe, report, revert
from megatron.zero_bubble.patching.replaced import PatchError
from megatron.zero_bubble.patching.seam import Seam, SeamError

__all__ = ["PatchError", "Seam", "SeamError", "apply", "observe", "report", "revert"]
