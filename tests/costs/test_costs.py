"""Tests of costs: shares of chunks, BW, slices, links, and errors in files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron.zero_bubble import Pass, PassCosts, PassMemory, Placement
from megatron.zero_bubble.formats.costs import CostsFile, costs_to_json, read_costs_file

LINEAR = Placement.linear(2)
VEE = Placement.vee(2)


def test_chunks_divide_the_ranks_share() -> None:
    costs = PassCosts.uniform(VEE, 8.0, 6.0, 4.0, 1.0)
    assert costs.forward_ms == (4.0,) * 4
    assert costs.duration(Pass.parse("3W0")) == 2.0
    assert PassMemory.uniform(VEE, 10.0, 6.0) == PassMemory((5.0,) * 4, (3.0,) * 4)


def test_bw_costs_b_plus_w_and_slices_divide_it() -> None:
    costs = PassCosts((1.0, 2.0), (3.0, 5.0), (7.0, 11.0))
    assert costs.duration(Pass.parse("1BW0")) == 16.0
    assert costs.duration(Pass.parse("0F0.1"), num_slices=4) == 0.25


def test_links_override_comm_ms_and_transfers_within_a_rank_are_free() -> None:
    costs = PassCosts((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, comm_ms=2.0, links={(0, 1): 9.0})
    assert [costs.comm(0, 1), costs.comm(1, 0), costs.comm(1, 1)] == [9.0, 2.0, 0.0]


def test_wgrad_memory_defaults_to_the_activation() -> None:
    memory = PassMemory.uniform(LINEAR, 3.0)
    deltas = [memory.delta(Pass.parse(text)) for text in ("0F0", "0B0", "0W0", "0BW0")]
    assert deltas == [3.0, 0.0, -3.0, -3.0]


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, True, "1"])
def test_invalid_figure_is_named(wrong: object) -> None:
    with pytest.raises(ValueError, match="backward_ms of stage 1 must be a finite number, 0 or above"):
        PassCosts((1.0, 1.0), (1.0, wrong), (1.0, 1.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"links\[0, 1\] must be"):
        PassCosts((1.0,), (1.0,), (1.0,), links={(0, 1): wrong})  # type: ignore[dict-item]


@pytest.mark.parametrize("huge", [2e15, 1e308, 10**400])
def test_huge_figure_is_rejected_where_it_is_given(huge: float) -> None:
    with pytest.raises(ValueError, match=r"activation must be at most 1e\+15; got .*; give a smaller one"):
        PassMemory.uniform(VEE, huge)
    with pytest.raises(ValueError, match=r"comm_ms must be at most 1e\+15"):
        PassCosts.uniform(LINEAR, 1, 1, 1, huge)
    content = {"forward_ms": 1, "backward_ms": [1, huge], "wgrad_ms": 1}
    with pytest.raises(ValueError, match=r"backward_ms must be at most 1e\+15"):
        CostsFile.parse(json.dumps(content))
    content |= {"backward_ms": 1, "links": [[0, 1, huge]]}
    with pytest.raises(ValueError, match=r"links must be at most 1e\+15"):
        CostsFile.parse(json.dumps(content))


def test_largest_figures_fit_every_placement() -> None:
    costs = PassCosts.uniform(LINEAR, 1e15, 1e15, 1e15)
    assert costs.fit(VEE).fit(LINEAR) == costs


def test_lists_of_different_lengths_are_rejected() -> None:
    with pytest.raises(ValueError, match="forward_ms has 2, backward_ms has 1, wgrad_ms has 2"):
        PassCosts((1.0, 1.0), (1.0,), (1.0, 1.0))
    with pytest.raises(ValueError, match="activation memory must be above 0"):
        PassMemory((1.0, 0.0), (1.0, 1.0))


@pytest.mark.parametrize("memory", [None, PassMemory((3.0, 4.0), (1.0, 0.0))])
def test_files_round_trip(memory: PassMemory | None, tmp_path: Path) -> None:
    costs = PassCosts((1.5, 2.0), (3.0, 5.0), (0.1, 11.0), 0.25, {(1, 0): 0.5})
    path = tmp_path / "costs.json"
    path.write_text(costs_to_json(costs, memory))
    assert read_costs_file(path).on(LINEAR) == (costs, memory)


def test_single_number_in_a_file_is_a_ranks_whole_share() -> None:
    text = json.dumps({"forward_ms": 8, "backward_ms": 6, "wgrad_ms": [1, 2, 3, 4]})
    costs, memory = CostsFile.parse(text).on(VEE)
    assert costs == PassCosts((4.0,) * 4, (3.0,) * 4, (1.0, 2.0, 3.0, 4.0))
    assert memory is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON; line 1"),
        ("[1]", "must be a JSON object"),
        ('{"forward_ms": 1, "backward_ms": 1}', "wgrad_ms, one number or .* is missing"),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": [1]}', "each of the 2 stages; got 1"),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "comm": 1}', "got 'comm'"),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "comm_ms": "x"}', "comm_ms must be a finite number"),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "links": [[0, 1]]}', "links must be a list"),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "links": 3}', "links must be a list"),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "activation": 1}', "must have the key wgrad,"),
        ('{"forward_ms": NaN, "backward_ms": 1, "wgrad_ms": 1}', "forward_ms must be a finite number"),
    ],
)
def test_invalid_file_is_rejected_with_name_and_reason(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"costs.json: .*{message}"):
        read_costs_file(path).on(LINEAR)


def test_missing_and_binary_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the costs file .*No such file"):
        read_costs_file(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        read_costs_file(tmp_path / "binary")
