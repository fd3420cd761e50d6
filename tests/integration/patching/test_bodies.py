"""Changed function bodies in megatron-core are reported by name; changes of formatting are not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.megatron_lm import checkouts
from tests.helpers.ranks import RankPool

TABLE = Path(__file__).resolve().parents[3] / "megatron/zero_bubble/integration/patching/bodies.json"
UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))
SAMPLE = '''
class Holder:
    @property
    def value(self):
        return 0

    def method(self, count: int, *rest, key="a", **more) -> str:
        """What it does."""
        if count > 1 and rest[:1] != (1.5,):  # a comment
            return f"{count!r:>{rest[0]}} of {more['key']} {key=}" "joined"
        with open(key) as file, open("b"):
            return {**more, "x": [x async for x in file] if count else None}


def method():
    pass
'''
FORMATTED = """
class Holder:

    def method(self, count, *rest, key='a', **more):
        # another comment
        if (
            count > 1
            and rest[:1] != (1.5,)
        ):
            return f'''{count!r:>{rest[0]}} of {more["key"]} {key=}joined'''
        with open(key) as file, open('b'):
            return {
                **more,
                'x': [x async for x in file] if count else None,
            }
"""


def installed() -> Path:
    """Find the folder that contains ``megatron/core`` without importing it."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]).parents[1]


DEV = "0.19.0+d48bd6be"
"""The commit of the dev branch that was compared."""


def version_of(folder: Path) -> str:
    info = (folder / "megatron/core/package_info.py").read_text()
    is_dev = "enable_hyper_connections" in (folder / "megatron/core/transformer/transformer_config.py").read_text()
    return DEV if is_dev else ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", info, re.MULTILINE))


FOLDERS = [installed(), *(checkout.path for checkout in checkouts())]


def digest_ignores_formatting() -> None:
    from megatron.zero_bubble.integration.patching.digest import digest_of

    digest = digest_of(SAMPLE, "Holder.method")
    assert digest == "6042f2cf80978e9c", "the digest must be equal on every version of Python"
    assert digest_of(FORMATTED, "Holder.method") == digest
    assert digest_of(SAMPLE, "Holder.other") is digest_of(SAMPLE, "value") is None
    others = {digest_of(SAMPLE, name) for name in ("Holder.value", "method")}
    others |= {
        digest_of(SAMPLE.replace(old, new), "Holder.method")
        for old, new in (("> 1", "> 2"), ("[:1]", "[1:]"), ("**more)", "more=())"), ("of", "out of"), ("!r", ""))
    }
    assert len(others | {digest}) == 8


def test_digest_ignores_formatting_comments_and_annotations(ranks: RankPool) -> None:
    ranks.run(1, on_a_rank, digest_ignores_formatting)


def on_a_rank(rank: int, test: Any) -> Any:
    """Run ``test`` on a rank, because pytest's process must not import megatron-core."""
    return test()


def digests_in(folder: Path) -> dict[str, str | None]:
    from megatron.zero_bubble.integration.patching import bodies

    def source_of(module: str) -> str:
        return folder.joinpath(*module.split(".")).with_suffix(".py").read_text()

    return bodies.digests((*bodies.SCHEDULE, *bodies.OPTIMIZER), source_of)


Table = dict[str, dict[str, list[str]]]


def numbers(version: str) -> list[int]:
    return [int(number) for number in version.partition("+")[0].split(".")]


def update(table: Table, version: str, found: dict[str, str | None]) -> None:
    """Replace the digests of ``version`` in the table by ``found``."""
    for name, digest in found.items():
        known = table.setdefault(name, {})
        for versions in known.values():
            versions[:] = [other for other in versions if other != version]
        if digest is not None:
            known[digest] = sorted([*known.get(digest, []), version], key=numbers)
        kept = ((digest, versions) for digest, versions in known.items() if versions)
        table[name] = dict(sorted(kept, key=lambda item: numbers(item[1][0])))


def written(table: Table) -> str:
    """Format the table with one line per digest."""
    parts = []
    for name, known in table.items():
        lines = [f"    {json.dumps(digest)}: {json.dumps(versions)}" for digest, versions in known.items()]
        parts.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@pytest.mark.parametrize("folder", FOLDERS, ids=version_of)
def test_digest_of_every_body_is_in_the_table(ranks: RankPool, folder: Path) -> None:
    """Covers the installed megatron-core and the checkouts; UPDATE_GOLDEN=1 records that the bodies were reviewed."""
    version = version_of(folder)
    (found,) = ranks.run(1, on_a_rank, partial(digests_in, folder))
    table = json.loads(TABLE.read_text())
    if UPDATE:
        update(table, version, found)
        TABLE.write_text(written(table))
    read = {name: digest for name in found for digest, versions in table[name].items() if version in versions}
    assert {name: digest for name, digest in found.items() if digest is not None} == read


def apply_messages(environment: dict[str, str], config: dict[str, Any]) -> list[str]:
    """Return the messages of ``apply`` with these environment variables."""
    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        apply(ZeroBubbleConfig(schedule="zb-h2", **config), say=said.append)
        revert()
    return said


def edited(module: Any, head: str, instead: str, folder: Path) -> str:
    """Write a copy of the module's file with ``head`` replaced by ``instead``; return its path."""
    source = Path(module.__file__).read_text()
    assert source.count(head) == 1
    path = folder / f"{len(list(folder.iterdir()))}.py"
    path.write_text(source.replace(head, instead))
    return str(path)


STEP = "def backward_step(input_tensor, output_tensor, output_tensor_grad, model_type, config):\n"
OF_SCHEDULE = (
    "megatron.core.pipeline_parallel.schedules.backward_step in megatron-core 0.16.1 differs from the versions that "
    "zero-bubble training was written for (0.16.0, 0.16.1, 0.16.2); compare the losses of some iterations with those "
    "of a run without a schedule, or install one of these versions"
)


def names_what_changed(folder: Path) -> None:
    import torch.distributed as dist
    from megatron.core.optimizer import clip_grads
    from megatron.core.pipeline_parallel import schedules

    ahead = {"post_validation": True}
    assert apply_messages({}, {}) == apply_messages({}, ahead) == []
    with pytest.MonkeyPatch.context() as patch:
        of_schedules = edited(schedules, STEP, f"{STEP}    # a comment, and an empty line\n\n", folder)
        patch.setattr(schedules, "__file__", of_schedules)
        assert apply_messages({}, {}) == []
        patch.setattr(schedules, "__file__", edited(schedules, STEP, f"{STEP}    check(config)\n", folder))
        assert apply_messages({}, {}) == [OF_SCHEDULE]
        patch.setattr(dist, "is_initialized", lambda: False)  # as with the launcher
        assert apply_messages({"RANK": "0"}, {}) == [OF_SCHEDULE]
        assert apply_messages({"RANK": "1"}, {}) == []
    with pytest.MonkeyPatch.context() as patch:
        clip = "clip_coeff = max_norm / (total_norm + 1.0e-6)"
        patch.setattr(clip_grads, "__file__", edited(clip_grads, clip, "clip_coeff = max_norm / total_norm", folder))
        assert apply_messages({}, {}) == [], "without post-validation the optimizer is not checked"
        (line,) = apply_messages({}, ahead)
        assert "megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32 in megatron-core" in line
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "__file__", str(folder / "schedules.so"))
        (line,) = apply_messages({}, ahead)
        assert line.startswith("the source of megatron-core 0.16.1 cannot be read, so")


def test_changed_bodies_are_named_when_a_schedule_is_applied(ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 prints one line per function; with post-validation also for the optimizer's functions."""
    ranks.run(1, on_a_rank, partial(names_what_changed, tmp_path))
