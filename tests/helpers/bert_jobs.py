"""Jobs of ``pretrain_bert.py`` and ``pretrain_t5.py`` on CPU ranks, with the tokenizer that needs no package."""

from __future__ import annotations

import atexit
import functools
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.helpers.megatron_lm import Checkout, Log, gpt_job, warm_ranks

SCRIPT = Path(__file__).parent / "bert" / "pretrain_bert_local.py"
_OWN = (
    "--legacy-tokenizer --tokenizer-type BertWordPieceLowerCase --split 80,10,10 --spec local "
    "--attention-backend local --position-embedding-type learned_absolute"
)
_NUM_WORDS = 60


@functools.cache
def _data() -> Path:
    """Write a vocabulary and documents of sentences; the folder is deleted when this process exits."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = Path(tempfile.mkdtemp(prefix="bert-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"word{chr(97 + number % 10)}{chr(97 + number // 10)}" for number in range(_NUM_WORDS)]
    (folder / "vocabulary.txt").write_text("\n".join([*special, *words]))
    drawn = random.Random(1)
    builder = IndexedDatasetBuilder(f"{folder}/documents.bin", dtype=numpy.uint16)
    for _ in range(60):
        lengths = [drawn.randrange(5, 12) for _ in range(6)]
        tokens = [drawn.randrange(len(special), len(special) + _NUM_WORDS) for _ in range(sum(lengths))]
        builder.add_document(torch.tensor(tokens), lengths)
    builder.finalize(f"{folder}/documents.idx")
    return folder


def pretrain_bert(
    checkout: Checkout, num_ranks: int, flags: str, schedule: str | None, more: Sequence[str] = ()
) -> Log:
    """Run the checkout's ``pretrain_bert.py`` to its end, with our schedule, or Megatron's own for None."""
    data = f"--data-path {_data()}/documents --vocab-file {_data()}/vocabulary.txt"
    job = gpt_job(checkout, num_ranks, f"{flags} {_OWN} {data}", schedule, more)
    words = re.sub(r"--vocab-size \d+ ", "", " ".join(job.flags)).split()
    warm = warm_ranks(SCRIPT, checkout.path)
    job = replace(job, script=SCRIPT, flags=tuple(words))
    log = job.run(warm=warm)
    return job.run(warm=warm) if log.aborted_at_exit else log


def pretrain_t5(checkout: Checkout, num_ranks: int, flags: str, schedule: str | None) -> Log:
    """Run the checkout's ``pretrain_t5.py`` to its end, with our schedule, or Megatron's own for None."""
    data = f"--data-path {_data()}/documents --vocab-file {_data()}/vocabulary.txt --split 80,10,10"
    tokens = "--legacy-tokenizer --tokenizer-type BertWordPieceLowerCase --vocab-extra-ids 20"
    lengths = "--encoder-seq-length 32 --decoder-seq-length 16 --position-embedding-type learned_absolute"
    job = gpt_job(checkout, num_ranks, f"{flags} {tokens} {lengths} {data}", schedule)
    words = re.sub(r"--vocab-size \d+ |--seq-length \d+ ", "", " ".join(job.flags)).split()
    script = checkout.path / "pretrain_t5.py"
    return replace(job, script=script, flags=tuple(words)).run(warm=warm_ranks(script))
