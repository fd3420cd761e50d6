"""The flags of ``scripts/pretrain_gpt.py`` for the model: shape, parallelism, recomputation, fusions, precision."""

from __future__ import annotations

import argparse

from megatron.zero_bubble.planning.job.arguments.group import Group


def add_parallel(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "parallelism")
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
        "backend for communication: nccl on GPUs, gloo on CPUs, which is also the default",
        choices=("nccl", "gloo"),
    )
    group.real(
        "--distributed-timeout-minutes",
        "time after which a message or collective that does not arrive ends the run",
        default=10.0,
        metavar="MINUTES",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "model")
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
        "--cuda-graph-impl",
        "record the layers of each stage as CUDA graphs (local), which need a GPU and a zero-bubble schedule",
        default="none",
    )
    group.add(
        "--attention-backend",
        "attention kernel of TransformerEngine's layers",
        default="auto",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )


def add_moe(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "mixture of experts")
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


def add_recompute(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "recomputation")
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


def add_fusion(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "fused kernels (used if they are installed)")
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


def add_precision(parser: argparse.ArgumentParser) -> None:
    group = Group(parser, "precision")
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
