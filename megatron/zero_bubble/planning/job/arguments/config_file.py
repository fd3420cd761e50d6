"""``--config FILE``: a YAML mapping of flag names to values, which the command line overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.zero_bubble.core.errors import UserError

# Groups of alternative flags: one of them on the command line drops the others of its group from the file.
RIVALS = (
    frozenset({"data-path", "train-data-path", "valid-data-path", "test-data-path", "mock-data"}),
    frozenset({"zero-bubble-schedule", "zero-bubble-schedule-file"}),
    frozenset({"bf16", "fp16"}),
    frozenset({"lr-warmup-iters", "lr-warmup-fraction"}),
    frozenset({"recompute-activations", "recompute-granularity"}),
)


def config_tokens(file: str, argv: Sequence[str]) -> list[str]:
    """Convert ``file`` to command-line tokens, without the flags for which ``argv`` has an alternative.

    ``num-layers: 4`` becomes ``--num-layers 4``, ``swiglu: true`` becomes ``--swiglu`` (``false`` leaves it out), and
    a list becomes several values.

    Raises:
        UserError: the file is missing, is not YAML or is not a mapping of flags.
    """
    explicit = {token[2:].partition("=")[0] for token in argv if token.startswith("--")}
    replaced = set().union(*(rivals for rivals in RIVALS if rivals & explicit))
    tokens: list[str] = []
    content = _read(Path(file))
    if "model_type" in content or "architectures" in content:
        raise UserError(
            f"a configuration file must have the training script's flags in YAML; got {file}, which describes a model "
            "for another library; write its sizes as flags, such as num-layers: 4, as in configs/gpt_tiny.yaml"
        )
    for name, value in content.items():
        if not isinstance(name, str) or name.startswith("-") or "_" in name:
            raise UserError(
                "flags in a configuration file are written like num-layers, without leading dashes and underscores, "
                f"got {name!r} in {file}; spell it like the flag"
            )
        if name == "config":
            raise UserError(f"a configuration file cannot include another one; remove 'config' from {file}")
        if name in replaced:
            continue
        tokens += _flag(name, value)
    return tokens


def _flag(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *(str(item) for item in values)]


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise UserError(
            f"the configuration file cannot be read: {path} ({error.strerror}); give an existing file, such as "
            "configs/gpt_tiny.yaml"
        ) from None
    except (yaml.YAMLError, ValueError) as error:  # also UnicodeDecodeError, and a number of thousands of digits
        raise UserError(
            f"the configuration file must be YAML: {path} ({' '.join(str(error).split())}); fix it there"
        ) from None
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise UserError(
            f"the configuration file must map flags to values (num-layers: 4), got no mapping in {path}; write it like "
            "configs/gpt_tiny.yaml"
        )
    keys = [key.value for key, _ in node.value]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UserError(f"every flag occurs once in the configuration file {path}; got {twice[0]} twice; remove one")
    return content
