"""The check that the sequences of a job can be cut into the slices of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Slices


def check_slices(slices: Slices, ends: Sequence[int] | None, job: Any) -> None:
    """Check that the job's sequences can be cut into ``slices``.

    Args:
        ends: the ends of the slices that the user gave, if any.
        job: the job's flags.

    Raises:
        UserError: ends that belong to sequences of another length, or sequences with too few tokens.
    """
    if len(slices) == 1:
        return
    length = job.seq_length
    if ends is not None and ends[-1] != length:
        raise UserError(
            f"the last end of the slices must be the length of the sequences, --seq-length {length}; got "
            f"--zero-bubble-slice-ends {','.join(map(str, ends))}; give {length} as the last end"
        )
    multiple = job.tensor_model_parallel_size if job.sequence_parallel else 1
    tokens = slices.in_tokens(length, multiple)
    if ends is not None and tokens != tuple(ends):
        raise UserError(
            "with sequence parallelism, every slice must end at a multiple of the tensor-parallel size "
            f"{multiple}; got --zero-bubble-slice-ends {','.join(map(str, ends))}; give for example "
            f"{','.join(map(str, tokens))}"
        )
