"""Check that the data of a Megatron-LM job have documents for every split; Megatron would hang without documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.datasets.utils import get_blend_from_list

from megatron.zero_bubble.core.formats.files import json_object, read_file
from megatron.zero_bubble.planning.job.document_splits import NAMES, check_divided, check_whole


def check_data(args: Any) -> None:
    """Check the splits by the indices of the job's data files.

    Raises:
        ValueError: a split lacks the documents that it needs.
    """
    if getattr(args, "mock_data", False) or getattr(args, "dataloader_type", None) == "external":
        return
    if getattr(args, "sft", False):
        return  # its files have another format
    blend = get_blend_from_list(_paths(args, "data_path", "data_args_path") or None)
    if blend is not None:
        if args.split is not None:
            check_divided(blend[0], blend[1] is not None, args.split, args.seq_length)
        return
    for name, paths in _paths_of_splits(args).items():
        blend = get_blend_from_list(paths or None)
        if blend is not None:
            apart = name == "valid" and getattr(args, "multiple_validation_sets", False)
            check_whole(name, blend[0], apart or blend[1] is not None, args.seq_length)


def _paths(args: Any, flag: str, flag_of_file: str) -> list[str] | None:
    """Paths that ``flag`` gives, or that the file of ``flag_of_file`` lists."""
    file = getattr(args, flag_of_file, None)
    if file is not None and Path(file).is_file():
        return Path(file).read_text().split()
    return getattr(args, flag, None)


def _paths_of_splits(args: Any) -> dict[str, list[str] | None]:
    file = getattr(args, "per_split_data_args_path", None)
    if file is None or not Path(file).is_file():
        return {name: getattr(args, f"{name}_data_path", None) for name in NAMES}
    listed = read_file(file, "list of data sets", json_object)
    return {name: paths.split() if isinstance(paths, str) else paths for name, paths in listed.items()}
