"""Tests of the catalogue on a folder of launch scripts: how they are read, and what is said of each."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.catalogue import shell
from megatron.zero_bubble.cli.catalogue.contained import CROWDED
from megatron.zero_bubble.cli.catalogue.find import recipes_in
from megatron.zero_bubble.cli.catalogue.judge import BROKEN, GAINS, OTHER, REFUSED, SINGLE, STAYS, UNREAD, Row, judged
from megatron.zero_bubble.cli.catalogue.recipe import Recipe, world_of
from tests.helpers.processes import running

Capture = pytest.CaptureFixture[str]
MODEL = """
MODEL="--num-layers ${LAYERS:-32} --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --swiglu --bf16"
MODEL="$MODEL --max-position-embeddings 4096 --vocab-size 32000 --untie-embeddings-and-output-weights"
"""
SCRIPTS = {
    "common.sh": MODEL,
    "gains.sh": """#!/bin/bash
#SBATCH --nodes=2
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PATH=/opt/bin:$PATH
source "$HERE/common.sh"
PARALLEL=(
    --pipeline-model-parallel-size 8  # one stage per rank
    --tensor-model-parallel-size 2
)
if [ "${BATCH:-16}" -gt 8 ]; then
    PARALLEL+=(--micro-batch-size 1 --global-batch-size "${BATCH:-16}")
fi
for RUN in 1; do
    torchrun --nproc_per_node 8 pretrain_gpt.py $MODEL "${PARALLEL[@]}" --lr 1e-4 --train-iters 10 \\
        --data-path $DATA --save "$HERE/out" > log.txt 2>&1 | tee again.txt
done
""".replace("$DATA", "${1:-}"),
    "stays.sh": """. ./common.sh
srun --nodes 1 bash -c "torchrun --nproc-per-node=8 pretrain_gpt.py $MODEL --lr 1 --train-iters 9
    --pipeline-model-parallel-size 2 --tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 512"
""",
    "layers.sh": """. ./common.sh
MODEL="${MODEL/--num-layers 32/--num-layers 30}"
torchrun pretrain_gpt.py $MODEL --lr 1 --train-iters 9 --pipeline-model-parallel-size 4 --micro-batch-size 1 \\
    --global-batch-size 32
""",
    "quotes.sh": """. ./common.sh
ARGS=(--pipeline-model-parallel-size 4 --micro-batch-size 1 --step-batch-size-schedule "0:16 1B:64")
torchrun pretrain_gpt.py $MODEL --lr 1 --train-iters 9 ${ARGS[@]}
""",
    "refused.sh": """. ./common.sh
torchrun pretrain_gpt.py $MODEL --lr 1 --train-iters 9 --pipeline-model-parallel-size 4 --micro-batch-size 1 \\
    --global-batch-size 32 --use-megatron-fsdp
""",
    "single.sh": """. ./common.sh
torchrun pretrain_gpt.py $MODEL --lr 1 --train-iters 9 --pipeline-model-parallel-size 1 --micro-batch-size 1 \\
    --global-batch-size 32
""",
    "inference.sh": """. ./common.sh
torchrun tools/serve.py $MODEL --pipeline-model-parallel-size 2
""",
    "unread.sh": """#!/bin/bash
if [ -z "$1" ]; then echo "give a model"; exit 1; fi
source models/$1.sh --pipeline-model-parallel-size 2
""",
    "tests/flags.yaml": """ENV_VARS:
  NCCL_ALGO: Ring
MODEL_ARGS:
  --num-layers: 32
  --hidden-size: 4096
  --num-attention-heads: 32
  --seq-length: 4096
  --pipeline-model-parallel-size: 4 # ranks
  --micro-batch-size: 1
  --global-batch-size: 8
  --recompute-modules: "[layernorm mlp]"
  --moe-layer-freq: "([1]*32)"
  --bf16: true
  --swiglu: false
  --lr: 1e-4
  --train-iters: 9
""",
    "values.yaml": "MODEL:\n  note: --pipeline-model-parallel-size is not a flag here\n",
}


HARM = """echo --pipeline-model-parallel-size
rm -rf kept.txt; /bin/rm kept.txt
echo text > written.txt
: >kept.txt
exec 5>written.txt
while true; do sleep 1; done
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of launch scripts."""
    root = tmp_path_factory.mktemp("recipes")
    for name, text in SCRIPTS.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def read(folder: Path) -> dict[str, Recipe]:
    """Its recipes by their names."""
    return {recipe.name: recipe for recipe in recipes_in(str(folder))}


def test_scripts_are_read_as_bash_runs_them(read: dict[str, Recipe]) -> None:
    recipe, flags = read["gains.sh"], list(read["gains.sh"].flags)
    assert (recipe.program, recipe.gpus, recipe.gpus_per_node) == ("pretrain_gpt.py", 16, 8)
    assert flags[flags.index("--num-layers") + 1] == "32"
    assert flags[flags.index("--global-batch-size") + 1] == "16"
    assert flags[flags.index("--data-path") + 1] == "given-to-the-script"
    assert flags[-1].endswith("/out")
    assert (read["stays.sh"].gpus, read["stays.sh"].flags[-1]) == (8, "512")
    assert "common.sh" not in read
    assert "values.yaml" not in read


def test_variables_of_the_shell_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH", "24")
    recipe = next(each for each in recipes_in(str(folder)) if each.name == "gains.sh")
    assert recipe.flags[recipe.flags.index("--global-batch-size") + 1] == "24"


def test_nothing_is_started_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_SECONDS", 2)
    (tmp_path / "harm.sh").write_text(HARM)
    (tmp_path / "kept.txt").write_text("kept")
    (recipe,) = recipes_in(str(tmp_path))
    assert recipe.problem == "no command with the flags of a job: it does not end"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["harm.sh", "kept.txt"]
    assert (tmp_path / "kept.txt").read_text() == "kept"


def test_reasons_name_files_within_the_folder(tmp_path: Path) -> None:
    (tmp_path / "needs.sh").write_text('# --pipeline-model-parallel-size\n: "${GPUS:?give it to $0}"\n')
    (recipe,) = recipes_in(str(tmp_path))
    assert recipe.problem == "no command with the flags of a job: GPUS: give it to needs.sh"


@pytest.mark.parametrize(
    "script", ["builtin suspend -f", "set -m; builtin set -m; builtin suspend -f", "coproc A { read -t 60 x; }; wait"]
)
def test_a_script_can_neither_stop_us_nor_outlive_us(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "_SECONDS", 1)
    (tmp_path / "stops.sh").write_text(f"# --pipeline-model-parallel-size\n{script}\n")
    (recipe,) = recipes_in(str(tmp_path))
    assert str(recipe.problem).startswith("no command with the flags of a job")
    assert running(tmp_path) == ""


def test_jobs_that_a_script_starts_before_it_hangs_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_SECONDS", 1)
    job = "torchrun pretrain_gpt.py --num-layers 8 --pipeline-model-parallel-size 4"
    (tmp_path / "watched.sh").write_text(f"{job} &\nwhile true; do sleep 60; done\n")
    (recipe,) = recipes_in(str(tmp_path))
    assert (recipe.problem, recipe.flags) == (None, tuple(job.split()[2:]))


def test_a_script_that_starts_more_and_more_processes_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_MOST_PROCESSES", 20)
    monkeypatch.setattr(shell, "_SECONDS", 60)
    busy = "builtin set -m\nwhile :; do while :; do :; done & done"  # each in a group of its own
    (tmp_path / "forks.sh").write_text(f"# --pipeline-model-parallel-size\n{busy}\n")
    (recipe,) = recipes_in(str(tmp_path))
    assert recipe.problem == f"no command with the flags of a job: {CROWDED}"
    assert running(tmp_path) == ""


def test_records_that_jobs_have_written_into_each_other_end_what_is_read() -> None:
    whole, cut = "2\0torchrun\0--a\0", "3\0torchrun\0--b\0"
    assert list(shell._commands(whole + cut)) == [["torchrun", "--a"]]
    assert list(shell._commands(whole + "--b\0" + whole)) == [["torchrun", "--a"]]


def test_what_a_script_writes_to_a_descriptor_of_its_own_does_not_end_it(tmp_path: Path) -> None:
    descriptors = " ".join(f"echo x >&{number};" for number in range(3, 100) if number != 7)
    text = f"{{ {descriptors} }} 2>/dev/null\nfor ((i = 0; i < 50000; i++)); do :; done\ntorchrun pretrain.py --a 4\n"
    commands, _ = shell.recorded(text, tmp_path / "writes.sh", tmp_path, tmp_path)
    assert commands == [["torchrun", "pretrain.py", "--a", "4"]]


def test_secrets_are_not_given_to_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "tells.sh").write_text(': "${HF_TOKEN?it is not set}" # --pipeline-model-parallel-size\n')
    (recipe,) = recipes_in(str(tmp_path))
    assert str(recipe.problem).endswith("HF_TOKEN: it is not set")


def test_what_is_no_catalogue_is_refused_before_it_is_made(tmp_path: Path, folder: Path, capsys: Capture) -> None:
    (tmp_path / "none").mkdir()
    assert main(["catalogue", str(tmp_path / "none")]) == 2
    assert "files that contain --pipeline-model-parallel-size; got none in " in capsys.readouterr().err
    assert main(["catalogue", str(folder), "--output", str(tmp_path / "no/file.csv")]) == 2
    assert "files in a folder that exists; got " in capsys.readouterr().err


def test_sizes_below_one_and_help_are_rows(tmp_path: Path) -> None:
    job = f"{MODEL}\ntorchrun pretrain_gpt.py $MODEL --lr 1 --train-iters 9 --pipeline-model-parallel-size 4"
    (tmp_path / "context.sh").write_text(f"{job} --micro-batch-size 1 --global-batch-size 8 --context-parallel-size 0")
    (tmp_path / "help.sh").write_text(f"{job} --help")
    context, asks = (judged(recipe, "h100") for recipe in recipes_in(str(tmp_path)))
    assert context.outcome == BROKEN and "--context-parallel-size must be positive, got 0" in context.reason
    assert asks.outcome == OTHER


def test_files_of_flags_are_read(read: dict[str, Recipe]) -> None:
    flags = read["tests/flags.yaml"].flags
    at = flags.index("--recompute-modules")
    assert flags[at : at + 4] == ("--recompute-modules", "layernorm", "mlp", "--moe-layer-freq")
    assert flags[at + 4 : at + 6] == ("([1]*32)", "--bf16")
    assert "--swiglu" not in flags
    assert flags[flags.index("--pipeline-model-parallel-size") + 1] == "4"


@pytest.mark.parametrize(
    ("gpus", "per_node", "sizes", "world"),
    [
        (16, 8, (2, 4, 1, 1), (2, 8, False)),
        (8, 8, (2, 8, 1, 1), (2, 8, True)),
        (None, None, (1, 4, 1, 1), (1, 4, True)),
        (8, 8, (1, 4, 1, 8), (4, 8, True)),
        (24, 8, (3, 4, 1, 1), (3, 8, False)),
    ],
)
def test_gpus_are_those_given_or_the_fewest(
    gpus: int | None, per_node: int | None, sizes: tuple[int, ...], world: tuple[int, int, bool]
) -> None:
    of = dict(zip(("tensor", "pipeline", "context", "expert"), sizes, strict=True), expert_tensor=1)
    assert world_of(Recipe("", gpus=gpus, gpus_per_node=per_node), of) == world


def test_every_recipe_is_a_row_with_its_reason(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    files = [tmp_path / name for name in ("all.csv", "all.json", "all.html")]
    outputs = [word for file in files for word in ("--output", str(file))]
    assert main(["catalogue", str(folder), *outputs]) == 0
    out = capsys.readouterr().out
    with files[0].open() as stream:
        rows = {row["name"].partition("/")[2]: row for row in csv.DictReader(stream)}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "gains.sh": GAINS,
        "stays.sh": STAYS,
        "layers.sh": BROKEN,
        "quotes.sh": BROKEN,
        "refused.sh": REFUSED,
        "single.sh": SINGLE,
        "inference.sh": OTHER,
        "unread.sh": UNREAD,
        "tests/flags.yaml": GAINS,
    }
    options = {name: row["option"] for name, row in rows.items() if row["outcome"] in (BROKEN, REFUSED)}
    assert options == {
        "layers.sh": "--num-layers",
        "quotes.sh": "--step-batch-size-schedule",
        "refused.sh": "--use-megatron-fsdp",
    }
    gains = rows["gains.sh"]
    assert (gains["gpus"], gains["ranks"], gains["microbatches"]) == ("16", "8", "16")
    assert float(gains["idle"]) > 0.2 > float(rows["stays.sh"]["idle"])
    assert "--zero-bubble-schedule" in gains["flags"]
    assert json.loads(files[1].read_text())["recipes"][0]["name"].startswith(folder.name)
    page = files[2].read_text()
    assert all(name in page for name in rows)
    assert "http" not in page
    assert "Broken: --num-layers 1, --step-batch-size-schedule 1." in out
    assert "unread.sh  not read: no command with the flags of a job" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "a catalogue is made of a folder with launch scripts; got none; give a folder"),
        ([".", "--output", "x.pdf"], "--output takes files that end in .html, .csv, .json; got x.pdf; rename it"),
    ],
)
def test_bad_input_is_one_sentence(capsys: Capture, arguments: list[str], message: str) -> None:
    assert main(["catalogue", *arguments]) == 2
    assert capsys.readouterr().err == f"zero-bubble catalogue: {message}\n"


def test_some_recipes_are_searched_without_what_refuses_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option that refuses them, here graphs of whole iterations, is among the flags to change."""
    file, asked = tmp_path / "some.csv", []

    def judged_here(each: Iterable[Recipe], gpu: str, seconds: int, *, searches: bool) -> Iterator[Row]:
        found = list(each)
        asked.append(([recipe.name for recipe in found], seconds, searches))
        yield from (judged(recipe, gpu) for recipe in found)

    monkeypatch.setattr("megatron.zero_bubble.cli.catalogue.rows_of", judged_here)
    assert main(["catalogue", str(folder), "--only", "stays", "--search", "--output", str(file)]) == 0
    assert asked == [(["stays.sh"], 600, True)]
