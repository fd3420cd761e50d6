"""Options and sequences that cannot be cut into slices are refused at start-up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Pass, Slices
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.cuts import check_cuts
from megatron.zero_bubble.planning.job.options import check_options
from megatron.zero_bubble.planning.job.runnable import check_runnable
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Cuts, Setup

JOB = SimpleNamespace(seq_length=48, tensor_model_parallel_size=2, sequence_parallel=True)


def test_fused_rotary_embeddings_of_latent_attention_are_refused() -> None:
    fused = SimpleNamespace(apply_rope_fusion=True)
    sliced = RunOptions(Setup(cuts=Cuts(4, "even")))
    check_options(fused, sliced)
    fused.multi_latent_attention = True
    check_options(fused, RunOptions())
    with pytest.raises(UserError, match="begin at the first token; got True; give --no-rope-fusion"):
        check_options(fused, sliced)


@pytest.mark.parametrize("name", ["hybrid_layer_pattern", "hybrid_override_pattern"])
def test_layers_that_cannot_be_cut_are_refused_by_their_letter(name: str) -> None:
    sliced = RunOptions(Setup(cuts=Cuts(4, "even")))
    check_options(SimpleNamespace(**{name: "M*G-|+E*-/*-"}), sliced)
    check_options(SimpleNamespace(**{name: "M*D-"}), RunOptions())
    with pytest.raises(UserError, match=f"need {name} to be without D, because its sparse .* got 'M.D-'; train with"):
        check_options(SimpleNamespace(**{name: "M*D-"}), sliced)


def test_attention_that_hands_on_no_state_is_refused() -> None:
    sliced = RunOptions(Setup(cuts=Cuts(4, "even")))
    for variant in (None, "gated_delta_net", "gdn"):
        check_options(SimpleNamespace(experimental_attention_variant=variant), sliced)
    with pytest.raises(UserError, match="to be gated_delta_net or gdn, .* got 'dsa'; drop --experimental-attention"):
        check_options(SimpleNamespace(experimental_attention_variant="dsa"), sliced)


EVEN = Cuts(among=(Slices.even(24),))


def ending(*tokens: int) -> tuple[Cuts, Cuts]:
    """What runs of slices with these ends, and what the user gave."""
    return Cuts(among=(Slices.of_tokens(tokens),)), Cuts(places=tokens)


def test_sequences_must_have_the_given_ends() -> None:
    check_cuts(None, None, JOB)
    check_cuts(EVEN, Cuts(24, "even"), JOB)
    check_cuts(*ending(20, 34, 48), JOB)
    with pytest.raises(UserError, match="--seq-length 48; got --zero-bubble-slices 20,40; give 48 as the last"):
        check_cuts(*ending(20, 40), JOB)
    with pytest.raises(
        UserError, match="multiple of the tensor-parallel size 2; got .*-slices 21,48; give for example 2"
    ):
        check_cuts(*ending(21, 48), JOB)
    with pytest.raises(UserError, match="at most 24 slices of 2 tokens each; got 25 slices; use fewer"):
        check_cuts(Cuts(among=(Slices.even(25),)), None, JOB)


def test_forwards_of_slices_must_have_the_order_of_the_data() -> None:
    schedule = build("seq-zb-h1", num_ranks=2, num_microbatches=3, num_slices=2)
    check_runnable(schedule, 2, 3)

    def swapped(one: str, other: str) -> object:
        change = {Pass.parse(one): Pass.parse(other), Pass.parse(other): Pass.parse(one)}
        return replace(schedule, order=tuple(tuple(change.get(p, p) for p in row) for row in schedule.order))

    with pytest.raises(
        UserError, match="its F passes .* by microbatch and slice; .* runs those of stage 1 in the order 0, 1, 0.1"
    ):
        check_runnable(swapped("1F0.1", "1F1"), 2, 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="stage 1 of .* runs W of microbatch 0 too early; move it behind"):
        check_runnable(swapped("1W0", "1W0.1"), 2, 3)  # type: ignore[arg-type]
