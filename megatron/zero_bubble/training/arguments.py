"""The flags of ``scripts/pretrain_gpt.py``: Megatron-LM's names for everything supported, and a few additional flags.

Destinations have the field names of megatron-core's ``TransformerConfig``, ``OptimizerConfig`` and
``DistributedDataParallelConfig``, so that :mod:`model` can pass the values by name. This module does not import torch,
so that a wrong flag is reported at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

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
        description="Pretrain a GPT on megatron-core, with or without a zero-bubble schedule. All flags but "
        "--zero-bubble-*, --config and --metrics-file have Megatron-LM's names and meanings.",
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


class _Group:
    """A group of flags in ``--help``; the help of a flag with a default ends with it."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def add(self, flag: str, text: str, default: Any = None, **options: Any) -> None:
        ending = "" if default is None or default is True else " (default: %(default)s)"
        self._group.add_argument(flag, help=text + ending, default=default, **options)

    def on(self, flag: str, text: str) -> None:
        self._group.add_argument(flag, action="store_true", help=text)

    def off(self, flag: str, dest: str, text: str) -> None:
        self._group.add_argument(flag, action="store_false", dest=dest, help=text)

    def whole(self, flag: str, text: str, default: int | None = None, metavar: str = "N", **options: Any) -> None:
        self.add(flag, text, default, type=int, metavar=metavar, **options)

    def real(self, flag: str, text: str, default: float | None = None, metavar: str = "X", **options: Any) -> None:
        self.add(flag, text, default, type=float, metavar=metavar, **options)


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "measurements")
    group.add("--metrics-file", "append one JSON object per iteration and evaluation to this file", metavar="FILE")


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "parallelism")
    group.whole(
        "--tensor-model-parallel-size", "number of ranks that divide every layer's matrices among them", default=1
    )
    group.whole("--pipeline-model-parallel-size", "number of ranks that divide the layers among them", default=1)
    group.whole(
        "--num-virtual-stages-per-pipeline-rank",
        "stages per pipeline rank of an interleaved schedule (default: 1, or what the zero-bubble schedule has)",
        dest="virtual_pipeline_model_parallel_size",
    )
    group.whole(
        "--decoder-first-pipeline-num-layers",
        "layers on the first pipeline rank (default: as many as on the others)",
        dest="num_layers_in_first_pipeline_stage",
    )
    group.whole(
        "--decoder-last-pipeline-num-layers",
        "layers on the last pipeline rank (default: as many as on the others)",
        dest="num_layers_in_last_pipeline_stage",
    )
    group.on(
        "--account-for-embedding-in-pipeline-split",
        "count the embedding as a layer where layers are divided evenly among stages",
    )
    group.on(
        "--account-for-loss-in-pipeline-split",
        "count the output layer with the loss as a layer where layers are divided evenly among stages",
    )
    group.add(
        "--pipeline-model-parallel-layout",
        "what each stage holds, in the order of the model, for example Et*3|(tt|)*6,tL: E embedding, t transformer "
        "layer, m multi-token prediction (only in Megatron-LM jobs), L output layer with the loss; | ends a stage, *N "
        "repeats a letter or group, commas are ignored (default: layers are divided evenly)",
        metavar="LAYOUT",
    )
    group.on(
        "--sequence-parallel",
        "divide the activations outside the matrix products among the tensor-parallel ranks, by sequence position",
    )
    group.whole(
        "--expert-model-parallel-size", "number of ranks that divide the experts of a layer among them", default=1
    )
    group.whole(
        "--expert-tensor-parallel-size", "tensor-parallel size within an expert (default: --tensor-model-parallel-size)"
    )
    group.off(
        "--no-overlap-p2p-communication",
        "overlap_p2p_comm",
        "let Megatron's interleaved schedule wait for each message between stages; zero-bubble schedules with several "
        "stages per rank do not allow it",
    )
    group.on(
        "--overlap-grad-reduce",
        "reduce gradients over data-parallel ranks while backward passes run, instead of after them",
    )
    group.on(
        "--overlap-param-gather",
        "gather the updated parameters of --use-distributed-optimizer while forward passes run; needs "
        "--overlap-grad-reduce",
    )
    group.off(
        "--no-align-grad-reduce",
        "align_grad_reduce",
        "with --overlap-grad-reduce: let every pipeline rank start its reductions as soon as its gradients are "
        "complete, instead of together with the other pipeline ranks",
    )
    group.off(
        "--no-align-param-gather",
        "align_param_gather",
        "with --overlap-param-gather and several stages per rank: let every pipeline rank gather parameters when it "
        "needs them, instead of together with the other pipeline ranks",
    )
    group.whole(
        "--ddp-bucket-size",
        "number of parameters whose gradients --overlap-grad-reduce reduces together (default: 40 million, or 1 "
        "million per data-parallel rank if that is more)",
        dest="bucket_size",
    )
    group.add(
        "--distributed-backend",
        "backend for communication (default: nccl on GPUs, gloo on CPUs)",
        choices=("nccl", "gloo"),
    )
    group.real(
        "--distributed-timeout-minutes",
        "time after which a message or collective that does not arrive ends the run",
        default=10.0,
        metavar="MINUTES",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "model")
    group.whole("--num-layers", "number of transformer layers (required)")
    group.whole("--hidden-size", "size of the hidden state of a token (required)")
    group.whole(
        "--ffn-hidden-size",
        "size of the hidden layer of each MLP (default: 4 * --hidden-size; with --swiglu, 8/3 * --hidden-size, "
        "rounded down to a multiple of 64)",
    )
    group.whole("--num-attention-heads", "number of attention heads per layer (required)")
    group.whole("--kv-channels", "size of an attention head (default: --hidden-size / --num-attention-heads)")
    group.on(
        "--group-query-attention", "let several attention heads share their keys and values, see --num-query-groups"
    )
    group.whole(
        "--num-query-groups",
        "number of groups of attention heads that share keys and values, with --group-query-attention",
        default=1,
    )
    group.whole("--seq-length", "number of tokens per sequence (required)")
    group.whole(
        "--max-position-embeddings",
        "number of positions that learned position embeddings cover (default: --seq-length)",
    )
    group.add(
        "--position-embedding-type",
        "how a token's position enters the model: learned embeddings, rotary embeddings (rope), or not at all",
        default="learned_absolute",
        choices=("learned_absolute", "rope", "none"),
    )
    group.whole("--rotary-base", "base of the rotation periods with --position-embedding-type rope", default=10000)
    group.real(
        "--rotary-percent", "share of each attention head that is rotated, from 0 to 1", default=1.0, metavar="SHARE"
    )
    group.add(
        "--normalization",
        "normalization before attention, before the MLP and at the end of the model",
        default="LayerNorm",
        choices=("LayerNorm", "RMSNorm"),
    )
    group.real(
        "--norm-epsilon", "number added to the variance in the normalization", default=1e-05, dest="layernorm_epsilon"
    )
    group.on("--swiglu", "use gated SiLU units in the MLPs instead of GELU")
    group.on("--squared-relu", "use squared ReLU in the MLPs instead of GELU; --swiglu overrides it")
    group.off("--disable-bias-linear", "add_bias_linear", "leave out the biases of the layers' matrix products")
    group.on("--add-qkv-bias", "keep the bias of queries, keys and values with --disable-bias-linear")
    group.on("--qk-layernorm", "normalize the queries and keys of each attention head")
    group.on(
        "--untie-embeddings-and-output-weights",
        "give the output layer weights of its own instead of those of the embedding",
    )
    group.real("--attention-dropout", "probability with which an attention weight is dropped", default=0.1, metavar="P")
    group.real(
        "--hidden-dropout", "probability with which an element of a hidden state is dropped", default=0.1, metavar="P"
    )
    group.real("--init-method-std", "standard deviation of the initial weights", default=0.02)
    group.whole(
        "--make-vocab-size-divisible-by",
        "pad the vocabulary to a multiple of this number times the tensor-parallel size",
        default=128,
    )
    group.add(
        "--transformer-impl",
        "implementation of the layers (default: transformer_engine on GPUs if it is installed, else local)",
        choices=("local", "transformer_engine"),
    )
    group.add(
        "--attention-backend",
        "attention kernel of TransformerEngine's layers",
        default="auto",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )


def _add_moe(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "mixture of experts")
    group.whole(
        "--num-experts",
        "number of experts in every layer, instead of one MLP (default: no experts)",
        dest="num_moe_experts",
    )
    group.whole("--moe-router-topk", "number of experts that process a token", default=2)
    group.add(
        "--moe-router-load-balancing-type",
        "how tokens are spread over the experts: by an auxiliary loss per microbatch (aux_loss) or per sequence "
        "(seq_aux_loss), by Sinkhorn normalization, or not at all",
        default="aux_loss",
        choices=("aux_loss", "seq_aux_loss", "sinkhorn", "none"),
    )
    group.add(
        "--moe-router-dtype",
        "precision of the routing and of the sum of the experts' outputs (default: that of the model)",
        choices=("fp32", "fp64"),
    )
    group.on(
        "--moe-router-pre-softmax",
        "apply the softmax to the scores of all experts, before the best are chosen, instead of to the chosen ones",
    )
    group.real("--moe-aux-loss-coeff", "weight of the auxiliary loss in the loss", default=0.0)
    group.real("--moe-z-loss-coeff", "weight of a loss that keeps the router's scores small (default: no such loss)")
    group.add(
        "--moe-token-dispatcher-type",
        "how tokens reach the ranks of their experts: all tokens to all ranks (allgather), each to its ranks "
        "(alltoall), or by the package DeepEP (flex)",
        default="allgather",
        choices=("allgather", "alltoall", "flex"),
    )
    group.whole("--moe-ffn-hidden-size", "size of the hidden layer of an expert (default: --ffn-hidden-size)")
    group.whole(
        "--moe-shared-expert-intermediate-size",
        "total size of the hidden layers of experts that process every token (default: no such experts)",
    )
    group.on(
        "--moe-grouped-gemm",
        "compute the experts of a rank with one grouped matrix product instead of one after another",
    )


def _add_recompute(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "recomputation")
    group.on("--recompute-activations", "the same as --recompute-granularity selective")
    group.add(
        "--recompute-granularity",
        "what the backward computes again instead of keeping it in memory: whole layers (full) or the parts in "
        "--recompute-modules (selective) (default: nothing)",
        choices=("full", "selective"),
    )
    group.add(
        "--recompute-method",
        "layers for --recompute-granularity full, which needs this flag: all, in groups of --recompute-num-layers "
        "(uniform), or the first --recompute-num-layers of each stage (block)",
        choices=("uniform", "block"),
    )
    group.whole("--recompute-num-layers", "number of layers for --recompute-method")
    group.add(
        "--recompute-modules",
        "parts of every layer for --recompute-granularity selective: core_attn, layernorm, mlp, moe, moe_act, "
        "shared_experts (default: core_attn)",
        nargs="*",
        metavar="MODULE",
    )


def _add_fusion(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "fused kernels (used if they are installed)")
    group.off(
        "--no-bias-gelu-fusion",
        "bias_gelu_fusion",
        "compute the bias and the GELU of an MLP separately (default: in one kernel)",
    )
    group.off(
        "--no-bias-swiglu-fusion",
        "bias_swiglu_fusion",
        "compute the bias and the gated unit of --swiglu separately (default: in one kernel)",
    )
    group.off(
        "--no-bias-dropout-fusion",
        "bias_dropout_fusion",
        "compute bias, dropout and residual sum separately (default: in one kernel)",
    )
    group.off(
        "--no-masked-softmax-fusion",
        "masked_softmax_fusion",
        "compute scale, mask and softmax of the attention separately (default: in one kernel)",
    )
    group.off(
        "--no-rope-fusion",
        "apply_rope_fusion",
        "compute the steps of rotary position embeddings separately (default: in one kernel)",
    )
    group.off(
        "--no-persist-layer-norm",
        "persist_layer_norm",
        "do not use Apex's persistent LayerNorm kernel, which exists for some hidden sizes",
    )
    group.off(
        "--no-gradient-accumulation-fusion",
        "gradient_accumulation_fusion",
        "compute a weight gradient and its addition to the accumulated one separately (default: in one kernel)",
    )
    group.on("--cross-entropy-loss-fusion", "compute the cross entropy in one kernel")


def _add_precision(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "precision")
    group.on("--bf16", "compute in bfloat16 (default: float32)")
    group.on("--fp16", "compute in float16, with an adapted loss scale (default: float32)")
    group.on("--grad-reduce-in-bf16", "accumulate and reduce gradients in the dtype of the weights instead of float32")
    group.on("--accumulate-allreduce-grads-in-fp32", "no effect: always on, unless --grad-reduce-in-bf16 is given")
    group.on("--attention-softmax-in-fp32", "compute the softmax of the attention of local layers in float32")
    group.real(
        "--loss-scale",
        "constant factor of the loss, which keeps small gradients from becoming zero (default: with --fp16 an adapted "
        "factor, else 1)",
    )
    group.real("--initial-loss-scale", "adapted loss scale at the start", default=2.0**32)
    group.real("--min-loss-scale", "smallest adapted loss scale", default=1.0)
    group.real(
        "--loss-scale-window",
        "number of successive iterations without an overflow after which the adapted loss scale doubles",
        default=1000.0,
        metavar="N",
    )
    group.whole(
        "--hysteresis",
        "number of overflows, since the adapted loss scale last doubled, from which on each one halves it",
        default=2,
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "training")
    group.whole("--micro-batch-size", "number of sequences per microbatch on one data-parallel rank (required)")
    group.whole(
        "--global-batch-size",
        "number of sequences per iteration on all ranks (default: --micro-batch-size * data-parallel size)",
    )
    group.add(
        "--rampup-batch-size",
        "begin with START sequences per iteration and grow in equal steps of INCREMENT, to reach --global-batch-size "
        "after SAMPLES sequences (default: no ramp-up)",
        type=int,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
    )
    group.whole(
        "--train-iters", "number of iterations in total, including those before a checkpoint that is resumed (required)"
    )
    group.whole(
        "--exit-interval",
        "stop after an iteration that is a multiple of this number, with a checkpoint if --save is given",
    )
    group.on("--exit-signal-handler", "no effect: a run always stops cleanly on SIGTERM")
    group.whole("--seed", "seed of the initial weights, of dropout and of the order of the data", default=1234)
    group.on(
        "--calculate-per-token-loss",
        "give every token of an iteration the same weight in the loss, instead of every microbatch",
    )
    group.off(
        "--no-check-for-nan-in-loss-and-grad",
        "check_for_nan_in_loss_and_grad",
        "do not stop at gradients that are NaN or infinite; with --fp16, they are left to the loss scaling",
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "optimizer")
    group.add("--optimizer", "Adam or SGD with momentum", default="adam", choices=("adam", "sgd"))
    group.on(
        "--use-distributed-optimizer", "divide the state and the steps of the optimizer among the data-parallel ranks"
    )
    group.real("--weight-decay", "weight decay", default=0.01)
    group.real("--clip-grad", "gradients with a larger global norm are scaled down to it; 0 never scales", default=1.0)
    group.real("--adam-beta1", "decay of Adam's mean of gradients", default=0.9)
    group.real("--adam-beta2", "decay of Adam's mean of squared gradients", default=0.999)
    group.real("--adam-eps", "number added to the denominator of Adam's update", default=1e-08)
    group.real("--sgd-momentum", "momentum of --optimizer sgd", default=0.9)


def _add_learning_rate(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "learning rate")
    group.real("--lr", "learning rate after the warm-up, the largest of the run (required)")
    group.real("--min-lr", "learning rate at the end of the decay", default=0.0)
    group.add(
        "--lr-decay-style",
        "shape of the decay from --lr to --min-lr",
        default="linear",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
    )
    group.whole(
        "--lr-decay-iters",
        "iteration at which the decay ends, counted from the start of the run (default: --train-iters)",
    )
    group.whole(
        "--lr-warmup-iters", "number of iterations in which the learning rate rises linearly to --lr", default=0
    )
    group.real(
        "--lr-warmup-fraction", "warm-up as a share of --lr-decay-iters, instead of --lr-warmup-iters", metavar="SHARE"
    )
    group.real("--lr-warmup-init", "learning rate at the start of the warm-up", default=0.0)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "data")
    group.add(
        "--data-path",
        "data sets to divide by --split: one or more PREFIX, or WEIGHT PREFIX pairs; PREFIX.bin and PREFIX.idx are in "
        "Megatron's indexed format",
        nargs="+",
        metavar="PREFIX",
    )
    group.add(
        "--split",
        "shares of --data-path for training, validation and test, with any sum",
        default="969,30,1",
        metavar="SHARES",
    )
    group.add(
        "--train-data-path",
        "data sets for training: one or more PREFIX, or WEIGHT PREFIX pairs; PREFIX.bin and PREFIX.idx are in "
        "Megatron's indexed format",
        nargs="+",
        metavar="PREFIX",
    )
    group.add("--valid-data-path", "data sets for validation, as in --train-data-path", nargs="+", metavar="PREFIX")
    group.add("--test-data-path", "data sets for the test, as in --train-data-path", nargs="+", metavar="PREFIX")
    group.on("--mock-data", "train on generated token ids, which count up from 1, instead of on files")
    group.add(
        "--data-cache-path",
        "directory for indices of samples, which are reused in later runs (default: a directory next to the data)",
        metavar="DIR",
    )
    group.off(
        "--no-mmap-bin-files", "mmap_bin_files", "read .bin files part by part instead of mapping them into memory"
    )
    group.add(
        "--tokenizer-type",
        "what the data's token ids mean: bytes, as scripts/prepare_data.py writes them (ByteLevelTokenizer), or "
        "tokens of any vocabulary with --vocab-size ids (NullTokenizer)",
        default="ByteLevelTokenizer",
        choices=("ByteLevelTokenizer", "NullTokenizer"),
    )
    group.whole("--vocab-size", "number of token ids in the data, for --tokenizer-type NullTokenizer")
    group.whole("--num-workers", "processes that read samples in advance; 0 reads in the training process", default=0)
    group.on("--reset-position-ids", "count positions from 0 after every end of a document")
    group.on("--reset-attention-mask", "let no token attend to tokens of earlier documents")
    group.on("--eod-mask-loss", "leave the predictions from end-of-document tokens out of the loss")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "checkpoints")
    group.add("--save", "directory to write checkpoints to (default: none are written)", metavar="DIR")
    group.whole(
        "--save-interval", "number of iterations between checkpoints; the end of training and a stop signal always save"
    )
    group.add(
        "--load",
        "directory with the checkpoint to resume from, the latest one; without a checkpoint in it, a new run starts",
        metavar="DIR",
    )
    group.on(
        "--exit-on-missing-checkpoint", "stop with an error if --load has no checkpoint, instead of starting a new run"
    )
    group.on("--finetune", "load the weights only and start at iteration 0")
    group.off(
        "--no-save-optim", "save_optim", "save checkpoints without the states of the optimizer and the learning rate"
    )
    group.off("--no-save-rng", "save_rng", "save checkpoints without the states of the random generators")
    group.off("--no-load-optim", "load_optim", "do not load the states of the optimizer and the learning rate")
    group.off("--no-load-rng", "load_rng", "do not load the states of the random generators; --seed sets them")
    group.add(
        "--ckpt-format", "no effect: checkpoints always have this format", default="torch_dist", choices=("torch_dist",)
    )
    group.add(
        "--dist-ckpt-optim-fully-reshardable",
        "save the distributed optimizer's state so that any other layout can load it; on by default",
        action=argparse.BooleanOptionalAction,
        default=True,
    )


def _add_logging(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "evaluation and logging")
    group.whole("--eval-iters", "number of global batches per evaluation; 0 for no evaluation", default=100)
    group.whole("--eval-interval", "number of iterations between evaluations on the validation data", default=1000)
    group.whole("--log-interval", "number of iterations between lines of the log", default=100)
    group.on("--log-num-zeros-in-grad", "log how many elements of the gradients are zero")
    group.add(
        "--tensorboard-dir", "write TensorBoard events to this directory, if TensorBoard is installed", metavar="DIR"
    )
