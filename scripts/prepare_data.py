#!/usr/bin/env python3
"""Prepare data for pretraining: byte-level tokens in Megatron's indexed format (PREFIX.bin, PREFIX.idx).

python scripts/prepare_data.py --standard-library --output-prefix data/stdlib
python scripts/prepare_data.py --input articles.jsonl notes.txt --output-prefix data/mine
"""

import argparse
import sys
from pathlib import Path

from corpus import prepare_standard_library, read_documents, write_documents

from megatron.zero_bubble.core.errors import UserError


def main(argv: list[str]) -> int:
    """Write the data sets; return the exit code: 0, or 2 after a one-line error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input",
        nargs="+",
        type=Path,
        metavar="FILE",
        help=".jsonl (one document per line) or text files (one per file)",
    )
    source.add_argument(
        "--standard-library",
        action="store_true",
        help="the sources of this Python's standard library, split into PREFIX_train, PREFIX_valid and PREFIX_test",
    )
    parser.add_argument("--json-key", default="text", help="key of the text in a .jsonl line; default: text")
    parser.add_argument("--output-prefix", required=True, help="path of the data set, without .bin")
    args = parser.parse_args(argv)
    try:
        if args.standard_library:
            for split, prefix in prepare_standard_library(args.output_prefix).items():
                print(f"{split}: {Path(prefix + '.bin').stat().st_size // 2:,} tokens in {prefix}.bin")
        else:
            tokens = write_documents(args.output_prefix, read_documents(args.input, args.json_key))
            print(f"{tokens:,} tokens in {args.output_prefix}.bin")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {args.output_prefix} cannot be written: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
