"""The steps of each part, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OK, NEEDS_GPU = "ok", "needs a GPU"
"""The statuses of a step that succeeded, and of one that cannot run on a CPU; all others are failures."""
SKIPPED = "skipped: "
"""Begins the status of a step that gave a reason, as its figure ``skip_reason``, why this machine cannot run it."""
PART_LIMIT_S = 540
"""So that a part fits into ten minutes."""

EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without a fixed workspace, cuBLAS may give other bits when several streams are in use."""
REPEATED = {**EXACT, "TEARDOWN_CUPTI": "0"}
"""A profiler that comes back after it has left may crash where CUDA graphs run."""
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Four ranks with 32 queues each are too many for CUDA's Multi-Process Service; with 8 they are not."""


@dataclass(frozen=True)
class Step:
    """One process, ``python -m gpu_day.MODULE ARGUMENTS --device cpu|cuda --output FILE``, with a time limit.

    Attributes:
        reads: what the table shows of the figures in FILE, as a format string; a figure that is missing or not finite
            fails the step.
        on_cpu: the arguments with ``--cpu``; None for a step that needs a GPU.
        num_ranks: number of processes that torchrun starts, at most two of them with ``--cpu``.
        num_gpus: the step needs at least as many, or an NCCL that lets ranks share one (``shared_nccl``).
        environment: additional variables, also with ``--cpu``.
        needs: a package without which the step cannot run.
        shares_gpu: ranks that share a GPU compute at the same time, under CUDA's Multi-Process Service (``mps``).
    """

    name: str
    module: str
    arguments: str
    limit_s: int
    reads: str
    on_cpu: str | None
    num_ranks: int = 1
    num_gpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None
    shares_gpu: bool = False


@dataclass(frozen=True)
class Part:
    """Steps that run one after the other; a failed step does not stop the others."""

    title: str
    steps: tuple[Step, ...]


ENGINE = "transformer_engine"
TESTS = "{passed} passed, {skipped} skipped"
WHOLE = "tests/gpu/test_whole_runs.py"
WAITS = "of {num_actions} actions wait: {waiting}"
ALLOCATOR = "reserved / allocated: zb-h2 {zb_h2:.2f}, v-min {v_min:.2f}"
MODEL = "--hidden-size 4096 --num-layers 8 --seq-length 2048 --micro-batch-size 2"
ON_RANKS = "--hidden-size 4096 --num-layers 8 --seq-length 1024 --micro-batch-size 2"
APART = "--hidden-size 4096 --num-layers 8 --seq-length 1024"
"""Passes of about 20 ms on a tenth of an H200."""
FEW_MICROBATCHES = "--hidden-size 4096 --num-layers 8 --seq-length 2048 --num-microbatches 2"
SMALL = "--hidden-size 1024 --num-layers 8 --seq-length 1024 --micro-batch-size 1"
"""Passes for which the host is the limit."""
FRAGMENTS = "--iterations 50 --hidden-size 2048 --num-layers 8 --seq-length 1024"
PASSES = (
    "F {forward_ms:.2f}, B {backward_ms:.2f}, W {wgrad_ms:.2f} ms, {split_over_stock:.2f} x the passes of stock; "
    "host {host_ms:.2f} ms per pass"
)
GRAPHS = (
    "{eager_ms:.1f} -> {graphs_ms:.1f} ms, {eager_over_busy:.2f} -> {graphs_over_busy:.2f} x the GPU's own time; "
    "host {eager_host_ms:.2f} -> {graphs_host_ms:.2f} ms per pass; reserved {eager_reserved_gib:.1f} -> "
    "{graphs_reserved_gib:.1f} GiB; {differing} gradients differ"
)
TINY = "--hidden-size 32 --num-layers 2 --seq-length 16 --micro-batch-size 1 --rounds 2"


def _tests(name: str, selection: str, limit_s: int, on_cpu: str | None, **more: str) -> Step:
    return Step(name, "pytests", selection, limit_s, TESTS, on_cpu, environment={**EXACT, **more})


def _over_nccl(
    name: str,
    selection: str,
    limit_s: int,
    on_cpu: str | None = None,
    queues: str = "32",
    needs: str | None = None,
    **more: str,
) -> Step:
    variables = {**EXACT, QUEUES: queues, **more}
    return Step(name, "pytests", selection, limit_s, TESTS, on_cpu, num_gpus=2, environment=variables, needs=needs)


def _decide(name: str, sizes: str, on_cpu: str | None) -> Step:
    return Step(
        name,
        "decide",
        f"{sizes} --num-ranks 4 --rounds 1",
        260,
        "{advised}: predicted {predicted_gain:+.1%}, measured {measured_gain:+.1%}; auto {auto_gain:+.1%}; MPS: {mps}",
        on_cpu and f"{on_cpu} --num-ranks 2 --rounds 1",
        num_gpus=4,
        environment={QUEUES: "8"},
        shares_gpu=True,
    )


PARTS = {
    "ranks": Part(
        "ranks that share a GPU and do not slow each other",
        (
            Step(
                "gains",
                "gains",
                f"{APART} --num-ranks 4 --batches 8 4 --shares 12 8 --rounds 3",
                260,
                "{multiprocessors} multiprocessors each (MPS: {mps}), {slowdown:+.1%} next to the others; measured "
                "(predicted): zb-h1 {zb_h1_measured:+.1%} ({zb_h1_predicted:+.1%}), zb-v {zb_v_measured:+.1%} "
                "({zb_v_predicted:+.1%}), zb-auto {zb_auto_measured:+.1%} ({zb_auto_predicted:+.1%}), auto "
                "{auto_measured:+.1%} ({auto_predicted:+.1%})",
                "--hidden-size 64 --num-layers 4 --seq-length 32 --num-ranks 2 --batches 4 2 --shares 12 --rounds 1",
                num_gpus=4,
                environment={QUEUES: "8"},
                shares_gpu=True,
            ),
        ),
    ),
    "transformer-engine": Part(
        "TransformerEngine",
        (
            _over_nccl("parity", "tests/gpu/test_transformer_engine.py", 220, needs=ENGINE),
            Step(
                "memory until W in FP8",
                "engine_memory",
                "",
                40,
                "{bytes_per_element:.2f} bytes per element",
                None,
                needs=ENGINE,
            ),
        ),
    ),
    "vocabulary": Part(
        "vocabulary parallelism, over NCCL",
        (
            _over_nccl("one queue", f"{WHOLE} -k one_queue", 120, f"{WHOLE} -k one_queue"),
            _over_nccl("vocabulary over NCCL", f"{WHOLE} -k 'features and vocabulary'", 75),
        ),
    ),
    "wgrad": Part(
        "weight gradients",
        (
            Step(
                "next to TransformerEngine",
                "products",
                "--hidden-size 4096 --tokens 4096 --dtype bfloat16",
                40,
                "TransformerEngine at {engine:.0%} of the library's speed, ours at {bfloat16:.0%}",
                None,
                needs=ENGINE,
            ),
            Step(
                "algorithms",
                "algorithms",
                "--hidden-size 4096 --tokens 4096 --count 8",
                30,
                "the best of {count} algorithms: {gain:+.1%} at the median over the first, {most:+.1%} at most",
                None,
            ),
            Step(
                "weight gradients",
                "products",
                "--hidden-size 2048 4096 8192 --tokens 4096",
                40,
                "of the library's speed: bf16 {bfloat16:.0%}, fp32 {float32:.0%}",
                "--hidden-size 32 --tokens 64 --rounds 2",
            ),
        ),
    ),
    "memory": Part(
        "memory",
        (
            Step("memory checker", "memory_check", "", 150, "{products} products, {errors} errors", ""),
            Step(
                "memory",
                "fragments",
                FRAGMENTS,
                60,
                ALLOCATOR,
                "--iterations 2 --hidden-size 32 --num-layers 4 --seq-length 16 --limit 1.15",
                num_ranks=4,
                num_gpus=4,
            ),
            Step(
                "memory, little more than the peak",
                "fragments",
                f"{FRAGMENTS} --limit 1.15",
                70,
                "{flushes} flushes, iteration {slowdown:+.1%}, within 1.15 x the allocated peak",
                None,
                num_ranks=4,
                num_gpus=4,
            ),
            Step(
                "memory, expandable segments",
                "fragments",
                FRAGMENTS,
                60,
                ALLOCATOR,
                None,
                num_ranks=4,
                num_gpus=4,
                environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ),
        ),
    ),
    "correct": Part(
        "the machine, installation, host calls, kernels",
        (
            Step(
                "machine",
                "machine",
                "",
                30,
                "copy {copy_gb_per_s:.0f} GB/s, bf16 product {bf16_tflops:.0f} TFLOP/s",
                "--mib 4 --size 128",
            ),
            Step("install", "install", "", 75, "ops: {ops}; megatron-core {megatron_core}", ""),
            Step("host calls next to a spinning kernel", "host_waits", "", 40, WAITS, None),
            Step(
                "host calls, modules loaded eagerly",
                "host_waits",
                "",
                60,
                WAITS,
                None,
                environment={"CUDA_MODULE_LOADING": "EAGER"},
            ),
            _tests(
                "kernels and platform",
                "-m gpu tests/engine/kernels tests/engine/platforms",
                80,
                "tests/engine/kernels/test_wgrad.py",
            ),
        ),
    ),
    "stock": Part(
        "against stock, over NCCL",
        (
            _over_nccl(
                "against stock, 1 queue",
                f"{WHOLE} -k same_bits",
                110,
                f"{WHOLE} -k 'same_bits and bf16 and linear'",
                queues="1",
            ),
            _over_nccl("against stock, 8 queues", f"{WHOLE} -k 'same_bits and bf16'", 60, queues="8"),
            _over_nccl("against stock, 32 queues", f"{WHOLE} -k 'same_bits and bf16'", 60),
            _over_nccl(
                "against stock, eager communicators",
                f"{WHOLE} -k 'same_bits and bf16'",
                70,
                ZB_TEST_EAGER="1",
            ),
            _over_nccl(
                "post-validation",
                f"{WHOLE} -k post_validation",
                90,
                f"{WHOLE} -k 'post_validation and fp16'",
                queues="1",
            ),
            _over_nccl("killed rank", f"{WHOLE} -k killed", 70, f"{WHOLE} -k killed", queues="1"),
            _over_nccl("jobs of torchrun", "tests/gpu/test_training_on_gpus.py -k nccl", 80, queues="1"),
        ),
    ),
    "runs": Part(
        "whole runs, over NCCL",
        (
            _over_nccl("schedules, fused", f"{WHOLE} -k fused", 75),
            _over_nccl("data parallel 2", f"{WHOLE} -k data_parallel", 70),
            _over_nccl("checkpoints, traces, evaluation", f"{WHOLE} -k written", 120, f"{WHOLE} -k costs_are_written"),
            _tests("one rank over NCCL", f"{WHOLE} -k one_rank", 45, f"{WHOLE} -k one_rank"),
        ),
    ),
    "lengths": Part(
        "microbatches of different lengths and pairs, over NCCL",
        (
            _over_nccl("pairs", f"{WHOLE} -k pairs", 120, f"{WHOLE} -k 'pairs and 4'"),
            _over_nccl("lengths", f"{WHOLE} -k lengths", 120, f"{WHOLE} -k 'lengths and dense and h1'"),
        ),
    ),
    "features": Part(
        "offloading, slices, vocabulary, shards",
        (
            Step(
                "copies to host memory",
                "offload",
                "--hidden-size 8192 --num-layers 2 --seq-length 1024 --micro-batch-size 2 --num-microbatches 6",
                130,
                "{gb_per_s:.1f} GB/s, {of_plain:.0%} of a plain copy; iteration {hidden_slowdown:+.1%} with {hidden}, "
                "{auto_slowdown:+.1%} with auto, in {auto_memory:.0%} of the memory; same gradients: {same_gradients}",
                f"{TINY} --num-microbatches 6 --mib 4",
                environment=EXACT,
            ),
            _over_nccl(
                "against runs without, over NCCL", f"{WHOLE} -k features", 130, f"{WHOLE} -k 'features and all'"
            ),
        ),
    ),
    "passes": Part(
        "speed of passes",
        (
            Step("passes", "passes", f"{MODEL} --num-microbatches 4", 110, PASSES, f"{TINY} --num-microbatches 2"),
            Step(
                "predicted bubbles",
                "predict",
                "--passes {folder}/passes.json --num-ranks 4 8 16",
                30,
                "p={num_ranks}: 1f1b {bubble_1f1b:.1%}, zb-v {bubble_zb_v:.1%}, zb-auto {bubble_zb_auto:.1%}",
                "--passes {folder}/passes.json --num-ranks 2",
            ),
            Step("passes, small", "passes", f"{SMALL} --num-microbatches 8", 50, PASSES, None),
            Step(
                "spinning receives",
                "spin",
                f"{MODEL} --num-microbatches 4 --num-blocks 0 1 2 4 8 16 32",
                80,
                "F {forward_over_free:.2f}, B {backward_over_free:.2f}, W {wgrad_over_free:.2f} x with {most} blocks",
                f"{TINY} --num-microbatches 2 --num-blocks 0 1",
            ),
        ),
    ),
    "graphs": Part(
        "CUDA graphs of stages",
        (
            Step("graphs, small", "graphs", f"{SMALL} --num-microbatches 8", 40, GRAPHS, None, environment=REPEATED),
            Step("graphs", "graphs", f"{MODEL} --num-microbatches 4", 35, GRAPHS, None, environment=REPEATED),
            _over_nccl("graphs against runs without, over NCCL", "tests/gpu/test_stage_graphs.py", 45),
        ),
    ),
    "nccl": Part(
        "speed over NCCL",
        (
            Step(
                "bandwidth by CTAs",
                "nccl_bandwidth",
                "--megabytes 33 --size 4096 --ctas 1 2 4 8 16",
                60,
                "{best_gb_per_s:.0f} GB/s with {best_ctas} CTAs; {enough_gb_per_s:.0f} GB/s with {enough_ctas}, "
                "products {slowdown:+.1%}",
                "--megabytes 0.1 --size 64 --ctas 1 2 --rounds 2",
                num_ranks=2,
                num_gpus=2,
                environment={QUEUES: "8"},
                shares_gpu=True,
            ),
        ),
    ),
    "advice": Part(
        "advice and auto in whole jobs, over NCCL",
        (
            _decide(
                "advice",
                f"{ON_RANKS} --num-microbatches 8 --named zb-v --planning 30",
                "--hidden-size 64 --num-layers 4 --seq-length 32 --num-microbatches 4",
            ),
            _decide(
                "advice, few microbatches",
                f"{FEW_MICROBATCHES} --named seq-zb-h1 --planning 40",
                None,
            ),
        ),
    ),
}
"""The parts by name, in the order of what they are worth. Many steps need several GPUs, or an NCCL that shares one."""
