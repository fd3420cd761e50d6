"""The comparison of what data-parallel replicas do in an iteration: between hosts, without a wait for any device."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import PeerError, UserError
from megatron.zero_bubble.engine.runtime.groups import destroy, new_group
from megatron.zero_bubble.engine.runtime.transport import blaming_peers


class Together(NamedTuple):
    """Why replicas must run the same number of microbatches.

    Attributes:
        replicas: which ones.
        because: what they do together.
        remedy: what else a job can do.
    """

    replicas: str
    because: str
    remedy: str


SHARDED = Together(
    "data-parallel replicas of sharded units",
    "they gather weights and reduce gradients together",
    "train without shard_weights",
)


class ReplicaComparison:
    """Compares the numbers of microbatches of replicas. The constructor is a collective call of all ranks of the job.

    Over NCCL, the answer would come after all that the device has queued, and the host could not run ahead of it.

    Args:
        replicas: their group.
        timeout: how long a replica may take to begin the same iteration; None for the job's.
    """

    def __init__(self, replicas: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self.replicas = replicas
        self._group = new_group(dist.get_process_group_ranks(replicas), "gloo", timeout)
        self._answer: tuple[dist.Work, list[torch.Tensor]] | None = None

    def start(self, num_microbatches: int, forward_only: bool) -> None:
        """Tell the other replicas what this one begins, and wait for none of them. A collective call of the group."""
        own = torch.tensor([num_microbatches, forward_only], device="cpu")
        every = [torch.empty_like(own) for _ in range(self._group.size())]
        self._answer = dist.all_gather(every, own, group=self._group, async_op=True), every

    def check(self, together: Together = SHARDED) -> None:
        """Wait until all replicas have begun the iteration, unless that is known.

        Raises:
            UserError: they have different numbers of microbatches, or only some of them evaluate.
            PeerError: a replica died.
        """
        if self._answer is None:
            return
        (work, every), self._answer = self._answer, None
        with blaming_peers(_not_begun):
            work.wait()
        iterations = [tuple(each.tolist()) for each in every]
        if len(set(iterations)) > 1:
            what = [f"{count}{' (evaluation)' * evaluates}" for count, evaluates in iterations]
            raise UserError(
                f"all {together.replicas} must run the same number of microbatches per iteration, because "
                f"{together.because}; got {', '.join(what)}; give all of them the same, or {together.remedy}"
            )

    def close(self) -> None:
        """Disconnect from the other replicas."""
        self._answer = None
        destroy(self._group)


def _not_begun(reason: str) -> PeerError:
    return PeerError(
        f"not all data-parallel replicas began the iteration ({reason}); a rank has failed or hangs: look for the "
        "first error of the other ranks"
    )
