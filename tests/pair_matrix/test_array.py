"""The covering array: every pair is in a row or impossible, and no row is refused."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from pair_matrix.array import CoveringArray, Space, pairs_of


@st.composite
def spaces(draw: st.DrawFn) -> tuple[Space, set[frozenset[tuple[str, str]]]]:
    """Options with random values, and sets of values that exclude each other, of which none has a neutral value."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=2, max_size=5))
    values = {f"o{i}": [f"v{j}" for j in range(size)] for i, size in enumerate(sizes)}
    words = [(option, name) for option, names in values.items() for name in names[1:]]
    sets = st.frozensets(st.sampled_from(words), min_size=2, max_size=3)
    excluded = draw(st.sets(sets, max_size=5))

    def refusal(row: object) -> str | None:
        return next((str(sorted(some)) for some in excluded if some <= set(dict(row).items())), None)  # type: ignore[call-overload]

    return Space(values, refusal), excluded


@settings(max_examples=40)
@given(spaces(), st.integers(0, 5))
def test_every_pair_is_covered_or_impossible(drawn: tuple[Space, set[frozenset[tuple[str, str]]]], seed: int) -> None:
    space, excluded = drawn
    array = CoveringArray(space, seed)
    rows = list(array.rows())
    assert all(space.refusal(row) is None for row in rows)
    covered = {pair for row in rows for pair in pairs_of(row)}
    every = {
        ((one, a), (other, b))
        for one, other in combinations(space.values, 2)
        for a, b in product(space.values[one], space.values[other])
    }
    assert covered | array.impossible.keys() == every
    # Because neutral values exclude nothing, a pair is impossible only if it is excluded itself.
    assert array.impossible.keys() == {pair for pair in every if any(some <= set(pair) for some in excluded)}


def test_a_seed_gives_the_same_rows_again() -> None:
    space = Space({name: ["a", "b", "c"] for name in "pqrst"}, lambda row: None)
    first, again, other = (list(CoveringArray(space, seed).rows()) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) <= 20, "9 rows are the least; one row per pair would be 90"


def test_a_value_that_needs_another_is_found() -> None:
    """Random completions alone would hardly find the one value that ``a`` needs."""
    values = {"a": ["off", "on"], "b": [str(number) for number in range(60)], "c": ["x", "y"]}
    space = Space(
        values,
        lambda row: "a needs b=59" if row["a"] == "on" and row["b"] != "59" else None,
        lambda option, name: {"b": "59"} if (option, name) == ("a", "on") else {},
    )
    array = CoveringArray(space, 0)
    rows = list(array.rows())
    assert {(row["a"], row["c"]) for row in rows} == set(product(values["a"], values["c"]))
    assert len(array.impossible) == 59 and set(array.impossible.values()) == {"a needs b=59"}
