"""Tests of reading recipes that are functions, as in Megatron-Bridge, with a small checkout of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.cli.catalogue import bridge
from megatron.zero_bubble.cli.catalogue.find import recipes_in
from megatron.zero_bubble.cli.catalogue.judge import BROKEN, GAINS, SINGLE, UNREAD, judged
from megatron.zero_bubble.cli.catalogue.recipe import Recipe
from megatron.zero_bubble.core.errors import UserError

RECIPES = """
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer, OptimizerConfig, TrainingConfig

MODEL = "meta-llama/Meta-Llama-3-8B"


def _common(name=MODEL):
    config = ConfigContainer(
        model=AutoBridge.from_hf_pretrained(name).to_megatron_provider(load_weights=False),
        train=TrainingConfig(global_batch_size=16, micro_batch_size=1, train_iters=9),
        optimizer=OptimizerConfig(lr=1e-4, main_grads_dtype=torch.bfloat16),
        mixed_precision="bf16_with_mxfp8_mixed",
    )
    config.model.seq_length = 4096
    config.model.pipeline_model_parallel_size = 8
    config.model.rotary_base = 500000.0
    if config.model.virtual_pipeline_model_parallel_size > 1 or config.model.not_set:
        raise AssertionError("what is not set is nothing")
    return config


def plain_pretrain_16gpu_b200_fp8mx_config():
    return _common()


def layout_pretrain_32gpu_gb200_bf16_config():
    config = _common()
    inside = [["decoder"] * 2] * 14
    config.model.pipeline_model_parallel_layout = [["embedding", "decoder"], *inside, ["decoder"] * 3 + ["loss"]]
    config.model.virtual_pipeline_model_parallel_size = 2
    return config


def uneven_pretrain_16gpu_h100_bf16_config():
    config = _common()
    config.model = GPTModelProvider(num_layers=30, hidden_size=1024, num_attention_heads=8, seq_length=1024)
    config.model.pipeline_model_parallel_size = 4
    return config


def unknown_pretrain_16gpu_h100_bf16_config():
    return _common("someone/else")


def adapters_peft_16gpu_h100_bf16_config():
    config = _common()
    config.peft = LoRA(dim=16, target_modules=["linear_qkv", "linear_proj"])
    config.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    return config


def single_sft_1gpu_h100_bf16_config():
    config = _common("someone/else")
    config.model.pipeline_model_parallel_size = 1
    return config


def failing_pretrain_config():
    return _common() + torch.rank


def needs_argument_config(size):
    return _common()
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    """The recipes of a checkout by the names of their functions."""
    root = tmp_path_factory.mktemp("bridge")
    folder = root / "src/megatron/bridge/recipes/own"
    folder.mkdir(parents=True)
    (folder / "recipes.py").write_text(RECIPES)
    (folder / "aliases.py").write_text("from megatron.bridge.recipes.own.recipes import *\n")
    (folder / "broken.py").write_text("import no_such_module\n")
    return {recipe.name.rpartition(":")[2]: recipe for recipe in recipes_in(str(root))}


def test_recipes_are_read_without_the_packages_that_they_import(read: dict[str, Recipe]) -> None:
    recipe = read["plain_pretrain_16gpu_b200_fp8mx_config"]
    assert (recipe.gpus, recipe.gpus_per_node, recipe.gpu) == (16, 8, "b200")
    flags = " ".join(recipe.flags)
    for words in (
        "--num-layers 32",
        "--rotary-base 500000",
        "--fp8-recipe mxfp8",
        "--bf16",
        "--main-grads-dtype bf16",
        "--swiglu",
        "--group-query-attention",
        "--global-batch-size 16",
    ):
        assert words in flags
    assert "--fp16" not in flags


def test_layouts_are_written_as_strings_and_say_how_many_stages_there_are(read: dict[str, Recipe]) -> None:
    recipe = read["layout_pretrain_32gpu_gb200_bf16_config"]
    at = recipe.flags.index("--pipeline-model-parallel-layout")
    assert recipe.flags[at + 1] == "|".join(["Et", *["tt"] * 14, "tttL"])
    assert "--num-virtual-stages-per-pipeline-rank" not in recipe.flags
    assert (recipe.gpus, recipe.gpus_per_node) == (32, 4)


def test_adapters_are_flags_and_overlap_without_tensor_parallelism_is_none(read: dict[str, Recipe]) -> None:
    flags = " ".join(read["adapters_peft_16gpu_h100_bf16_config"].flags)
    assert "--lora-rank 16 --target-modules linear_qkv linear_proj" in flags
    assert "--tp-comm-overlap" not in flags


def test_what_cannot_be_read_says_why(read: dict[str, Recipe]) -> None:
    assert "the sizes of someone/else" in str(read["unknown_pretrain_16gpu_h100_bf16_config"].problem)
    assert "TypeError" in str(read["failing_pretrain_config"].problem)
    assert "missing 1 required positional argument" in str(read["needs_argument_config"].problem)
    assert "no_such_module" in str(read["src/megatron/bridge/recipes/own/broken.py"].problem)
    assert len(read) == 9  # aliases are no recipes


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("print('hello')\ndef one_config(): return None", "vars() argument must have __dict__ attribute"),
        (
            (
                "class C: pass\ndef one_config():\n c = C(); c.model = C()\n"
                " c.model.pipeline_model_parallel_size = '4'\n return c"
            ),
            "a field has a value of another type",
        ),
    ],
)
def test_recipes_that_fail_are_rows(code: str, problem: str, tmp_path: Path) -> None:
    folder = tmp_path / "src/megatron/bridge/recipes"
    folder.mkdir(parents=True)
    (folder / "own.py").write_text(code)
    (recipe,) = recipes_in(str(tmp_path))
    assert problem in str(recipe.problem)
    assert [file.name for file in folder.iterdir()] == ["own.py"], "nothing is written"


def test_recipes_that_end_the_interpreter_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "src/megatron/bridge/recipes"
    folder.mkdir(parents=True)
    (folder / "own.py").write_text("import os; os._exit(7)")
    with pytest.raises(UserError, match="must not end the interpreter; got exit status 7; leave that file out"):
        list(recipes_in(str(tmp_path)))
    (folder / "own.py").write_text("while True: pass")
    monkeypatch.setattr(bridge, "_SECONDS", 1)
    with pytest.raises(UserError, match="must end within 1 s"):
        list(recipes_in(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("plain_pretrain_16gpu_b200_fp8mx_config", GAINS),
        ("uneven_pretrain_16gpu_h100_bf16_config", BROKEN),
        ("unknown_pretrain_16gpu_h100_bf16_config", UNREAD),
        ("single_sft_1gpu_h100_bf16_config", SINGLE),
    ],
)
def test_recipes_are_judged(read: dict[str, Recipe], name: str, outcome: str) -> None:
    row = judged(read[name], "h100")
    assert row.outcome == outcome
    assert (row.option == "--num-layers") == (outcome == BROKEN)
