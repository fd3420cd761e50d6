"""The flags of ``scripts/pretrain_gpt.py``: Megatron-LM's names for everything supported, and a few additional flags.

Destinations have the field names of megatron-core's ``TransformerConfig``, ``OptimizerConfig`` and
``DistributedDataParallelConfig``, so that :mod:`model` can pass the values by name. This module does not import torch,
so that a wrong flag is reported at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.flags import add_flags
from megatron.zero_bubble.training.config_file import config_tokens


class _Parser(argparse.ArgumentParser):
    """Parser that raises ``UserError`` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the flags")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, whose flags override those of ``--config FILE``.

    Raises:
        UserError: unknown flags, values of the wrong type, an unreadable or invalid configuration file.
    """
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=None)
    config = first.parse_known_args(argv)[0].config
    parser = build_parser()
    tokens: list[str] = []
    if config is not None:
        tokens = config_tokens(config, argv)
        try:
            parser.parse_args(tokens)
        except UserError as error:
            raise UserError(f"configuration file {config}: {error}") from None
    return parser.parse_args([*tokens, *argv])


def parse_megatron(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Parse the flags of a job that runs Megatron-LM's script.

    Values that only Megatron-LM supports, such as its other tokenizers, are accepted unchecked.

    Returns:
        the flags that this program has too, and the names of all other flags.

    Raises:
        UserError: values of the wrong type, or invalid zero-bubble flags.
    """
    parser = build_parser()
    for action in parser._actions:
        if not action.dest.startswith("zero_bubble"):
            action.choices = None
    parser.set_defaults(tokenizer_type=None)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    args, others = parser.parse_known_args(argv)
    each = args.num_layers_per_virtual_pipeline_stage
    if each and args.num_layers:
        stages = args.num_layers // each
        args.virtual_pipeline_model_parallel_size = stages // args.pipeline_model_parallel_size
    unread = [token.partition("=")[0] for token in others if token.startswith("--")]
    return args, tuple(unread if args.config is None else ["--config", *unread])


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all flags; a test freezes their list."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a GPT on megatron-core, with or without a zero-bubble schedule. Flags without a "
        "description have the meaning that they have in Megatron-LM.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with flags, as in configs/; the command line overrides it"
    )
    parser.set_defaults(context_parallel_size=1, use_tp_pp_dp_mapping=False)  # only jobs of Megatron-LM set them
    for add_group in (
        add_flags,
        _add_measurements,
        _add_parallel,
        _add_model,
        _add_moe,
        _add_recompute,
        _add_fusion,
        _add_precision,
        _add_training,
        _add_optimizer,
        _add_learning_rate,
        _add_data,
        _add_checkpoint,
        _add_logging,
    ):
        add_group(parser)
    return parser


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("measurements").add_argument
    add("--metrics-file", metavar="FILE", help="append one JSON object per iteration and evaluation to this file")


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("parallelism").add_argument
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    add("--num-virtual-stages-per-pipeline-rank", type=int, dest="virtual_pipeline_model_parallel_size")
    add("--decoder-first-pipeline-num-layers", type=int, dest="num_layers_in_first_pipeline_stage")
    add("--decoder-last-pipeline-num-layers", type=int, dest="num_layers_in_last_pipeline_stage")
    add("--account-for-embedding-in-pipeline-split", action="store_true", help="count the embedding as a layer")
    add("--account-for-loss-in-pipeline-split", action="store_true", help="count the loss as a layer")
    add("--pipeline-model-parallel-layout", metavar="LAYOUT", help="layers of each stage, for example Et*3|(tt|)*6,tL")
    add("--sequence-parallel", action="store_true")
    add("--expert-model-parallel-size", type=int, default=1)
    add("--expert-tensor-parallel-size", type=int)
    add("--no-overlap-p2p-communication", action="store_false", dest="overlap_p2p_comm")
    add("--overlap-grad-reduce", action="store_true")
    add("--overlap-param-gather", action="store_true")
    add("--no-align-grad-reduce", action="store_false", dest="align_grad_reduce")
    add("--no-align-param-gather", action="store_false", dest="align_param_gather")
    add("--ddp-bucket-size", type=int, dest="bucket_size", help="number of parameters per gradient bucket")
    add(
        "--distributed-backend",
        choices=("nccl", "gloo"),
        help="backend for communication; default: nccl on GPUs, gloo on CPUs",
    )
    add("--distributed-timeout-minutes", type=float, default=10.0)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--num-layers", type=int)
    add("--hidden-size", type=int)
    add("--ffn-hidden-size", type=int, help="default: 4 * hidden size, or 8/3 * hidden size with --swiglu")
    add("--num-attention-heads", type=int)
    add("--kv-channels", type=int)
    add("--group-query-attention", action="store_true")
    add("--num-query-groups", type=int, default=1)
    add("--seq-length", type=int)
    add("--max-position-embeddings", type=int, help="default: --seq-length")
    add("--position-embedding-type", default="learned_absolute", choices=("learned_absolute", "rope", "none"))
    add("--rotary-base", type=int, default=10000)
    add("--rotary-percent", type=float, default=1.0)
    add("--normalization", default="LayerNorm", choices=("LayerNorm", "RMSNorm"))
    add("--norm-epsilon", type=float, default=1e-5, dest="layernorm_epsilon")
    add("--swiglu", action="store_true")
    add("--squared-relu", action="store_true")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    add("--add-qkv-bias", action="store_true")
    add("--qk-layernorm", action="store_true")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--attention-dropout", type=float, default=0.1)
    add("--hidden-dropout", type=float, default=0.1)
    add("--init-method-std", type=float, default=0.02)
    add("--make-vocab-size-divisible-by", type=int, default=128)
    add(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        help="implementation of the layers; default: transformer_engine on GPUs if it is installed, else local",
    )
    add("--attention-backend", default="auto", choices=("auto", "flash", "fused", "unfused", "local"))


def _add_moe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("mixture of experts").add_argument
    add("--num-experts", type=int, dest="num_moe_experts")
    add("--moe-router-topk", type=int, default=2)
    add(
        "--moe-router-load-balancing-type", default="aux_loss", choices=("aux_loss", "seq_aux_loss", "sinkhorn", "none")
    )
    add("--moe-router-dtype", choices=("fp32", "fp64"))
    add("--moe-router-pre-softmax", action="store_true")
    add("--moe-aux-loss-coeff", type=float, default=0.0)
    add("--moe-z-loss-coeff", type=float)
    add("--moe-token-dispatcher-type", default="allgather", choices=("allgather", "alltoall", "flex"))
    add("--moe-ffn-hidden-size", type=int)
    add("--moe-shared-expert-intermediate-size", type=int)
    add("--moe-grouped-gemm", action="store_true")


def _add_recompute(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("recomputation").add_argument
    add("--recompute-activations", action="store_true", help="the same as --recompute-granularity selective")
    add("--recompute-granularity", choices=("full", "selective"))
    add("--recompute-method", choices=("uniform", "block"))
    add("--recompute-num-layers", type=int)
    add("--recompute-modules", nargs="*")


def _add_fusion(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("fused kernels (used if they are installed)").add_argument
    add("--no-bias-gelu-fusion", action="store_false", dest="bias_gelu_fusion")
    add("--no-bias-swiglu-fusion", action="store_false", dest="bias_swiglu_fusion")
    add("--no-bias-dropout-fusion", action="store_false", dest="bias_dropout_fusion")
    add("--no-masked-softmax-fusion", action="store_false", dest="masked_softmax_fusion")
    add("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    add("--no-persist-layer-norm", action="store_false", dest="persist_layer_norm")
    add("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion")
    add("--cross-entropy-loss-fusion", action="store_true")


def _add_precision(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("precision").add_argument
    add("--bf16", action="store_true")
    add("--fp16", action="store_true")
    add("--grad-reduce-in-bf16", action="store_true")
    add(
        "--accumulate-allreduce-grads-in-fp32",
        action="store_true",
        help="always on, unless --grad-reduce-in-bf16 is given",
    )
    add("--attention-softmax-in-fp32", action="store_true")
    add("--loss-scale", type=float)
    add("--initial-loss-scale", type=float, default=2.0**32)
    add("--min-loss-scale", type=float, default=1.0)
    add("--loss-scale-window", type=float, default=1000.0)
    add("--hysteresis", type=int, default=2)


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--micro-batch-size", type=int)
    add("--global-batch-size", type=int, help="default: micro batch size * data-parallel size")
    add("--rampup-batch-size", type=int, nargs=3, metavar=("START", "INCREMENT", "SAMPLES"))
    add("--train-iters", type=int)
    add("--exit-interval", type=int, help="stop after an iteration that is a multiple of this number")
    add("--exit-signal-handler", action="store_true", help="accepted as in Megatron; always on in this program")
    add("--seed", type=int, default=1234)
    add("--calculate-per-token-loss", action="store_true")
    add("--no-check-for-nan-in-loss-and-grad", action="store_false", dest="check_for_nan_in_loss_and_grad")


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", default="adam", choices=("adam", "sgd"))
    add("--use-distributed-optimizer", action="store_true")
    add("--weight-decay", type=float, default=0.01)
    add("--clip-grad", type=float, default=1.0)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.999)
    add("--adam-eps", type=float, default=1e-8)
    add("--sgd-momentum", type=float, default=0.9)


def _add_learning_rate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("learning rate").add_argument
    add("--lr", type=float)
    add("--min-lr", type=float, default=0.0)
    styles = ("constant", "linear", "cosine", "inverse-square-root")
    add("--lr-decay-style", default="linear", choices=styles)
    add("--lr-decay-iters", type=int, help="default: --train-iters")
    add("--lr-warmup-iters", type=int, default=0)
    add("--lr-warmup-fraction", type=float, help="warm-up as a share of --lr-decay-iters; replaces --lr-warmup-iters")
    add("--lr-warmup-init", type=float, default=0.0)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    blend = "one or more PREFIX, or WEIGHT PREFIX pairs; PREFIX.bin and PREFIX.idx are in Megatron's indexed format"
    add("--data-path", nargs="+", help=f"{blend}; --split divides the data")
    add("--split", default="969,30,1", help="shares of --data-path for train,valid,test; default: 969,30,1")
    add("--train-data-path", nargs="+", help=blend)
    add("--valid-data-path", nargs="+", help=blend)
    add("--test-data-path", nargs="+", help=blend)
    add("--mock-data", action="store_true")
    add("--data-cache-path", metavar="DIR", help="directory for cached sample indices; default: next to the data")
    add("--no-mmap-bin-files", action="store_false", dest="mmap_bin_files")
    add("--tokenizer-type", default="ByteLevelTokenizer", choices=("ByteLevelTokenizer", "NullTokenizer"))
    add("--vocab-size", type=int, help="number of token ids in tokenized data, for --tokenizer-type NullTokenizer")
    add(
        "--num-workers",
        type=int,
        default=0,
        help="processes that read samples in advance; 0 reads in the training process",
    )
    add("--reset-position-ids", action="store_true")
    add("--reset-attention-mask", action="store_true")
    add("--eod-mask-loss", action="store_true")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints").add_argument
    add("--save", metavar="DIR")
    add(
        "--save-interval",
        type=int,
        help="number of iterations between checkpoints; the end of training and a stop signal always save",
    )
    add("--load", metavar="DIR")
    add("--exit-on-missing-checkpoint", action="store_true")
    add("--finetune", action="store_true", help="load the weights only and start at iteration 0")
    add("--no-save-optim", action="store_false", dest="save_optim")
    add("--no-save-rng", action="store_false", dest="save_rng")
    add("--no-load-optim", action="store_false", dest="load_optim")
    add("--no-load-rng", action="store_false", dest="load_rng")
    add("--ckpt-format", default="torch_dist", choices=("torch_dist",))
    add(
        "--dist-ckpt-optim-fully-reshardable",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="save the distributed optimizer's state so that any other layout can load it (the default)",
    )


def _add_logging(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("evaluation and logging").add_argument
    add("--eval-iters", type=int, default=100)
    add("--eval-interval", type=int, default=1000)
    add("--log-interval", type=int, default=100)
    add("--log-num-zeros-in-grad", action="store_true")
    add("--tensorboard-dir", metavar="DIR")
