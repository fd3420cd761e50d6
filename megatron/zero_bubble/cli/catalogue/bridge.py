"""The recipes of a checkout of Megatron-Bridge, which are functions, as flags of a job."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from megatron.zero_bubble.cli.catalogue.contained import content, run_contained
from megatron.zero_bubble.cli.catalogue.models import MODELS
from megatron.zero_bubble.cli.catalogue.recipe import Recipe
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.parser import flags_of

_PROGRAM = Path(__file__).with_name("bridge_program.py")
_SECONDS, _MOST_PROCESSES = 300, 100
_PARTS = ("dataset", "scheduler", "optimizer", "ddp", "comm_overlap", "model", "mixed_precision", "train")
"""The parts of a configuration; the last one that has a field decides."""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
_RANK = 32
"""Of adapters whose recipe does not say it."""
_GPUS = re.compile(r"_(\d+)gpu_([a-z]+\d+)_")


def is_bridge(root: Path) -> bool:
    """Whether a folder is a checkout of Megatron-Bridge."""
    return (root / "src/megatron/bridge/recipes").is_dir()


def recipes_of_bridge(root: Path) -> Iterator[Recipe]:
    """Yield its recipes, which an interpreter without packages and without our environment runs.

    Raises:
        UserError: they do not end, or end the interpreter.
    """
    remedy = "leave that file out of the folder"
    command = [sys.executable, "-I", "-S", "-B", str(_PROGRAM), str(root)]
    with TemporaryFile() as models, TemporaryFile() as out, TemporaryFile() as errors:
        models.write(json.dumps(MODELS).encode())
        models.seek(0)
        why, status = run_contained(command, _SECONDS, _MOST_PROCESSES, stdin=models, stdout=out, stderr=errors, env={})
        lines, complaints = (content(each).strip().splitlines() for each in (out, errors))
    if why:
        limits = f"within {_SECONDS} s, with at most {_MOST_PROCESSES} processes"
        raise UserError(f"the recipes of {root} must end {limits}; one of them does not; {remedy}")
    if status:
        last = (complaints or [f"exit status {status}"])[-1]
        raise UserError(f"the recipes of {root} must not end the interpreter; got {last}; {remedy}")
    for found in map(json.loads, lines):
        name = f"{found['file']}:{found['name']}" if found["name"] else found["file"]
        if "problem" in found:
            yield Recipe(name, problem=f"it cannot be run without its packages: {found['problem']}")
            continue
        try:
            yield _recipe(name, found)
        except (KeyError, TypeError, ValueError) as error:
            yield Recipe(name, problem=f"a field has a value of another type: {error}")


def _recipe(name: str, found: Mapping[str, Any]) -> Recipe:
    """A recipe by what its function has set.

    Raises:
        KeyError, TypeError, ValueError: a value that such a field never has.
    """
    fields: dict[str, Any] = {}
    for part in _PARTS:
        own = found["parts"].get(part, {})
        fields |= {key: _as_flag(key, value) for key, value in own.items() if value is not None}
    fields |= _of_precision(found["named"].get("mixed_precision", ""))
    if (adapters := found["parts"].get("peft")) is not None:
        fields |= {"lora_rank": adapters.get("dim") or _RANK, "target_modules": adapters.get("target_modules")}
    if not (
        fields.get("overlap_grad_reduce") and fields.get("use_distributed_optimizer")
    ):  # a rule of Megatron-LM's flags, which Megatron-Bridge does not have
        fields.pop("overlap_param_gather", None)
    if fields.get("tensor_model_parallel_size", 1) < 2:
        fields.pop("tp_comm_overlap", None)  # as Megatron-Bridge drops it
    if isinstance(layout := fields.get("pipeline_model_parallel_layout"), list):
        fields["pipeline_model_parallel_layout"] = "|".join("".join(_LETTERS[one] for one in each) for each in layout)
    if isinstance(window := fields.get("window_size"), list):
        fields["window_size"] = ",".join(map(str, window))
    if fields.get("pipeline_model_parallel_layout"):  # which says how many stages there are
        fields.pop("virtual_pipeline_model_parallel_size", None)
    model, has_pipeline = fields.get("model_name"), fields.get("pipeline_model_parallel_size", 1) > 1
    if has_pipeline and "num_layers" not in fields and not any("layer_pattern" in key for key in fields):
        return Recipe(name, problem=f"the sizes of {model or 'the model'} are neither in the checkout nor known here")
    size = _GPUS.search(found["name"])
    gpu = size[2] if size is not None and size[2] in DEVICES else None
    gpus = int(size[1]) if size is not None else None
    per_node = None if gpu is None else min(DEVICES[gpu].domain, 4 if DEVICES[gpu].domain > 8 else 8)
    return Recipe(name, tuple(flags_of(fields)), "", gpus, per_node, gpu)


def _as_flag(field: str, value: Any) -> Any:
    """The value of a field as a flag has it: whole numbers without a point, and the short names of types."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return _TYPES.get(value, value) if field.endswith("_dtype") and isinstance(value, str) else value


def _of_precision(name: str) -> dict[str, Any]:
    """The fields of a precision that is given by its name."""
    if not name:
        return {}
    fields: dict[str, Any] = {"bf16": name.startswith("bf16"), "fp16": name.startswith("fp16")}
    kinds = {"mxfp8": "mxfp8", "current": "tensorwise", "delayed": "delayed", "blockwise": "blockwise"}
    recipe = next((value for key, value in kinds.items() if key in name), None)
    return (
        fields
        | ({"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {})
        | ({"fp4": "e2m1"} if "fp4" in name else {})
    )
