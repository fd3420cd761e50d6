"""Check the flags of the data before anything is started."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.blends import Blend, parse_blend
from megatron.zero_bubble.planning.job.arguments.indexed import check_indexed
from megatron.zero_bubble.planning.job.balance import replicas_of_experts
from megatron.zero_bubble.planning.job.document_splits import NAMES, check_divided, check_whole


def check_tokenizer(args: Any) -> None:
    """Reject a vocabulary size that the tokenizer does not need, and its absence where it does."""
    if args.tokenizer_type == "NullTokenizer" and (args.vocab_size is None or args.vocab_size < 1):
        raise UserError(
            "--tokenizer-type NullTokenizer needs --vocab-size, the number of token ids in the data; give it"
        )
    if args.tokenizer_type != "NullTokenizer" and args.vocab_size is not None:
        raise UserError(
            f"--vocab-size is only for tokenized data, got {args.vocab_size} with {args.tokenizer_type}; "
            "add --tokenizer-type NullTokenizer or drop --vocab-size"
        )


def check_data(args: Any) -> None:
    """Check the sources of data and their split, and set ``blend`` and ``blend_per_split``."""
    per_split = (args.train_data_path, args.valid_data_path, args.test_data_path)
    sources = [bool(args.data_path), any(per_split), args.mock_data]
    if sum(sources) != 1:
        raise UserError(
            "a run needs exactly one source of data: --data-path, or --train-data-path (with --valid-data-path, "
            f"--test-data-path), or --mock-data; got {sum(sources)} of them; give one"
        )
    if any(per_split) and not args.train_data_path:
        raise UserError("--valid-data-path and --test-data-path need --train-data-path; add it or use --data-path")
    args.blend = parse_blend("--data-path", args.data_path) if args.data_path else None
    args.blend_per_split = tuple(
        parse_blend(flag, paths) if paths else None
        for flag, paths in zip(("--train-data-path", "--valid-data-path", "--test-data-path"), per_split, strict=True)
    )
    blends: list[Blend] = [blend for blend in (args.blend, *args.blend_per_split) if blend is not None]
    for blend in blends:
        for prefix in blend.prefixes:
            check_indexed(prefix)
    try:
        shares = [float(share) for share in args.split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or shares[0] <= 0:
        raise UserError(
            f"--split needs one to three shares (train,valid,test), the first of them positive, got {args.split!r}; "
            "write them like 969,30,1"
        )
    _check_splits(args)


def _check_splits(args: Any) -> None:
    """Check that every split has documents; without documents, megatron-core would build its samples forever."""
    if args.blend is not None:
        check_divided(args.blend.prefixes, args.blend.weights is not None, args.split, args.seq_length)
    for name, blend in zip(NAMES, args.blend_per_split, strict=True):
        if blend is not None:
            check_whole(name, blend.prefixes, blend.weights is not None, args.seq_length)


def check_documents(args: Any) -> None:
    """Check the documents of a job with balanced microbatches.

    Raises:
        UserError: fewer per iteration than replicas, a number that replicas which share experts cannot divide equally,
            or several data sets.
    """
    if (least := min(args.batch_sizes.steps)) < args.data_parallel_size:
        raise UserError(
            "with --zero-bubble-balance-microbatches, an iteration needs one document or more per data-parallel "
            f"replica, got {least} for {args.data_parallel_size} replicas; raise --global-batch-size"
        )
    together = replicas_of_experts(args)
    if others := [step for step in args.batch_sizes.steps if step % together]:
        raise UserError(
            "with --zero-bubble-balance-microbatches, replicas that share experts run equally many microbatches, "
            "because they exchange tokens in every layer, so an iteration needs a multiple of as many documents, "
            f"{together}; got {others[0]}; change --global-batch-size, or lower --expert-model-parallel-size"
        )
    for paths in (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path):
        if paths and len(paths) > 1:
            raise UserError(
                "--zero-bubble-balance-microbatches reads the documents of one data set per split, got "
                f"{' '.join(paths)}; give one prefix, or drop the flag"
            )
