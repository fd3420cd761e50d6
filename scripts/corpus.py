"""Convert text to Megatron's indexed format: Python's standard library for the demo, or the user's files.

A document is the UTF-8 bytes of one file (or of the text of one JSON line) and an end-of-document id, stored as uint16.
Both files of a data set are written under temporary names and then renamed, the index last, so that an interrupted run
leaves no incomplete data set.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.indexed import check_indexed
from megatron.zero_bubble.planning.job.arguments.tokenizer import ByteLevelTokenizer
from megatron.zero_bubble.planning.job.document_splits import HEADER, MAGIC

_VERSION, _TOKEN_CODE, _TOKEN = 1, 8, numpy.dtype("<u2")
"""The version of the index, and the code and the type of a token, unsigned integers of 16 bits."""
SPLITS = ("train", "valid", "test")
# Folders to skip in the standard library: installed packages, and tests, which many installations lack.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def prepare_standard_library(prefix: str) -> dict[str, str]:
    """Write the sources of this interpreter's standard library as ``<prefix>_train``, ``_valid`` and ``_test``.

    The splits get about 90, 5 and 5 percent of the files. The hash of a file's path selects its split, so the same
    interpreter always produces the same data. Data sets that are already complete are not written again.

    Returns:
        the prefix of each split.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    prefixes = {split: f"{prefix}_{split}" for split in SPLITS}
    for split, target in prefixes.items():
        if not is_whole(target):
            files = [file for file in standard_library_files(root) if split_of(file.relative_to(root)) == split]
            write_documents(target, (file.read_bytes() for file in files))
    return prefixes


def standard_library_files(root: Path) -> list[Path]:
    """The ``.py`` files under ``root`` in a fixed order, without tests and installed packages."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def split_of(path: Path) -> str:
    """The split of a file, by the hash of its path relative to the root."""
    share = int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:4], "big") % 100
    return "train" if share < 90 else "valid" if share < 95 else "test"


def read_documents(paths: Iterable[Path], json_key: str = "text") -> Iterator[bytes]:
    """Read documents from ``.jsonl`` files (one per line, under ``json_key``) and from text files (one per file).

    Raises:
        UserError: a file cannot be read, or a line is not a JSON object with text under ``json_key``.
    """
    for path in paths:
        try:
            if path.suffix == ".jsonl":
                yield from _read_json_lines(path, json_key)
            else:
                yield path.read_bytes()
        except OSError as error:
            raise UserError(
                f"the input must be a readable file, got {path} ({error.strerror}); check the path"
            ) from None


def _read_json_lines(path: Path, key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except ValueError as error:  # also UnicodeDecodeError
                raise UserError(f"{path}, line {number}: not JSON ({error}); fix or remove the line") from None
            if not isinstance(document, dict) or not isinstance(document.get(key), str):
                found = sorted(document) if isinstance(document, dict) else type(document).__name__
                raise UserError(
                    f"{path}, line {number}: a line must be an object with text under {key!r}, got {found}; fix the "
                    "line or give the key with --json-key"
                )
            yield document[key].encode("utf-8", errors="surrogatepass")


def write_documents(prefix: str, documents: Iterable[bytes]) -> int:
    """Write ``<prefix>.bin`` and ``<prefix>.idx`` with one sequence per document, without empty documents.

    Returns:
        the number of tokens, including end-of-document ids.

    Raises:
        UserError: there are no documents, or all are empty.
    """
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    unfinished = f"{prefix}.writing-{os.getpid()}"
    end = numpy.array([ByteLevelTokenizer.eod], dtype=_TOKEN)
    lengths: list[int] = []
    try:
        with Path(f"{unfinished}.bin").open("wb") as file:
            for document in filter(None, documents):
                ids = numpy.concatenate([numpy.frombuffer(document, dtype=numpy.uint8).astype(_TOKEN), end])
                file.write(ids.tobytes())
                lengths.append(len(ids))
        if not lengths:
            raise UserError(f"{prefix} would contain no text: every input document is empty; give files with text")
        Path(f"{unfinished}.idx").write_bytes(_index(lengths))
        for part in ("bin", "idx"):
            Path(f"{unfinished}.{part}").replace(f"{prefix}.{part}")
    finally:
        for part in ("bin", "idx"):
            Path(f"{unfinished}.{part}").unlink(missing_ok=True)
    return sum(lengths)


def _index(lengths: Sequence[int]) -> bytes:
    """Return the index of documents of one sequence each, as megatron-core's ``IndexedDatasetBuilder`` writes it.

    This writer needs neither torch nor megatron-core, whose imports take far longer than a small data set.
    """
    count = len(lengths)
    ends = numpy.cumsum([0, *lengths], dtype=numpy.int64)
    parts = (
        numpy.array(lengths, dtype=numpy.int32),
        ends[:-1] * _TOKEN.itemsize,
        numpy.arange(count + 1, dtype=numpy.int64),
    )
    head = MAGIC + HEADER.pack(_VERSION, _TOKEN_CODE, count, count + 1)
    return head + b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in parts)


def is_whole(prefix: str) -> bool:
    """Whether a complete data set exists at ``prefix``."""
    try:
        check_indexed(prefix)
    except UserError:
        return False
    return True
