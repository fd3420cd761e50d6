import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.indexed import check_indexed


def write(folder: Path, dtype: type = numpy.uint16) -> str:
    """Write two documents with three sequences, with megatron-core's builder."""
    prefix = str(folder / "data")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    builder.add_document(torch.arange(5), [2, 3])
    builder.add_document(torch.arange(7), [7])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64", "float32", "float64"])
def test_files_of_megatron_core_are_valid(tmp_path: Path, dtype: str) -> None:
    check_indexed(write(tmp_path, getattr(numpy, dtype)))


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:-count]


@pytest.mark.parametrize(
    ("part", "damage", "words"),
    [
        ("bin", cut(1), "must have 24 bytes according to its index, got 23"),
        ("bin", lambda content: content + b"x", "must have 24 bytes according to its index, got 25"),
        ("idx", cut(1), "got 93 bytes"),
        ("idx", lambda content: b"", "must start with MMIDIDX"),
        ("idx", lambda content: b"PK" + content[2:], "must start with MMIDIDX"),
        ("idx", lambda content: content[:20], "must start with MMIDIDX"),
        ("idx", lambda content: content[:9] + struct.pack("<Q", 2) + content[17:], "got version 2"),
        ("idx", lambda content: content[:17] + b"\x63" + content[18:], "dtype code 99"),
        ("idx", lambda content: content[:18] + bytes(16) + content[34:], "at least one sequence"),
    ],
)
def test_damaged_file_is_rejected(tmp_path: Path, part: str, damage: Callable[[bytes], bytes], words: str) -> None:
    prefix = write(tmp_path)
    path = Path(f"{prefix}.{part}")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as caught:
        check_indexed(prefix)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("part", ["bin", "idx"])
def test_missing_file_of_the_pair_is_named(tmp_path: Path, part: str) -> None:
    prefix = write(tmp_path)
    Path(f"{prefix}.{part}").unlink()
    with pytest.raises(UserError, match=rf"needs the file .*data\.{part}, which does not exist"):
        check_indexed(prefix)
