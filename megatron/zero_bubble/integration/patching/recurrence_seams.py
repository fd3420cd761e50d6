"""Functions of recurrent layers that sequence slices replace, where this version of megatron-core has them."""

from __future__ import annotations

from functools import partial

from megatron.zero_bubble.integration.adapter.recurrences import CHANNELS_FIRST, CHANNELS_LAST, Recurrences
from megatron.zero_bubble.integration.patching.replaced import Replacement, around
from megatron.zero_bubble.integration.patching.seam import Seam

_MAMBA, _DELTA = "megatron.core.ssm.mamba_mixer", "megatron.core.ssm.gated_delta_net"
_PLACES_OF_DELTA = (_DELTA, f"{_DELTA}.gdn")
"""Since 0.19, gated delta nets are a package."""
_CONVOLVES = "continues a causal convolution from the last inputs of the slice before"
_CONTINUES = "continues a recurrence from the state after the slice before"

# Functions of other packages have no parameters here: megatron-core calls them by the names that we use, too.
CONVOLUTION = Seam("torch.nn.functional", "conv1d", (), _CONVOLVES)
CAUSAL = tuple(Seam(place, "causal_conv1d_fn", (), _CONVOLVES) for place in (_MAMBA, *_PLACES_OF_DELTA))
CAUSAL_BY_TOKENS = tuple(Seam(place, "causal_conv1d", (), _CONVOLVES) for place in _PLACES_OF_DELTA)
RULES = tuple(
    Seam(place, name, parameters, _CONTINUES)
    for place in _PLACES_OF_DELTA
    for name, parameters in (
        ("chunk_gated_delta_rule", ()),
        ("torch_chunk_gated_delta_rule", ("g", "beta", "initial_state", "output_final_state")),
    )
)
SCAN = Seam(_MAMBA, "mamba_split_conv1d_scan_combined", (), _CONTINUES)


def continuing(recurrences: Recurrences) -> list[Replacement]:
    """What lets recurrent layers run slice by slice."""
    by_channels, by_tokens = (partial(recurrences.convolve, dimension) for dimension in (CHANNELS_FIRST, CHANNELS_LAST))
    places = (
        ((CONVOLUTION, *CAUSAL), by_channels),
        (CAUSAL_BY_TOKENS, by_tokens),
        (RULES, recurrences.delta_rule),
        ((SCAN,), recurrences.scan),
    )
    return [(seam, around(replacement)) for seams, replacement in places for seam in seams if seam.exists()]
