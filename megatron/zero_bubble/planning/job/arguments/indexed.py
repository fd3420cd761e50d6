"""Check that ``PREFIX.bin`` and ``PREFIX.idx`` are a complete data set in Megatron's indexed format.

Only the header and the last entries are read, so a missing or truncated file is reported before anything is started.
The layout (megatron-core ``datasets/indexed_dataset.py``): magic, version (u64), dtype code (u8), number of sequences
and of document bounds (u64 each); then lengths (i32), byte offsets (i64) and document bounds (i64).
"""

from __future__ import annotations

import struct
from pathlib import Path

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.document_splits import HEADER, MAGIC

_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
_REMEDY = "write it again with scripts/prepare_data.py"


def check_indexed(prefix: str) -> None:
    """Check that both files of ``prefix`` exist and match each other.

    Raises:
        UserError: a file is missing or in another format, or its length does not match the index.
    """
    bin_path, idx_path = Path(prefix + ".bin"), Path(prefix + ".idx")
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise UserError(
                f"the data set {prefix} needs the file {path}, which does not exist; make it with "
                "scripts/prepare_data.py or correct the path (given without .bin)"
            )
    expected = _expected_bin_bytes(idx_path)
    actual = bin_path.stat().st_size
    if actual != expected:
        raise UserError(
            f"{bin_path} must have {expected} bytes according to its index, got {actual}: it is truncated or belongs "
            f"to another index; {_REMEDY}"
        )


def _expected_bin_bytes(idx_path: Path) -> int:
    size = idx_path.stat().st_size
    with idx_path.open("rb") as file:
        head = file.read(len(MAGIC) + HEADER.size)
        if not head.startswith(MAGIC) or len(head) < len(MAGIC) + HEADER.size:
            raise UserError(
                f"{idx_path} is not an index of Megatron's indexed format (it must start with MMIDIDX); {_REMEDY}"
            )
        version, code, sequences, bounds = HEADER.unpack_from(head, len(MAGIC))
        if version != 1 or code not in _ITEM_BYTES:
            raise UserError(
                f"{idx_path} must have version 1 and a known dtype, got version {version}, dtype code {code}; {_REMEDY}"
            )
        needed = len(head) + sequences * 12 + bounds * 8
        if size < needed or sequences == 0:
            raise UserError(
                f"{idx_path} must have at least one sequence, and {needed} bytes for {sequences} sequences, got {size} "
                f"bytes; {_REMEDY}"
            )
        file.seek(len(head) + (sequences - 1) * 4)
        (last_length,) = struct.unpack("<i", file.read(4))
        file.seek(len(head) + sequences * 4 + (sequences - 1) * 8)
        (last_offset,) = struct.unpack("<q", file.read(8))
    return last_offset + last_length * _ITEM_BYTES[code]
