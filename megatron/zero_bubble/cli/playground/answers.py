"""The answers to a page's questions as JSON, for a server or for a page that plans by itself; the latest are kept."""

from __future__ import annotations

import gzip
import json
from typing import Any, NamedTuple

from megatron.zero_bubble.cli.playground.job import PageJob
from megatron.zero_bubble.cli.playground.questions import PageAnswer, PageQuestion, page_answer, read_question
from megatron.zero_bubble.core.errors import beyond_floats

_KEPT = 64
"""Number of cached answers; the largest take about 3 MB each."""
_FAST = 1
"""Level of the compression, by which a drawing of 10 MB becomes small."""


class Encoded(NamedTuple):
    """The parts of an answer: the figures as JSON, the drawing as compressed JSON, and the compressed file."""

    plan: bytes
    drawing: bytes
    file: bytes


class Answers:
    """Plans, and keeps the latest answers.

    Args:
        job: gives costs and ranks, in place of the flags for them.
    """

    def __init__(self, job: PageJob | None = None) -> None:
        self.job = job
        self.kept: dict[str, Encoded] = {}

    def make(self, query: str, asked: PageQuestion) -> Encoded:
        """Answer a question that has been read, and keep the answer in place of the oldest.

        Raises:
            ValueError: if there is no plan; ``refusal`` says it in a sentence, as for OverflowError.
            OverflowError: for figures that no float can hold.
        """
        self.kept[query] = encoded = _encode(page_answer(asked, self.job))
        for old in list(self.kept)[:-_KEPT]:
            self.kept.pop(old, None)
        return encoded

    def reply(self, query: str, part: str) -> str:
        """Return a part of the answer to a question, or the refusal, as JSON: what a worker of the page posts."""
        try:
            encoded = self.kept.get(query) or self.make(query, read_question(query, self.job))
        except (ValueError, OverflowError) as error:
            return json.dumps({"error": refusal(error)})
        body: bytes = getattr(encoded, part)
        return (body if part == "plan" else gzip.decompress(body)).decode()


def refusal(error: ValueError | OverflowError) -> str:
    """Return the sentence that says why a question has no answer."""
    return beyond_floats(error) if isinstance(error, OverflowError) else str(error)


def _encode(found: PageAnswer) -> Encoded:
    def encode(content: dict[str, Any]) -> bytes:
        try:
            return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        except ValueError:
            raise OverflowError("a figure in the answer is infinite") from None

    return Encoded(
        encode(found.figures), gzip.compress(encode(found.drawing), _FAST), gzip.compress(found.file().encode(), _FAST)
    )
