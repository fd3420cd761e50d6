"""Flags of the training loop: batches, the optimizer, data, checkpoints and logs."""

from __future__ import annotations

import argparse

from megatron.zero_bubble.planning.job.arguments.group import Group


def add_measurements(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "measurements")
    group.add("--metrics-file", "append one JSON object per iteration and evaluation to this file", metavar="FILE")


def add_training(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "training")
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


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "optimizer")
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


def add_learning_rate(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "learning rate")
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


def add_data(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "data")
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


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "checkpoints")
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


def add_logging(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "evaluation and logging")
    group.whole("--eval-iters", "number of global batches per evaluation; 0 for no evaluation", default=100)
    group.whole("--eval-interval", "number of iterations between evaluations on the validation data", default=1000)
    group.whole("--log-interval", "number of iterations between lines of the log", default=100)
    group.on("--log-num-zeros-in-grad", "log how many elements of the gradients are zero")
    group.add(
        "--tensorboard-dir", "write TensorBoard events to this directory, if TensorBoard is installed", metavar="DIR"
    )
