"""Tests of the launch scripts' commands per node, with stubs for SLURM's commands and the Python interpreter."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.ports import free_port

ROOT = Path(__file__).parents[2]
SHAPES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --pipeline-model-parallel-size 2"
)
JOB = f"{SHAPES} --train-iters 2 --lr 1e-3 --eval-iters 0 --log-interval 1 --mock-data --zero-bubble-device cpu".split()

# Prints the arguments of torchrun; runs everything else with Python.
PYTHON = f"""#!/usr/bin/env bash
if [[ "$2" == torch.distributed.run ]]; then
    settings="$CUDA_DEVICE_MAX_CONNECTIONS $CUDA_MODULE_LOADING $PYTORCH_CUDA_ALLOC_CONF $NCCL_DEBUG"
    printed=$(printf '%s\\n' "$settings" "$@")
    cat <<<"$printed"  # in one write, because another node may print at the same time
else
    exec {shlex.quote(sys.executable)} "$@"
fi
"""
# Runs the command once per task, as SLURM does: --ntasks and, without it, SLURM_NTASKS of the allocation override
# --ntasks-per-node. The other options are ignored.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "srun $*" >&2
tasks="${SLURM_NTASKS:-}" per_node=1
while [[ "$1" == --* ]]; do
    case "$1" in
        --ntasks) tasks="$2" ;;
        --ntasks-per-node) per_node="$2" ;;
    esac
    [[ "$1" == *=* ]] || shift
    shift
done
tasks="${tasks:-$((SLURM_JOB_NUM_NODES * per_node))}"
started=()
for ((task = 0; task < tasks; task++)); do
    SLURM_NODEID=$((task * SLURM_JOB_NUM_NODES / tasks)) "$@" &
    started+=($!)
done
for each in "${started[@]}"; do wait "$each" || exit; done
"""
SBATCH = """#!/usr/bin/env bash
printf '%s\\n' "ROOT=$ZB_ROOT" "$@"
"""
# More names than a pipe's buffer holds: if the script read only the first name, scontrol would be killed by SIGPIPE.
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames there-[1-2]" ]] && printf '%s\\n' 127.0.0.1 there-{2..20000}
"""


def launch(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script without the launch variables of this process's environment."""
    ours = (
        "NNODES",
        "NODE_RANK",
        "GPUS_PER_NODE",
        "NPROC",
        "MASTER_",
        "MEGATRON_PATH",
        "SLURM_",
        "NCCL_",
        "CUDA_",
        "PYTORCH_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PYTHON": sys.executable, **kept, **environment},
        timeout=240,
    )


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """A folder with stubs for Python and SLURM's commands."""
    for name, text in (("python", PYTHON), ("srun", SRUN), ("sbatch", SBATCH), ("scontrol", SCONTROL)):
        file = tmp_path / name
        file.write_text(text)
        file.chmod(0o755)
    return tmp_path


def path_with(stubs: Path) -> str:
    return f"{stubs}:{os.environ['PATH']}"


def test_dry_run_prints_the_command_of_each_node(stubs: Path) -> None:
    python = {"PYTHON": str(stubs / "python")}
    nodes = {"NNODES": "2", "NPROC": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "1234", **python}
    odd = ["--save", "a folder/of $HOME"]
    dry = launch("launch_torchrun.sh", "--dry-run", *JOB, *odd, **nodes)
    assert (dry.returncode, dry.stderr) == (0, "")
    printed = [line for line in dry.stdout.splitlines() if line.startswith("node 1: ")]
    assert dry.stdout.startswith("2 nodes x 2 processes = 4 ranks: tensor 1 x data 2 x pipeline 2\n")
    real = launch("launch_torchrun.sh", *JOB, *odd, NODE_RANK="1", **nodes)
    settings, *called = real.stdout.splitlines()
    assert settings == "1 EAGER expandable_segments:True WARN"
    assert called[:10] == (
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr node-a".split()
    )
    assert called[10:] == ["--master-port", "1234", str(ROOT / "scripts/pretrain_gpt.py"), *JOB, *odd]
    # The printed command gives the same result when run by a shell.
    again = subprocess.run(
        ["bash", "-c", printed[0].removeprefix("node 1: ")], capture_output=True, text=True, check=True
    )
    assert again.stdout == real.stdout


def test_environment_variables_override_defaults(stubs: Path) -> None:
    python = {"PYTHON": str(stubs / "python"), "NCCL_SOCKET_IFNAME": "ib0"}
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "LAZY", "NCCL_DEBUG": "INFO"}
    allocator = "expandable_segments:False"
    real = launch("launch_torchrun.sh", *JOB, NPROC="2", PYTORCH_CUDA_ALLOC_CONF=allocator, **own, **python)
    assert real.stdout.splitlines()[0] == f"8 LAZY {allocator} INFO"
    assert "--standalone" in real.stdout.splitlines()
    # torch reads this newer name only if the older one is not set.
    real = launch("launch_torchrun.sh", *JOB, NPROC="2", PYTORCH_ALLOC_CONF=allocator, **own, **python)
    assert real.stdout.splitlines()[0] == f"8 LAZY {allocator} INFO"
    dry = launch("launch_torchrun.sh", "--dry-run", *JOB, NPROC="2", **python)
    assert (
        "node 0: env CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_MODULE_LOADING=EAGER "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NCCL_DEBUG=WARN OMP_NUM_THREADS=1 NCCL_SOCKET_IFNAME=ib0 "
    ) in dry.stdout


@pytest.mark.parametrize("script", ["launch_torchrun.sh", "launch_slurm.sh"])
def test_invalid_layout_is_rejected_before_the_start(script: str) -> None:
    """Nodes have three processes, pipelines two ranks."""
    done = launch(script, *JOB, "--dry-run", NNODES="3", GPUS_PER_NODE="3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "zero-bubble dry-run: the number of processes must be divisible by tensor * pipeline parallel size, got 9 and "
        "1 * 2; start a multiple of 2 processes, nodes times processes per node, or change the sizes\n"
    )


def test_dry_run_options_are_passed_on() -> None:
    done = launch("launch_torchrun.sh", *JOB, "--gpu-memory", "1KiB", "--dry-run", "--gpu", "h200", NPROC="2")
    assert done.returncode == 2
    assert "every rank must fit --gpu-memory 1KiB" in done.stderr
    for gpu in (["--gpu", "h200"], ["--gpu=h200"]):
        assert "h200: 989 TFLOPS" in launch("launch_torchrun.sh", *JOB, "--dry-run", *gpu, NPROC="2").stdout


@pytest.mark.parametrize("where", ["torchrun", "slurm"])
def test_help_needs_neither_gpu_nor_scheduler(where: str) -> None:
    done = launch(f"launch_{where}.sh", "--help", PATH="/usr/bin:/bin")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Start GPT pretraining ") and "NNODES" in done.stdout and "#" not in done.stdout


@pytest.mark.parametrize(
    ("environment", "arguments", "sentence"),
    [
        ({"NPROC": "0"}, "", "NNODES and GPUS_PER_NODE must be 1 or more, got 1 and 0"),
        ({"NPROC": "2", "NNODES": "2"}, "", "NODE_RANK must be 0 to 1 with NNODES=2, got ''"),
        ({"NPROC": "2", "NNODES": "2", "NODE_RANK": "2"}, "", "NODE_RANK must be 0 to 1 with NNODES=2, got '2'"),
        (
            {"NPROC": "2", "NNODES": "2", "NODE_RANK": "0"},
            "",
            "MASTER_ADDR must name node 0 with NNODES=2, got nothing",
        ),
        ({"NPROC": "2"}, "--gpu-memory 80GiB", "--gpu-memory requires --dry-run; add --dry-run or drop --gpu-memory"),
        ({"NPROC": "2"}, "--dry-run --gpu", "--gpu takes a value, got none"),
        ({"NPROC": "2", "MEGATRON_PATH": "/none"}, "", "MEGATRON_PATH must be a checkout of Megatron-LM, got /none"),
        ({"NPROC": "2", "PYTHON": "no-python"}, "", "cannot find the Python interpreter 'no-python'; set PYTHON"),
    ],
)
def test_invalid_settings_are_rejected_in_one_sentence(
    environment: dict[str, str], arguments: str, sentence: str
) -> None:
    done = launch("launch_torchrun.sh", *arguments.split(), **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launch_torchrun.sh: ") and sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_megatron_lm_checkout_is_run_with_our_launcher(stubs: Path) -> None:
    checkout = stubs / "Megatron-LM"
    checkout.mkdir()
    (checkout / "pretrain_gpt.py").touch()
    job = {"NPROC": "2", "MEGATRON_PATH": str(checkout), "PYTHON": str(stubs / "python")}
    flags = [*SHAPES.split(), "--use-mcore-models", "--tokenizer-type", "HuggingFaceTokenizer"]
    real = launch("launch_torchrun.sh", *flags, **job)
    start = ["-m", "megatron.zero_bubble.launch", str(checkout / "pretrain_gpt.py")]
    assert real.stdout.splitlines()[-len(flags) - 3 :] == [*start, *flags]
    dry = launch("launch_torchrun.sh", "--dry-run", *flags, **job)
    assert "Not checked here, only by Megatron-LM: --use-mcore-models\n" in dry.stdout
    assert " ".join(start) in dry.stdout.splitlines()[-1]


def test_slurm_script_submits_itself_outside_an_allocation(stubs: Path) -> None:
    done = launch("launch_slurm.sh", *JOB, NNODES="4", GPUS_PER_NODE="8", PATH=path_with(stubs))
    script = str(ROOT / "scripts/launch_slurm.sh")
    assert done.stdout.splitlines() == [f"ROOT={ROOT}", *"--nodes 4 --gpus-per-node 8".split(), script, *JOB]


@pytest.mark.parametrize("tasks", [{}, {"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8"}], ids=["", "per GPU"])
def test_slurm_script_passes_node_rank_and_master_address(stubs: Path, tasks: dict[str, str]) -> None:
    """Also in an allocation with one task per GPU, in which one torchrun per node starts all the same."""
    allocation = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "there-[1-2]"}
    gpus = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96", "PYTHON": str(stubs / "python")}
    spool = stubs / "spool"  # sbatch runs a copy of the script
    spool.mkdir()
    (spool / "job").write_text((ROOT / "scripts/launch_slurm.sh").read_text())
    environment = {**allocation, **tasks, **gpus, "PATH": path_with(stubs), "SLURM_SUBMIT_DIR": str(ROOT)}
    done = launch(str(spool / "job"), *JOB, **environment)
    step = "srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit=1 --cpus-per-task 96 bash -c"
    assert done.stderr.startswith(step)
    words = done.stdout.split()
    assert sorted(own for flag, own in pairwise(words) if flag == "--node-rank") == ["0", "1"]
    assert words.count("127.0.0.1") == 2 and words.count("23456") == 2
    assert words[words.index("--nproc-per-node") + 1] == "8"
    unknown = launch("launch_slurm.sh", *JOB, **{**environment, "SLURM_JOB_NODELIST": "elsewhere-[1-2]"})
    assert unknown.returncode == 2
    assert "'scontrol show hostnames elsewhere-[1-2]', which failed; set MASTER_ADDR" in unknown.stderr
    wrong = launch("launch_slurm.sh", *JOB, **environment, NNODES="3")
    assert wrong.returncode == 2
    assert "NNODES must be the number of allocated nodes, 2, got 3" in wrong.stderr


@pytest.mark.full
def test_two_nodes_train_with_the_slurm_script(stubs: Path, tmp_path: Path) -> None:
    """Two torchruns on this machine, with one process each, connect and train."""
    port = str(free_port())
    metrics = tmp_path / "metrics.jsonl"
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "there-[1-2]", "NPROC": "1"}
    schedule = ["--zero-bubble-schedule", "zb-h1", "--metrics-file", str(metrics)]
    done = launch("launch_slurm.sh", *JOB, *schedule, **allocation, MASTER_PORT=port, PATH=path_with(stubs))
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()] == [1, 2]
