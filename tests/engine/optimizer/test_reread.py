"""Data iterators whose items are needed more than once: other ways to read them than ``next`` are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.optimizer.replay import Rewindable
from megatron.zero_bubble.engine.optimizer.reread import Reread
from megatron.zero_bubble.integration.adapter.slice_data import RepeatedBatches
from megatron.zero_bubble.integration.adapter.vocabulary.batches import ReadAhead

WRAPPERS = [Rewindable, RepeatedBatches, ReadAhead]
each = pytest.mark.parametrize("wrap", WRAPPERS)


class Source:
    """Batches of a job, with what other loops give them: methods, an inner iterator, a tokenizer that is called."""

    def __init__(self) -> None:
        self.position = 0
        self.iterable = iter(range(100))
        self.loaders = [iter(range(100)), iter(range(100))]
        self.by_name = {"text": iter(range(100))}
        self.bare = OnlyNext()
        self.name = "corpus"
        self.tokenizer = Tokenizer()
        self.get_later = partial(self.get_next, 2)

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def __len__(self) -> int:
        return 7

    def get_next(self, count: int = 1) -> int:
        self.position += count
        return self.position

    def reset(self) -> None:
        self.position = 0


class OnlyNext:
    """An iterator without ``__iter__``."""

    def __next__(self) -> int:
        raise AssertionError("it was read")


class Tokenizer:
    def __call__(self, text: str) -> int:
        return len(text)


class GetNextOnly:
    """As in loops that read batches by a method of their own."""

    def get_next(self) -> int:
        return 1


@each
def test_next_and_plain_attributes_are_those_of_the_source(wrap: type[Reread]) -> None:
    batches: Any = wrap(Source())
    assert [next(batches), next(iter(batches))] == [1, 2]
    assert (batches.name, batches.position, len(batches), bool(batches)) == ("corpus", 2, 7, True)
    assert batches.tokenizer("four") == 4
    assert not hasattr(batches, "missing")
    assert bool(wrap(iter([0]))) and next(wrap(iter([0]))) == 0


@each
@pytest.mark.parametrize(
    "read",
    [
        lambda batches: batches.get_next(),
        lambda batches: batches.get_next(count=2),
        lambda batches: batches.reset(),
        lambda batches: batches.get_later(),
        lambda batches: next(batches.iterable),
        lambda batches: next(batches.loaders[0]),
        lambda batches: [next(loader) for loader in batches.loaders],
        lambda batches: next(batches.by_name["text"]),
        lambda batches: next(batches.bare),
    ],
)
def test_another_way_to_read_is_refused_and_reads_nothing(wrap: type[Reread], read: Any) -> None:
    source = Source()
    with pytest.raises(UserError, match=r"must read its data with next\(data_iterator\), because .*; got a use of"):
        read(wrap(source))
    assert (source.position, next(source.iterable)) == (0, 0)


@each
@pytest.mark.parametrize(("source", "name"), [(GetNextOnly(), "GetNextOnly"), ([1, 2], "list")])
def test_a_source_that_is_no_iterator_is_refused(wrap: type[Reread], source: Any, name: str) -> None:
    with pytest.raises(UserError, match=f"got a {name}, which has no __next__; .* or {wrap.otherwise}"):
        wrap(source)


@pytest.mark.parametrize("wrap", [Rewindable, RepeatedBatches])
def test_methods_of_an_inner_wrapper_are_refused(wrap: type[Reread]) -> None:
    batches: Any = ReadAhead(wrap(Source()))
    with pytest.raises(UserError, match="with vocabulary parallelism"):
        batches.get_next()


def test_megatrons_own_iterator_is_read_by_next() -> None:
    from megatron.core.rerun_state_machine import RerunDataIterator

    batches: Any = Rewindable(RerunDataIterator(iter(range(4))))
    assert [next(batches), next(batches)] == [0, 1]
    batches.rewind()
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match=r"got a use of RerunDataIterator\.advance"):
        batches.advance()
