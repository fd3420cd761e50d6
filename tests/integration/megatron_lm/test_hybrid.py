"""Parity of Megatron-LM's scripts for hybrid models with their stock runs: printed figures and weights, bit for bit.

With a divided vocabulary, whose sums are rounded in another order, figures are near, as those of a GPT.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.zero_bubble.core.formats.costs import read_costs_file
from tests.helpers.hybrid_jobs import pretrain_hybrid, stock_hybrid
from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, checkouts
from tests.integration.megatron_lm.test_models import of_the_dev_branch
from tests.integration.megatron_lm.test_parity import near, same
from tests.integration.megatron_lm.test_shards import UNITS

CHECKOUTS = [checkout for checkout in checkouts() if int(checkout.minor.partition(".")[2]) >= 16]
DIVIDES = [checkout for checkout in CHECKOUTS if (checkout.path / "pretrain_hybrid.py").is_file()]
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM with core_r0.16 or newer"),
    pytest.mark.timeout(1200),
]
PIPELINE = "--pipeline-model-parallel-size 2 --train-iters 6 --seq-length 32 --max-position-embeddings 32"
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall --moe-router-topk 2"
ROWS = {
    "transformer": ("*-*-|*-*-", ""),
    "mamba": ("M*M-|M-M*", "--untie-embeddings-and-output-weights"),
    "experts": ("M*ME|M-ME", EXPERTS),
}
"""By name: the layers of two stages, and more flags."""

DIVIDED = {
    "mamba": ("M*M-|M-M*", f"{PIPELINE} --untie-embeddings-and-output-weights", 2),
    "tied": ("M*M-|M-M*", PIPELINE, 2),
    "experts": ("M*ME|M*ME", f"{PIPELINE} {EXPERTS} --group-query-attention --num-query-groups 2", 2),
    "mamba-4": ("M*|M-|M*|M-", f"{PIPELINE.replace('size 2', 'size 4')} --untie-embeddings-and-output-weights", 4),
    "experts-4": ("M*|ME|M*|ME", f"{PIPELINE.replace('size 2', 'size 4')} {EXPERTS}", 4),
}
"""With a divided vocabulary, by name: the layers of the stages, more flags, and the number of ranks."""

FEATURES = {
    "bf16": ("", "--bf16 --use-distributed-optimizer", 2, 1),
    "tp2-sp": ("", "--tensor-model-parallel-size 2 --sequence-parallel", 4, 1),
    "dp2": ("", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 4, 2),
    "recompute": ("", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2, 1),
    "post-validation": ("--zero-bubble-post-validation", "", 2, 1),
    "offload": ("--zero-bubble-offload all", "", 2, 1),
}
"""By name: our flags, Megatron's, the number of ranks, and the samples of a microbatch over all of them."""


def _row(checkout: Checkout, name: str) -> tuple[str, str]:
    """The pattern and the flags of a row; before ``--hybrid-layer-pattern``, Megatron itself divides the layers."""
    pattern, more = ROWS[name]
    return pattern if checkout in DIVIDES else pattern.replace("|", ""), f"{PIPELINE} {more}"


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_one_stage_per_rank_equals_stock(checkout: Checkout, name: str) -> None:
    job = checkout, 2, *_row(checkout, name)
    same(pretrain_hybrid(*job, "zb-h1"), stock_hybrid(*job))


LOOPED = {"transformer": "*-|*-|*-|*-", "mamba": "M*|M-|M-|M*", "experts": "M*|ME|M-|ME"}


SLICES = ("--zero-bubble-num-slices", "4")
_DELTA = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--untie-embeddings-and-output-weights --swiglu"
)
CUT = {
    **ROWS,
    "delta": ("G*G-|G-G*", _DELTA),
    "predictions": ("M*M-|M-M*/*-", ROWS["mamba"][1]),
    "bf16": ("M*M-|M-M*", "--bf16"),
}


@pytest.mark.parametrize(
    ("checkout", "name"),
    [(checkout, name) for checkout in CHECKOUTS for name in (CUT if checkout in DIVIDES else ROWS)],
    ids=str,
)
def test_slices_are_near_stock(checkout: Checkout, name: str) -> None:
    """Every second layer with another kind of state: keys and values, that of a scan, or of a delta rule."""
    pattern, more = CUT[name]
    job = checkout, 2, pattern if checkout in DIVIDES else pattern.replace("|", ""), f"{PIPELINE} {more}"
    own = pretrain_hybrid(*job, "seq-zb-h1", SLICES)
    near(own, stock_hybrid(*job), 2e-2 if name == "bf16" else 1e-5)
    assert own.weights != stock_hybrid(*job).weights, "slices add in another order, so equal weights mean none ran"


@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
def test_slices_of_four_stages_are_near_stock(checkout: Checkout) -> None:
    flags = f"{PIPELINE} {ROWS['experts'][1]}".replace("parallel-size 2", "parallel-size 4")
    job = checkout, 4, "M*|ME|M-|ME", flags
    near(pretrain_hybrid(*job, "seq-zb-h1", ("--zero-bubble-num-slices", "2")), stock_hybrid(*job), 1e-5)


@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
def test_multi_token_prediction_equals_stock(checkout: Checkout) -> None:
    job = checkout, 2, "M*M-|M-M*/*-", _row(checkout, "mamba")[1]
    same(pretrain_hybrid(*job, "zb-h1"), stock_hybrid(*job))


@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
def test_layers_that_do_not_divide_evenly_equal_stock_with_the_same_pattern(checkout: Checkout) -> None:
    """The output layer of this model takes longer than all layers; stock has to be given the pattern."""
    flags = _row(checkout, "mamba")[1]
    own = pretrain_hybrid(checkout, 2, "M*M-M-M*M", flags, "zb-h1")
    assert own.of("zero-bubble: layers by stage: ") == ["zero-bubble: layers by stage: M*M-M-M*M|"]
    same(own, stock_hybrid(checkout, 2, "M*M-M-M*M|", flags))


@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_interleaved_stages_equal_stock(checkout: Checkout, name: str) -> None:
    job = checkout, 2, LOOPED[name], _row(checkout, name)[1]
    same(pretrain_hybrid(*job, "interleaved-1f1b"), stock_hybrid(*job))


@pytest.mark.full
@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
def test_sharded_units_equal_stock(checkout: Checkout) -> None:
    """One unit of all microbatches, so that gradients are reduced once, as in stock."""
    flags = f"{_row(checkout, 'mamba')[1]} --use-distributed-optimizer --global-batch-size 12"
    job = checkout, 4, LOOPED["mamba"], flags
    same(pretrain_hybrid(*job, "zero-pp", UNITS), stock_hybrid(*job))


# With another placement a seed yields other initial weights, and the order of the sum in the gradient norm differs.
LONGER = "--train-iters 8"
MOVING = "--clip-grad 1000 --ckpt-format torch_dist"


def _until(iteration: int, folder: Path) -> tuple[str, ...]:
    return ("--save", str(folder), "--save-interval", str(iteration), "--exit-interval", str(iteration))


@pytest.mark.full
@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
@pytest.mark.parametrize("features", FEATURES)
def test_features_equal_stock(checkout: Checkout, features: str) -> None:
    own, flags, ranks, samples = FEATURES[features]
    job = checkout, ranks, ROWS["mamba"][0], f"{_row(checkout, 'mamba')[1]} {flags} --global-batch-size {6 * samples}"
    same(pretrain_hybrid(*job, "zb-h1", tuple(own.split())), stock_hybrid(*job))


@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
@pytest.mark.parametrize(("name", "predicted"), [*((name, "") for name in ROWS), ("mamba", "/*-")])
def test_a_v_equals_stock(checkout: Checkout, name: str, predicted: str, tmp_path: Path) -> None:
    """The V continues from a stock checkpoint of two stages, as stock does."""
    pattern, flags = _row(checkout, name)
    patterns = f"{pattern}{predicted}", f"{pattern.replace('|', '')}{predicted}"
    job, on_a_v = ((checkout, 2, each, f"{flags} {MOVING}") for each in patterns)
    begun = tmp_path / "begun"
    assert "exiting program at iteration 2" in stock_hybrid(*job, _until(2, begun)).text
    load = ("--load", str(begun))
    same(pretrain_hybrid(*on_a_v, "zb-v", load), stock_hybrid(*job, load))


@pytest.mark.full
@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
def test_recorded_costs_tell_the_letters_apart(checkout: Checkout, tmp_path: Path) -> None:
    pattern = "*-|M|-|M*"
    job = checkout, 2, pattern, f"{PIPELINE} {ROWS['mamba'][1]}"
    recorded = pretrain_hybrid(*job, "zb-interleaved", ("--zero-bubble-record-costs", str(tmp_path / "costs.json")))
    assert recorded.exit_codes == (0, 0), recorded.text[-4000:]
    file = read_costs_file(tmp_path / "costs.json")
    layers = file.layer_costs()
    assert layers is not None and "|".join(file.letters) == pattern
    scan, mlp = (layer.activation for layer in layers.layers[2:4])
    assert scan > 5 * mlp, "a Mamba layer keeps more than an MLP"


@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
def test_checkpoint_of_a_v_continues_in_stock(checkout: Checkout, tmp_path: Path) -> None:
    """Stock, with two stages, continues from the checkpoint of a V with four as from its own."""
    pattern, flags = _row(checkout, "mamba")
    stock_job, v_job = ((checkout, 2, each, f"{flags} {MOVING}") for each in (pattern, LOOPED["mamba"]))
    begun = tmp_path / "begun"
    stock_hybrid(*stock_job, _until(2, begun))
    ends = []
    for job, schedule in ((stock_job, None), (v_job, "zb-v")):
        folder = tmp_path / str(schedule)
        saved = pretrain_hybrid(*job, schedule, ("--load", str(begun), *_until(4, folder)))
        assert "exiting program at iteration 4" in saved.text, saved.text[-4000:]
        end = pretrain_hybrid(*stock_job, None, ("--load", str(folder)))
        assert end.exit_codes == (0, 0) and len(end.weights) > 10, end.text[-4000:]
        ends.append([*saved.figures, *end.figures, *end.weights])
    assert ends[0] == ends[1]


STREAMS = {
    "mamba": ("M*M-|M-M*", "--enable-hyper-connections", 2, "zb-h1"),
    "experts": ("M*|ME|M-|ME", f"--enable-hyper-connections --num-residual-streams 2 {EXPERTS}", 2, "interleaved-1f1b"),
    "mamba-4": ("M*|M-|M*|M-", "--enable-hyper-connections --num-residual-streams 2 --bf16", 4, "zb-h1"),
}
"""With several residual streams, by name: the layers of the stages, more flags, the number of ranks, and a schedule."""


def _of_ranks(ranks: int, flags: str) -> str:
    pipeline = PIPELINE.replace("size 2", f"size {ranks}")
    return f"{pipeline} --untie-embeddings-and-output-weights {flags}"


@pytest.mark.parametrize("checkout", [each for each in of_the_dev_branch() if each in DIVIDES], ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_residual_streams_equal_stock(checkout: Checkout, name: str) -> None:
    pattern, flags, ranks, schedule = STREAMS[name]
    job = checkout, ranks, pattern, _of_ranks(ranks, flags)
    same(pretrain_hybrid(*job, schedule), stock_hybrid(*job))


@pytest.mark.parametrize("checkout", [each for each in of_the_dev_branch() if each in DIVIDES], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_residual_streams_on_a_v_equal_stock(checkout: Checkout, ranks: int, tmp_path: Path) -> None:
    """From a stock checkpoint; with a divided vocabulary, figures are near."""
    flags = f"{_of_ranks(ranks, '--enable-hyper-connections')} {MOVING} {LONGER}"
    job = checkout, ranks, "M*M-|M-M*" if ranks == 2 else "M*|M-|M-|M*", flags
    on_a_v = checkout, ranks, job[2].replace("|", ""), flags
    begun = tmp_path / "begun"
    stock_hybrid(*job, _until(2, begun))
    load = ("--load", str(begun))
    same(pretrain_hybrid(*on_a_v, "zb-v", load), stock_hybrid(*job, load))
    near(
        pretrain_hybrid(*on_a_v, "zb-v", ("--zero-bubble-vocabulary-parallel", "2", *load)),
        stock_hybrid(*job, load),
        1e-5,
    )


def _divided(checkout: Checkout, name: str) -> tuple[Checkout, int, str, str]:
    pattern, flags, ranks = DIVIDED[name]
    return checkout, ranks, pattern if checkout in DIVIDES else pattern.replace("|", ""), flags


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("algorithm", ["1", "2"])
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_vocabulary_is_near_stock(checkout: Checkout, name: str, algorithm: str) -> None:
    job = _divided(checkout, name)
    own = pretrain_hybrid(*job, "zb-h1", ("--zero-bubble-vocabulary-parallel", algorithm))
    near(own, stock_hybrid(*job), 1e-5)
    assert own.weights != stock_hybrid(*job).weights, "shards add in another order, so equal weights mean that none ran"


@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_vocabulary_on_a_v_is_near_stock(checkout: Checkout, name: str, tmp_path: Path) -> None:
    """The V continues from a stock checkpoint, whose vocabulary is whole, and stock from that of the V."""
    _, ranks, pattern, flags = _divided(checkout, name)
    job = checkout, ranks, pattern, f"{flags} {MOVING} {LONGER}"
    on_a_v = checkout, ranks, pattern.replace("|", ""), job[3]
    begun, middle, divided = tmp_path / "begun", tmp_path / "middle", ("--zero-bubble-vocabulary-parallel", "2")
    stock_hybrid(*job, _until(2, begun))
    load = ("--load", str(begun))
    expected = stock_hybrid(*job, load)
    near(pretrain_hybrid(*on_a_v, "zb-v", (*divided, *load)), expected, 1e-5)
    saved = pretrain_hybrid(*on_a_v, "zb-v", (*divided, *load, *_until(4, middle)))
    assert "exiting program at iteration 4" in saved.text, saved.text[-4000:]
    end = pretrain_hybrid(*job, None, ("--load", str(middle)))
    assert end.exit_codes == (0,) * ranks, end.text[-4000:]
    losses, wanted = _losses(end), _losses(expected)[-4:]
    assert len(losses) == 4
    del losses[1], wanted[1]  # which Megatron prints as the mean of the first two iterations of a run, since 0.19
    assert losses == pytest.approx(wanted, rel=1e-5)


def _losses(log: Log) -> list[float]:
    return [float(found) for found in re.findall(r"iteration +\d+/.*lm loss: (\S+)", "\n".join(log.figures))]
