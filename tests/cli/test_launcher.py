"""The words before a training script say how many nodes and processes a job has, as each launcher spells it."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.cli.launcher import processes_of


@pytest.mark.parametrize(
    ("command", "nodes", "per_node"),
    [
        ("torchrun --nnodes 2 --nproc-per-node=4", 2, 4),
        ("python -m torch.distributed.run --nproc_per_node 4", None, 4),
        ("srun -N4 --ntasks-per-node=8 python -u", 4, 8),
        ("srun -N 2 -n 16 python", 2, 8),
        ("srun -n4 python", 1, 4),
        ("srun -N2 -n2 torchrun --nproc-per-node 8", 2, 8),
        ("srun -n 2 torchrun --nproc-per-node 8", 2, 8),
        ("srun --nodes=2 --ntasks 2 python", 2, None),
        ("/usr/bin/mpirun -np 4 python", 1, 4),
        ("mpirun -np 32 -x PATH python", 4, 8),
        ("mpirun -np 8 -npernode 4 python", 2, 4),
        ("mpiexec -n 16 -N 4 python", 4, 4),
        ("srun -n 1 python", None, None),
        ("python", None, None),
    ],
)
def test_nodes_and_processes_of_a_launcher(command: str, nodes: int | None, per_node: int | None) -> None:
    assert processes_of(command.split()) == (nodes, per_node)


def test_the_header_of_a_batch_job_says_what_its_command_does_not() -> None:
    assert processes_of(["srun", "python"], {"N": "4", "ntasks-per-node": "8"}) == (4, 8)
    assert processes_of(["srun", "-N2", "python"], {"nodes": "4", "n": "16"}) == (2, 8)
