import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.core.errors import UserError
from pretrain.report import BubbleMetrics, IterationMetrics, Progress


def metrics(iteration: int, **changes: Any) -> IterationMetrics:
    values = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "num_microbatches": 4,
        "lm_loss": 5.25,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "loss_scale": 1.0,
        "skipped": False,
        "iteration_ms": 100.0,
        "tokens_per_second": 1000.0,
    }
    return IterationMetrics(**{**values, **changes})


def test_progress_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(True, 100) as progress:
        slow = metrics(9, iteration_ms=300.0, tokens_per_second=2000.0)
        progress.iterations([slow, metrics(10)])
        progress.iterations([metrics(11, loss_scale=256.0, skipped=True, lm_loss=None, grad_norm=None)])
        progress.evaluation(11, "valid", 4.5)
    assert capsys.readouterr().out.splitlines() == [
        " iteration  10/100 | loss 5.250000 | grad norm 1.500 | lr 1.000e-03 | 1,750 tokens/s",
        " iteration  11/100 | loss       - | grad norm - | lr 1.000e-03 | 1,000 tokens/s | loss scale 256 | skipped 1",
        " valid loss at iteration 11: 4.500000",
    ]


def test_bubble_is_appended_to_the_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    with Progress(True, 100, str(file)) as progress:
        progress.iterations([metrics(9), metrics(10)], BubbleMetrics(2, 0.1254, 0.1, 0.31, 0.25, 10))
        progress.iterations([metrics(11)], BubbleMetrics(1, 0.2, 0.1, 0.3, 0.2, 11, 11, 2, 1))
        progress.iterations([], BubbleMetrics(1, 0.2, 0.1, 0.3, 0.2, 12, 11, 2, 1))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("tokens/s | bubble 12.5% (planned 10.0%), mean idle 31.0% (planned 25.0%)")
    rates = "bubble 20.0% (planned 10.0%), mean idle 30.0% (planned 20.0%)"
    assert second.endswith(f"tokens/s | {rates} | steps 11, waited 2, repeated 1")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["train", "train", "bubble", "train", "bubble", "bubble"]
    idle = {"idle": 0.31, "planned_idle": 0.25}
    assert lines[2] == {
        "kind": "bubble", "iteration": 10, "num_iterations": 2, "measured": 0.1254, "planned": 0.1, **idle
    }  # fmt: skip
    assert (lines[4]["steps"], lines[4]["waited"], lines[4]["repeated"]) == (11, 2, 1)


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Progress(True, 48) as progress:
        progress.iterations([metrics(12)])
        progress.say("saved")
        progress.iterations([metrics(48)])
    shown = capsys.readouterr().out
    assert shown.startswith("\r\033[K[" + "#" * 6 + "." * 18 + "] iteration 12/48")
    assert "\r\033[Ksaved\n" in shown, "a printed line must replace the bar"
    assert "[" + "#" * 24 + "]" in shown and shown.endswith("\n")


def test_bar_is_updated_between_reports_once_per_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    now = [100.0]
    monkeypatch.setattr("pretrain.report.time.monotonic", lambda: now[0])
    with Progress(True, 48) as progress:
        progress.iterations([metrics(12)])
        capsys.readouterr()
        progress.reached(13)
        assert capsys.readouterr().out == "", "the bar was drawn less than a second ago"
        now[0] += 1.5
        progress.reached(24)
    bar = "#" * 12 + "." * 12
    assert capsys.readouterr().out.startswith(f"\r\033[K[{bar}] 24/48; last report: iteration 12/48")


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(True, 48) as progress:
        progress.reached(13)
    assert capsys.readouterr().out == ""


def test_metrics_file_is_appended_and_exact(tmp_path: Path) -> None:
    file = tmp_path / "new" / "metrics.jsonl"
    third = 1.0 / 3.0
    for iteration in (1, 2):
        with Progress(True, 10, str(file)) as progress:
            progress.iterations([metrics(iteration, lm_loss=third)])
    with Progress(True, 10, str(file)) as progress:
        progress.evaluation(2, "test", third)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["train", "train", "evaluation"]
    assert all(line["lm_loss"] == third for line in lines)
    assert lines[1]["consumed_samples"] == 16


def test_unwritable_metrics_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--metrics-file needs a writable file") as caught:
        Progress(True, 10, str(tmp_path / "file" / "metrics"))
    assert not caught.value.everywhere, "only the reporting rank raises this error"


def test_other_ranks_print_nothing_and_open_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(False, 10, str(tmp_path / "metrics"), str(tmp_path / "board")) as progress:
        progress.say("hello")
        progress.iterations([metrics(1)])
        progress.evaluation(1, "valid", 1.0)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_scalars_are_written_to_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(
        add_scalar=lambda *scalar: seen.append(scalar), close=lambda: seen.append(("closed", 0.0, 0))
    )
    module = SimpleNamespace(SummaryWriter=lambda directory: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with Progress(True, 10, tensorboard_dir=str(tmp_path)) as progress:
        progress.iterations([metrics(3)])
        progress.evaluation(3, "valid", 4.5)
    assert ("train/lm_loss", 5.25, 3) in seen and ("valid/lm_loss", 4.5, 3) in seen
    assert seen[-1][0] == "closed"


def test_missing_tensorboard_only_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # makes its import fail
    with Progress(True, 10, tensorboard_dir=str(tmp_path)) as progress:
        progress.iterations([metrics(1)])
    assert "TensorBoard is not installed" in capsys.readouterr().out
