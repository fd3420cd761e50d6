"""``import megatron.zero_bubble.auto`` switches on the schedule of the environment, before megatron or after it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_foreign_loop import train

BEFORE_MEGATRON = """
import sys
import megatron.zero_bubble.auto
assert "megatron.core" not in sys.modules
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
import megatron.zero_bubble
assert len(megatron.zero_bubble.report()) == 6
applied = schedules.forward_backward_pipelining_without_interleaving
megatron.zero_bubble.revert()
assert applied is not schedules.forward_backward_pipelining_without_interleaving
assert not megatron.zero_bubble.report()
"""


def test_before_megatron_is_imported_the_schedule_waits_for_it() -> None:
    variables = {"ZERO_BUBBLE_SCHEDULE": "zb-h1", "ZERO_BUBBLE_DEVICE": "cpu", "RANK": "0"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEFORE_MEGATRON],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert line.startswith("zero-bubble: schedule zb-h1 in megatron-core ")
    assert "linear_with_grad_accumulation_and_async_allreduce, " in line and line.endswith(", by the environment")


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python whose only variables of this package are these."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("ZERO_BUBBLE_")}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, env={**others, **variables}, capture_output=True, text=True, check=False)


WITHOUT_TORCH = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy')))\n"
"""As in a Python in which these are not installed."""
NAMES = "import sys, megatron.zero_bubble.auto; print(*sorted(name for name, found in sys.modules.items() if found))"


@pytest.mark.parametrize("blocked", ["", WITHOUT_TORCH])
def test_a_process_without_variables_imports_nothing_else(blocked: str) -> None:
    ended = in_a_process(blocked + NAMES)
    assert (ended.returncode, ended.stderr) == (0, "")
    ours = [name for name in ended.stdout.split() if name.startswith("megatron.zero_bubble")]
    own = "megatron.zero_bubble"
    assert ours == [
        own,
        f"{own}.auto",
        f"{own}.core",
        f"{own}.core.errors",
        f"{own}.engine",
        f"{own}.engine.import_hook",
    ]
    assert not {"torch", "numpy", "argparse"} & set(ended.stdout.split())


@pytest.mark.parametrize("blocked", ["", WITHOUT_TORCH])
def test_a_schedule_in_the_environment_does_not_import_torch(blocked: str) -> None:
    ended = in_a_process(blocked + NAMES, ZERO_BUBBLE_SCHEDULE="zb-v")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not {"torch", "numpy"} & set(ended.stdout.split())


def test_a_wrong_variable_prints_a_sentence_without_a_traceback() -> None:
    ended = in_a_process("import megatron.zero_bubble.auto", ZERO_BUBBLE_SCHEDUL="zb-v")
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.startswith("zero-bubble: unknown variable ZERO_BUBBLE_SCHEDUL; did you mean ZERO_BUBBLE_SCHED")
    assert ended.stderr.count("\n") == 1
    other = in_a_process("import megatron.zero_bubble.auto", ZERO_BUBBLE_SCHEDUL="zb-v", LOCAL_RANK="1")
    assert (other.returncode, other.stderr) == (1, "")


def switched_on(rank: int) -> tuple[Any, Any, list[str]]:
    """A training run under stock, and one switched on by the environment when megatron-core is there already."""
    from contextlib import redirect_stdout
    from io import StringIO

    from megatron.core import parallel_state

    import megatron.zero_bubble
    from megatron.zero_bubble.auto import switch_on

    os.environ["RANK"] = str(rank)
    printed = StringIO()
    with redirect_stdout(printed):
        switch_on({"ZERO_BUBBLE_SCHEDULE": "zb-h1", "ZERO_BUBBLE_EXACT": "1"})  # before any process group
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
        ours = train()
    finally:
        megatron.zero_bubble.revert()
    return train(), ours, printed.getvalue().splitlines()


def test_after_megatron_is_imported_it_is_applied_at_once(ranks: RankPool) -> None:
    first, last = ranks.run(2, switched_on)
    assert first[0] == first[1]
    assert last[0] == last[1]
    assert [line.startswith("zero-bubble: schedule zb-h1 in megatron-core ") for line in first[2]] == [True]
    assert last[2] == []


def test_without_a_schedule_nothing_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.zero_bubble.auto import switch_on

    capsys.readouterr()
    hooks = list(sys.meta_path)
    switch_on({"RANK": "0"})
    assert sys.meta_path == hooks
    assert capsys.readouterr().out == ""


def test_a_wrong_schedule_is_refused_before_megatron_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by an import of megatron-core somewhere in a framework, whose traceback would hide the sentence."""
    from megatron.zero_bubble.auto import switch_on
    from megatron.zero_bubble.core.errors import UserError

    monkeypatch.delitem(sys.modules, "megatron.core.pipeline_parallel.schedules", raising=False)
    hooks = list(sys.meta_path)
    with pytest.raises(UserError, match="unknown schedule 'zb-h9'; choose one of") as caught:
        switch_on({"ZERO_BUBBLE_SCHEDULE": "zb-h9"})
    assert caught.value.__context__ is None
    assert sys.meta_path == hooks
