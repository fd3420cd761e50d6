"""Tests of the times of transfers inside a node and between nodes."""

from __future__ import annotations

import pytest

from megatron.zero_bubble import Placement, build, simulate
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.links import GivenLinks, with_transfers
from megatron.zero_bubble.cli.rank_groups import RankGroups
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.figures import Figures

JOB = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data --pipeline-model-parallel-size 4 --global-batch-size 32"
).split()
LAYERS = LayerCosts((LayerFigures(1.0, 1.0, 1.0, activation=1.0),) * 8, comm_ms=0.5)
LINE = Placement.linear(4)
NOTHING = GivenLinks(), GivenLinks()


def figures(message_bytes: float = 1e6) -> Figures:
    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        return PassCosts.uniform(placement, 2.0, 2.0, 2.0, 0.5), PassMemory.uniform(placement)

    return Figures(4, 8, on, layers=LAYERS, message_bytes=message_bytes)


def test_links_hold_on_every_placement_and_layout() -> None:
    linked = figures().with_links({(1, 2): 3.0, (2, 1): 4.0})
    for placement in (LINE, Placement.vee(4), Placement.interleaved(4, 2)):
        costs = linked.on(placement)[0]
        assert (costs.comm(1, 2), costs.comm(2, 1), costs.comm(0, 1)) == (3.0, 4.0, 0.5)
    assert linked.evenly().on(LINE)[0].comm(2, 1) == 4.0
    assert linked.laid_out(LINE, (2, 2, 2, 2)).on(LINE)[0].comm(1, 2) == 3.0
    later = linked.with_links({(1, 2): 6.0}).on(LINE)[0]
    assert (later.comm(1, 2), later.comm(2, 1)) == (6.0, 4.0)
    # The first microbatch crosses the link once.
    schedule = build("1f1b", num_ranks=4, num_microbatches=1)
    lengths = [simulate(schedule, *one.on(LINE)).makespan_ms for one in (figures(), linked)]
    assert lengths[1] - lengths[0] == pytest.approx(2.5 + 3.5)


def test_one_time_for_all_links_is_that_of_every_transfer() -> None:
    """Searches are shorter without links."""
    costs = figures().with_links({(a, b): 2.0 for a in range(4) for b in range(4) if a != b}).on(LINE)[0]
    assert (costs.comm_ms, costs.links) == (2.0, {})
    assert figures().with_links({(0, 1): 0.5}).on(LINE)[0].links == {}


def test_links_are_checked() -> None:
    with pytest.raises(UserError, match=r"links\[0, 1\]"):
        figures().with_links({(0, 1): -1.0}).on(LINE)
    with pytest.raises(UserError, match=r"links\[0, 1\] must be at most"):
        figures().with_links({(0, 1): 1e300})


@pytest.mark.parametrize(
    ("sizes", "node_size", "crossing"),
    [
        ({"tensor": 1, "data": 1, "pipeline": 4}, 2, {(0, 2), (0, 3), (1, 2), (1, 3)}),
        ({"tensor": 1, "data": 1, "pipeline": 4}, 4, set()),
        ({"tensor": 2, "data": 2, "pipeline": 2}, 4, {(0, 1)}),
        # Of 2 replicas with 3 ranks each, one changes nodes after its first rank, the other after its second.
        ({"tensor": 1, "pipeline": 3, "data": 2}, 2, {(0, 1), (0, 2), (1, 2)}),
        ({"tensor": 1, "pipeline": 3, "data": 2}, 3, set()),
    ],
)
def test_pairs_of_pipeline_ranks_on_different_nodes(
    sizes: dict[str, int], node_size: int, crossing: set[tuple[int, int]]
) -> None:
    groups = RankGroups(node_size, sizes, {})
    assert groups.crossing() == {(a, b) for pair in crossing for a, b in (pair, pair[::-1])}
    places = [[rank // node_size for rank in ranks] for ranks in groups.groups("pipeline")]
    both = {(a, b) for each in places for a, one in enumerate(each) for b, other in enumerate(each) if one != other}
    assert groups.crossing() == both


def test_bandwidths_of_hops_inside_a_node_and_between_nodes() -> None:
    groups = RankGroups(2, {"tensor": 1, "data": 1, "pipeline": 4}, {})
    costs = with_transfers(figures(), groups, DEVICES["h100"], NOTHING, True)
    of_line = costs.on(LINE)[0]
    assert [of_line.comm(a, a + 1) for a in range(3)] == pytest.approx([0.105, 0.12, 0.105])
    between = "Transfers between nodes, 1 of the pipeline's 3 hops: 0.1 ms + bytes at"
    assert costs.notes == (f"{between} 50 GB/s, assumed; give --network-bandwidth.",)
    given = with_transfers(figures(), groups, DEVICES["h100"], (GivenLinks(100.0), GivenLinks(25.0)), False)
    assert [given.on(LINE)[0].comm(a, a + 1) for a in range(3)] == pytest.approx([0.11, 0.14, 0.11])
    assert given.notes == (
        "Transfers inside a node: 0.1 ms + bytes at 100 GB/s.",
        f"{between} 25 GB/s.",
    )
    assert with_transfers(figures(), groups, DEVICES["h100"], NOTHING, False).notes == (), (
        "a run has measured its links"
    )


def test_latencies_of_hops_inside_a_node_and_between_nodes() -> None:
    groups = RankGroups(2, {"tensor": 1, "data": 1, "pipeline": 4}, {})
    costs = with_transfers(figures(), groups, DEVICES["h100"], (GivenLinks(us=40.0), GivenLinks(50.0, 0.0)), False)
    assert [costs.on(LINE)[0].comm(a, a + 1) for a in range(3)] == pytest.approx([0.045, 0.02, 0.045])
    assert costs.notes == (
        "Transfers inside a node: 0.04 ms + bytes at 200 GB/s.",
        "Transfers between nodes, 1 of the pipeline's 3 hops: 0 ms + bytes at 50 GB/s.",
    )


def test_dry_run_takes_the_bandwidth_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    def length(*own: str) -> float:
        assert main(["dry-run", *own, "--", *JOB, "--zero-bubble-schedule", "zb-h1"]) == 0
        out = capsys.readouterr().out
        assert ("Transfers between nodes" in out) == ("--nodes" in own)
        return float(out.split(" ms, bubble")[0].split()[-1])

    nodes = ["--nodes", "2", "--gpus-per-node", "2"]
    one = length("--gpus-per-node", "4")
    assert one == length("--gpus-per-node", "4", "--network-bandwidth", "0.001")
    assert one < length(*nodes, "--network-bandwidth", "0.1") < length(*nodes, "--network-bandwidth", "0.01")
    assert one < length("--gpus-per-node", "4", "--link-bandwidth", "0.01")
    assert one < length("--gpus-per-node", "4", "--link-latency", "2e3")
    assert length(*nodes, "--network-latency", "0") < length(*nodes) < length(*nodes, "--network-latency", "2e3")
    for value in ("-1", "inf", "nan"):
        assert main(["dry-run", f"--link-latency={value}", "--", *JOB]) == 2
        assert "--link-latency" in capsys.readouterr().err
    assert main(["dry-run", "--network-bandwidth", "0", "--", *JOB]) == 2
    assert "--network-bandwidth" in capsys.readouterr().err
