"""Check before a run that megatron-core can build the model of the flags, so that a dry run says so, too.

``model.build_config`` reports, in megatron-core's words, what these rules miss.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NoReturn

from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.planning.job import installed

_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
_OF_ENGINE = {"layernorm", "moe_act"}
_ENGINE = "transformer_engine"
_DIVIDING = {
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
}
"""The flags that divide the layers among stages, other than a layout."""


def check_config(args: Any) -> None:
    """Check what megatron-core requires of the model.

    Raises:
        UserError: the first rule that is violated.
    """
    _check_division(args)
    _check_experts(args)
    _check_recompute(args)


def check_biases_of_experts(args: Any, engine: bool) -> None:
    """Reject biases that experts cannot have.

    Args:
        engine: whether the layers are TransformerEngine's.

    Raises:
        UserError: the rule and the remedy.
    """
    if not args.num_moe_experts or not args.add_bias_linear:
        return
    if not engine:
        raise UserError(
            "--num-experts with local layers requires --disable-bias-linear, because megatron-core 0.16 adds the "
            "bias of local experts in place, which autograd rejects; add --disable-bias-linear"
        )
    if (size := args.expert_tensor_parallel_size or args.tensor_model_parallel_size) > 1:
        raise UserError(
            f"experts that are divided by tensor parallelism have no bias in megatron-core; got {size} ranks per "
            "expert; add --disable-bias-linear, or --expert-tensor-parallel-size 1"
        )


def _check_division(args: Any) -> None:
    given = {name: flag for name, flag in _DIVIDING.items() if getattr(args, name) not in (None, False)}
    counts = [flag for name, flag in given.items() if name.startswith("num_layers")]
    counted = [flag for name, flag in given.items() if name.startswith("account")]
    if counts and counted:
        raise UserError(
            "layers are divided either with given numbers on the first or last rank, or with embedding or loss counted "
            f"as a layer; got {counts[0]} and {counted[0]}; leave one of them out"
        )
    if given and args.pipeline_model_parallel_layout is not None:
        raise UserError(
            "--pipeline-model-parallel-layout says what every stage holds; got it with "
            f"{next(iter(given.values()))}; leave one of them out"
        )


def _check_experts(args: Any) -> None:
    if args.num_moe_experts is None and args.moe_ffn_hidden_size is not None:
        raise UserError(
            f"--moe-ffn-hidden-size {args.moe_ffn_hidden_size} needs experts; give --num-experts or drop the flag"
        )
    shared = args.moe_shared_expert_intermediate_size
    if shared is not None and shared < 1:
        raise UserError(f"--moe-shared-expert-intermediate-size must be positive, got {shared}; raise or drop it")
    if args.transformer_impl is not None or args.run.observations.device == "cpu":  # else the device decides
        check_biases_of_experts(args, engine=args.transformer_impl == "transformer_engine")


def _check_recompute(args: Any) -> None:
    _check_modules(args)
    granularity = "selective" if args.recompute_activations else args.recompute_granularity
    if granularity == "full":
        needed = ("recompute_method", "recompute_num_layers")
        if missing := [as_flag(name) for name in needed if getattr(args, name) is None]:
            raise UserError(
                f"--recompute-granularity full needs {' and '.join(missing)}; give for example --recompute-method "
                "uniform --recompute-num-layers 1"
            )
    if granularity == "selective" and args.recompute_num_layers is not None:
        raise UserError(
            "--recompute-num-layers is only for --recompute-granularity full, got "
            f"{args.recompute_num_layers} with selective recomputation; drop it"
        )


def _check_modules(args: Any) -> None:
    modules = args.recompute_modules or ()
    if unknown := sorted(set(modules) - set(_MODULES)):
        raise UserError(f"--recompute-modules are among {', '.join(_MODULES)}; got {', '.join(unknown)}; correct them")
    if args.transformer_impl == "local" and _of_engine(args):
        _refuse_of_engine(args)
    if "moe_act" in modules and not args.moe_grouped_gemm:
        raise UserError("--recompute-modules moe_act needs --moe-grouped-gemm; add it, or remove moe_act from the list")
    if "mlp" in modules and args.add_bias_linear:
        raise UserError(
            "--recompute-modules mlp needs --disable-bias-linear, because in megatron-core 0.16 the recomputed part "
            "returns the bias, and its backward never ends; add --disable-bias-linear"
        )


def missing_packages(args: Any) -> list[str]:
    """Return what a run of our loop needs that cannot be imported here."""
    needs_engine = args.transformer_impl == _ENGINE or (args.transformer_impl is None and _of_engine(args))
    return installed.missing_packages(args) + ([_ENGINE] if needs_engine and find_spec(_ENGINE) is None else [])


def check_packages(args: Any) -> None:
    """Check, in a run, that nothing is missing.

    Raises:
        UserError: something is.
    """
    installed.check_packages(args)
    if not missing_packages(args):
        return
    if args.transformer_impl == _ENGINE:
        raise UserError(
            "--transformer-impl transformer_engine needs the package transformer_engine, which is not installed; "
            "use --transformer-impl local",
            everywhere=False,
        )
    _refuse_of_engine(args)


def _of_engine(args: Any) -> list[str]:
    """The recomputed modules that only TransformerEngine's layers have."""
    return sorted(_OF_ENGINE & set(args.recompute_modules or ()))


def _refuse_of_engine(args: Any) -> NoReturn:
    raise UserError(
        f"--recompute-modules {' '.join(_of_engine(args))} needs TransformerEngine layers in megatron-core 0.16, got "
        "local ones; remove it from the list, or install TransformerEngine"
    )
