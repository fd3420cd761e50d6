"""Tests of costs: shares of chunks, BW, slices, links, and errors in files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron.zero_bubble import Kind, Pass, PassCosts, PassMemory, Placement, Slices
from megatron.zero_bubble.core.costs import SequenceTokens
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json, read_costs_file
from megatron.zero_bubble.core.ir import Value
from megatron.zero_bubble.core.ir.flow import SAVED

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
    assert costs.duration(Pass.parse("0F0.1"), Slices.even(4)) == 0.25


def test_links_override_comm_ms_and_transfers_within_a_rank_are_free() -> None:
    costs = PassCosts((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, comm_ms=2.0, links={(0, 1): 9.0})
    assert [costs.comm(0, 1), costs.comm(1, 0), costs.comm(1, 1)] == [9.0, 2.0, 0.0]


def test_wgrad_memory_defaults_to_the_activation() -> None:
    memory = PassMemory.uniform(LINEAR, 3.0)
    changes = [memory.changes(Pass.parse(text)) for text in ("0F0", "0B0", "0W0", "0BW0")]
    assert changes == [(3.0, 0.0), (0.0, 0.0), (0.0, -3.0), (0.0, -3.0)]


def test_attention_of_a_slice_grows_with_the_tokens_before_it() -> None:
    costs = PassCosts.uniform(Placement.linear(2), 10.0, 20.0, 5.0, attention=0.4)
    slices = Slices((0.5, 0.3, 0.2))
    forwards = [costs.duration(Pass(0, Kind.F, 0, at), slices) for at in range(3)]
    assert forwards == pytest.approx([6 * 0.5 + 4 * 0.25, 6 * 0.3 + 4 * (0.64 - 0.25), 6 * 0.2 + 4 * (1 - 0.64)])
    # In B, attention takes twice as long as in F: 8 of 20 ms.
    assert costs.backward_attention == pytest.approx((0.4, 0.4))
    assert costs.duration(Pass(0, Kind.BW, 0, 2), slices) == pytest.approx(12 * 0.2 + 8 * 0.36 + 5 * 0.2)
    for kind, whole in ((Kind.F, 10), (Kind.B, 20), (Kind.W, 5), (Kind.BW, 25)):
        assert sum(costs.duration(Pass(1, kind, 0, at), slices) for at in range(3)) == pytest.approx(whole)


def test_attention_shares_follow_the_stages() -> None:
    costs = PassCosts((4.0, 4.0, 1.0, 3.0), (1.0,) * 4, (1.0,) * 4).with_attention((0.5, 0.25, 1.0, 0.0), (0.1,) * 4)
    merged = costs.fit(Placement.linear(2))
    assert merged.forward_attention == pytest.approx((0.375, 0.25))
    assert merged.fit(Placement.vee(2)).backward_attention == pytest.approx((0.1,) * 4)
    with pytest.raises(UserError, match="is a share, so it must be between 0 and 1; got 1.5"):
        costs.with_attention((1.5,) * 4)


@pytest.mark.parametrize("recomputed", [False, True])
def test_buffers_of_keys_and_values_live_as_long_as_a_slice_of_the_sequence(recomputed: bool) -> None:
    memory, slices = PassMemory((10.0,), (6.0,), (4.0,), recomputed), Slices((0.5, 0.3, 0.2))
    steps = [Pass.parse(text) for text in "0F0 0F0.1 0F0.2 0B0.2 0B0.1 0B0 0W0.2 0W0.1 0W0".split()]
    now, at = 0.0, []
    for p in steps:
        start, end = memory.changes(p, slices)
        at.append((now + start, now := now + start + end))
    extra = 4.0 if recomputed else 0.0
    # The buffers are whole from the first forward on, and the last backward needs as much for their gradients.
    assert at[0][0] == pytest.approx(5 + (4 if recomputed else 2))
    assert at[2][0] == pytest.approx(10 + extra)
    assert at[3][0] == pytest.approx(14 + extra)
    assert at[5][1] == pytest.approx(6)
    assert at[-1][1] == pytest.approx(0)
    assert memory.changes(steps[0]) == (10.0, 0.0), "a whole sequence has no history"


def test_what_a_slice_saves_is_without_the_buffers_that_slices_share() -> None:
    """Offloading frees as much: the buffers stay."""
    saved, slices = Value(Pass(0, Kind.F, 0, 1), SAVED), Slices((0.5, 0.3, 0.2))
    assert PassMemory((10.0,), (6.0,), (4.0,)).size(saved, slices) == pytest.approx(0.3 * 6)
    assert PassMemory((10.0,), (6.0,), (4.0,), recomputed=True).size(saved, slices) == pytest.approx(0.3 * 10)
    assert PassMemory((10.0,), (6.0,), (4.0,)).size(Value(Pass(0, Kind.F, 0), SAVED)) == 10.0


def test_states_stay_from_the_forward_to_the_backward_of_their_slice() -> None:
    """The last slice leaves none. In the last backward but one, two gradients would be one too many."""
    memory, slices = PassMemory((12.0,), (6.0,), states=(1.0,)), Slices.even(3)
    now, at = 0.0, []
    for p in (Pass.parse(text) for text in "0F0 0F0.1 0F0.2 0B0.2 0W0.2 0B0.1 0W0.1 0BW0".split()):
        start, end = memory.changes(p, slices)
        at.append((now + start, now := now + start + end))
    assert [peak for peak, _ in at[:3]] == [5.0, 10.0, 14.0]
    assert [after for _, after in at[3:]] == [13.0, 11.0, 8.0, 6.0, 0.0]
    assert memory.changes(Pass.parse("0F0")) == (12.0, 0.0), "a whole sequence hands on nothing"


def test_gradients_of_keys_and_values_double_above_eight_slices() -> None:
    """Those of more slices are summed in float32."""
    memory = PassMemory((10.0,), (6.0,), (4.0,))
    assert [memory.changes(Pass(0, Kind.B, 0, n - 1), Slices.even(n))[0] for n in (2, 8, 9, 16)] == [4, 4, 8, 8]


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


def test_shares_of_attention_and_the_history_round_trip(tmp_path: Path) -> None:
    costs = PassCosts((1.5, 2.0), (3.0, 5.0), (0.1, 11.0)).with_attention((0.25, 0.0), (0.5, 1.0))
    memory = PassMemory((3.0, 4.0), (1.0, 0.0), (0.5, 0.25))
    path = tmp_path / "costs.json"
    path.write_text(costs_to_json(costs, memory))
    assert read_costs_file(path).on(LINEAR) == (costs, memory)
    assert "attention" not in costs_to_json(PassCosts((1.0,), (1.0,), (1.0,)), PassMemory((1.0,), (1.0,)))


@pytest.mark.parametrize("tokens", [None, SequenceTokens(64), SequenceTokens(64, 16)])
def test_tokens_of_sequences_and_slices_round_trip(tokens: SequenceTokens | None) -> None:
    text = costs_to_json(PassCosts((1.0,), (1.0,), (1.0,)), tokens=tokens)
    assert CostsFile.parse(text).tokens == tokens
    assert ("least_slice_tokens" in text) == (tokens == SequenceTokens(64, 16))


def test_slices_take_what_does_not_depend_on_tokens() -> None:
    """A fifth of a pass, and a quarter of the rest; also in files with lists, with layers, and for other stages."""
    costs = PassCosts((10.0,) * 2, (20.0,) * 2, (5.0,) * 2, slice_overhead=0.2)
    read = CostsFile.parse(costs_to_json(costs, layers_per_stage=(4, 4)))
    derived = read.layer_costs()
    assert derived is not None
    for each in (costs, read.on(LINEAR)[0], derived.on((4, 4))[0], costs.fit(VEE).fit(LINEAR)):
        assert each.slice_overhead == 0.2
        of_kinds = [each.duration(Pass(0, kind, 0, 1), Slices.even(4)) for kind in (Kind.F, Kind.B, Kind.W, Kind.BW)]
        assert of_kinds == pytest.approx([4.0, 8.0, 2.0, 10.0])
        assert each.duration(Pass(0, Kind.BW, 0)) == 25.0, "a whole sequence takes it once"
    with pytest.raises(UserError, match="slice_overhead is a share"):
        CostsFile.parse(json.dumps({"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "slice_overhead": 2}))


def test_shares_of_attention_are_kept_or_averaged_by_time() -> None:
    times = {"forward_ms": [1, 3, 2, 2], "backward_ms": 8, "wgrad_ms": 4}
    one = CostsFile.parse(json.dumps(times | {"attention": 0.25})).on(VEE)[0]
    assert one.forward_attention == (0.25,) * 4
    assert one.backward_attention == (0.125, 0.375, 0.25, 0.25), "twice the time of attention in F"
    listed = CostsFile.parse(json.dumps(times | {"attention": [0.2, 0.6, 0, 1], "backward_attention": [0.5, 0.1]}))
    assert listed.on(VEE)[0].backward_attention == (0.5, 0.5, 0.1, 0.1)
    assert listed.on(LINEAR)[0].forward_attention == pytest.approx(((0.2 + 1.8) / 4, 0.5))
    assert listed.on(LINEAR)[0] == listed.on(VEE)[0].fit(LINEAR)


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
        (
            '{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "activation": 1}',
            "activation needs wgrad as well, one number or a list",
        ),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "attention": 1.5}', "attention is a share, so it must be"),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "attention": [1, 1, 1]}', "each of the 2 stages; got 3"),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "history": 1}', "history needs activation as well, one"),
        (
            '{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "sequence_length": 0}',
            "sequence_length must be a number of",
        ),
        ('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "sequence_length": 1.5}', "tokens, 1 or more; got 1.5"),
        (
            '{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "least_slice_tokens": 4}',
            "needs sequence_length as well, a number of",
        ),
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
