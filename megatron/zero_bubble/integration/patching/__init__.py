"""Enable zero-bubble schedules in megatron-core, and undo that: ``apply``, ``observe``, ``revert``, ``report``.

``build_stages`` builds model chunks for the schedule in force.

Importing this package raises ``SeamError`` if the megatron-core version is unsupported or lacks a name that is used.
"""

from megatron.zero_bubble.core.errors import PatchError, SeamError
from megatron.zero_bubble.integration.patching.seam import Seam
from megatron.zero_bubble.integration.patching.seams import installed_seams
from megatron.zero_bubble.integration.patching.used import look_up

look_up(installed_seams().used)  # first, because the next import needs some of these names

from megatron.zero_bubble.integration.patching.apply import (  # noqa: E402
    apply,
    build_stages,
    disconnect,
    observe,
    report,
    revert,
    shapes,
)

__all__ = [
    "PatchError",
    "Seam",
    "SeamError",
    "apply",
    "build_stages",
    "disconnect",
    "observe",
    "report",
    "revert",
    "shapes",
]
