"""Tests of the transfer of loss reports to the last rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.integration.adapter.loss_reports import LossReportList, LossReports
from tests.helpers.ranks import RankPool


class Report(NamedTuple):
    """A report as a named tuple, which a job may return."""

    loss: torch.Tensor
    name: str


@dataclass
class Figures:
    """A report as an object of the job's own, with a tensor from which nobody has taken the gradient."""

    loss: torch.Tensor


REPORTS = [
    {"lm loss": torch.tensor([1.5, 8.0])},
    {"lm loss": torch.tensor([2.5, 7.0]), "other": (1, "two")},
    {"lm loss": torch.tensor(3.5), "tokens": torch.tensor([3, 4]), "none": torch.empty(0, 2)},
    {"named": Report(torch.tensor(4.5), "four")},
    None,
    [[torch.ones(1, 2, 1)], {"deep": [{"er": (None, torch.zeros(()))}]}],
    {"narrow": torch.arange(6.0).reshape(2, 3).t().bfloat16(), "masks": torch.tensor([True, False])},
]


def collected() -> LossReportList:
    reports = LossReportList()
    for report in [*REPORTS, {"own": Figures(torch.tensor(6.5, requires_grad=True))}]:
        reports.append(report)
    return reports


def exchange(rank: int, wait: bool) -> str:
    """Deliver reports twice; without ``wait`` the first rank continues before the last one receives them."""
    assert dist.group.WORLD is not None
    reports, found = LossReports(dist.group.WORLD, wait), []
    for _ in range(2):
        if rank == 0 and not wait:
            assert reports.deliver(collected(), 0, torch.device("cpu")) == []
        dist.barrier()
        if rank == 0 and wait:
            assert reports.deliver(collected(), 0, torch.device("cpu")) == []
            assert reports.num_in_flight == 0
        if rank != 0:
            found += reports.deliver(LossReportList(), 0, torch.device("cpu"))
    reports.settle()
    assert reports.num_in_flight == 0
    reports.close()
    return str(found)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_last_rank_receives_the_first_ranks_reports(ranks: RankPool, num_ranks: int, wait: bool) -> None:
    *others, last = ranks.run(num_ranks, exchange, wait, timeout=60)
    assert last == str([*REPORTS, {"own": Figures(torch.tensor(6.5))}] * 2)
    assert others == ["[]"] * (num_ranks - 1)
