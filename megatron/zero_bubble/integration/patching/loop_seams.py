"""Functions of Megatron-LM's training loop that are replaced with post-validation or sharded units."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.integration.patching.seam import Seam

TRAINING = "megatron.training.training"


@dataclass(frozen=True)
class LoopSeams:
    """The functions of Megatron-LM's training loop that are replaced with post-validation.

    Attributes:
        built: builds the optimizer.
        step, log: run an iteration, and log it.
        training: the whole loop.
        agreed: reduce a figure of the optimizer step over all ranks.
        timer: reads a timer.
        settled: read weights, save them, or print a line that must not precede that of an iteration.
    """

    built: Seam
    step: Seam
    log: Seam
    training: Seam
    agreed: tuple[Seam, ...]
    timer: Seam
    settled: tuple[Seam, ...]

    @property
    def all(self) -> tuple[Seam, ...]:
        return (self.built, self.step, self.log, self.training, self.timer, *self.agreed, *self.settled)


@dataclass(frozen=True)
class ReaderSeams:
    """The functions of Megatron-LM that are replaced if chunks stay shards between iterations.

    Attributes:
        built: builds the optimizer, and loads a checkpoint.
        evaluates: may call a function of the script that reads weights.
        saves: collects what a checkpoint has.
        reads: read weights.
    """

    built: Seam
    evaluates: Seam
    saves: Seam
    reads: tuple[Seam, ...]

    @property
    def all(self) -> tuple[Seam, ...]:
        return (self.built, self.evaluates, self.saves, *self.reads)


_REPORT_LATE = "writes the line of an iteration when its optimizer step is final"
_NO_BARRIER = "skips a reduction of figures that are the same on all ranks, because it would stop the pipeline"
_SETTLE = "makes the pending optimizer step final first"
LOOP = LoopSeams(
    built=Seam(TRAINING, "setup_model_and_optimizer", (), "wraps the optimizer for steps ahead of their validation"),
    step=Seam(
        TRAINING,
        "train_step",
        ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
        "steps the optimizer ahead of its validation",
    ),
    log=Seam(
        TRAINING,
        "training_log",
        (
            "loss_dict", "total_loss_dict", "learning_rate", "iteration", "loss_scale", "report_memory_flag",
            "skipped_iter", "grad_norm", "params_norm", "num_zeros_in_grad",
        ),
        _REPORT_LATE,
    ),
    training=Seam(TRAINING, "train", ("forward_step_func", "model", "optimizer"), "makes the last step final"),
    agreed=(
        Seam(TRAINING, "logical_and_across_model_parallel_group", ("input",), _NO_BARRIER),
        Seam(TRAINING, "reduce_max_stat_across_model_parallel_group", ("stat",), _NO_BARRIER),
    ),
    timer=Seam("megatron.core.timers", "Timer.elapsed", ("self", "reset", "barrier"), "reads times without a barrier"),
    settled=tuple(
        Seam(TRAINING, name, parameters, _SETTLE)
        for name, parameters in {
            "save_checkpoint_and_time": ("iteration", "model", "optimizer"),
            "save_checkpoint": ("iteration", "model", "optimizer"),
            "evaluate_and_print_results": ("prefix", "forward_step_func", "data_iterator", "model"),
            "disable_forward_pre_hook": ("model_chunks", "param_sync"),
            "check_param_hashes_across_dp_replicas": ("model",),
            "check_adlr_autoresume_termination": ("iteration", "model", "optimizer"),
            "calc_params_l2_norm": ("model",),
            "dummy_train_step": ("data_iterator",),
            "print_datetime": ("string",),
        }.items()
    ),
)  # fmt: skip

_WHOLE = "gathers weights, which are shards between iterations"
READERS = ReaderSeams(
    built=Seam(TRAINING, "setup_model_and_optimizer", (), "lets the optimizer step shards"),
    evaluates=Seam(
        TRAINING,
        "evaluate_and_print_results",
        ("prefix", "forward_step_func", "data_iterator", "model", "non_loss_data_func"),
        _WHOLE,
    ),
    saves=Seam("megatron.training.checkpointing", "generate_state_dict", ("args", "model", "optimizer"), _WHOLE),
    reads=(
        Seam(TRAINING, "calc_params_l2_norm", ("model",), _WHOLE),
        Seam(TRAINING, "check_param_hashes_across_dp_replicas", ("model",), _WHOLE),
    ),
)
