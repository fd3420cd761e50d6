"""Tests of the excerpt of a large timeline: three parts on one scale each, with numbers, within the width."""

from __future__ import annotations

import re

import pytest

from megatron.zero_bubble import PassCosts, Timeline, build, simulate
from megatron.zero_bubble.core.render.excerpt import draw
from megatron.zero_bubble.core.render.text import render_text


def simulated(name: str, num_ranks: int, num_microbatches: int, wgrad_ms: float = 9.3) -> Timeline:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return simulate(schedule, PassCosts.uniform(schedule.placement, 18.5, 18.1, wgrad_ms, 0.6))


def parts(drawn: str) -> list[list[str]]:
    """The lines of each part: title, times, rows."""
    *found, left_out = [block.splitlines() for block in drawn.split("\n\n")]
    assert "Left out: " in " ".join(left_out)
    return found


def numbered(row: str) -> list[str]:
    return re.findall(r"[FBWfbw]+\d+", row)


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "whole"), [(15, 63, True), (16, 2, False), (2, 64, False)])
def test_small_timelines_are_drawn_whole(num_ranks: int, num_microbatches: int, whole: bool) -> None:
    timeline = simulated("zb-h1", num_ranks, num_microbatches)
    assert (draw(timeline, 100) == render_text(timeline, 100)) == whole


PICTURE = """\
warm-up
         0.0 ms                  286.5 ms                573.0 ms
 rank 0 |F0- F1- F2- F3-- F4- ~~ - F16 F17 F18- F19 F ~~ F31 ................|
 rank 1 |....F0- F1-- F2- F3- ~~ - F15 F16- F17 F18 F ~~ F30 ................|
rank 15 |.................... ~~ F0- F1- F2- F3-- F4- ~~ - F16 ..............|
rank 16 |.................... ~~ ....F0- F1-- F2- F3- ~~ - F15 ..............|
rank 30 |.................... ~~ .................... ~~ F0- F1- .....B0- F2-|
rank 31 |.................... ~~ .................... ~~ ....F0- B0-- F1- B1-|

steady state: the same passes every 45.9 ms, 1 microbatch later
         3,375.0 ms          3,420.9 ms
 rank 0 |F79---- B48---- W48 F80---- B49---- W49 |
 rank 1 |--- W47 F79---- B49---- W48 F80---- B50-|
rank 15 |-W41 F73---- B57---- W42 F74---- B58--- |
rank 16 |-B57---- W41 F73---- B58---- W42 F74----|
rank 30 |-B65- W35 F67---- B66--- W36 F68---- B67|
rank 31 |-F66- B66---- W35 F67---- B67---- W36 F-|

cool-down
         6,477.7 ms              6,618.7 ms              6,759.7 ms
 rank 0 |--- W119 .....B120-- ~~ -B123--- W123 ...... ~~ .....B127----- W127 |
 rank 1 |....B120----- W119 . ~~ --- ......B124-----  ~~ ---- W126 W127 .....|
rank 15 |......B127----- W112 ~~ ---- W125 W126 W127  ~~ ....................|
rank 16 |---- W111- W112 W113 ~~ ---- W126 W127 ..... ~~ ....................|
rank 30 |---- W125 W126 W127  ~~ .................... ~~ ....................|
rank 31 |---- W126 W127 ..... ~~ .................... ~~ ....................|

Left out: ranks 2-14, 17-29; 88 of 128 microbatches. `zero-bubble plan --format
svg` draws everything.
"""


def test_picture_of_zb_h1() -> None:
    assert draw(simulated("zb-h1", 32, 128), 80) == PICTURE


@pytest.mark.parametrize("width", [72, 80, 100, 160])
@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "v-min", "interleaved-1f1b"])
def test_parts_fit_the_width_with_aligned_columns_and_numbers(name: str, width: int) -> None:
    drawn = draw(simulated(name, 32, 128), width)
    assert max(map(len, drawn.splitlines())) <= width
    for _, _, *rows in parts(drawn):
        assert [row.partition("|")[0].split() for row in rows] == [["rank", r] for r in "0 1 15 16 30 31".split()]
        assert len({len(row) for row in rows}) == 1
        assert len({tuple(match.start() for match in re.finditer(" ~~ ", row)) for row in rows}) == 1
        assert len({number for row in rows for number in numbered(row)}) >= 4


def test_warm_up_shows_the_start_of_each_rank_and_cool_down_its_end() -> None:
    warm_up, _, cool_down = parts(draw(simulated("zb-h1", 32, 128), 100))
    for row in warm_up[2:]:
        assert "F0" in numbered(row)
    for row in cool_down[2:]:
        assert numbered(row)[-1] == "W127"


def test_columns_of_steady_state_are_times() -> None:
    """The second time is above the column of the same pass, one microbatch later."""
    _, (title, times, first, *_), _ = parts(draw(simulated("zb-h1", 32, 128), 100))
    assert title == "steady state: the same passes every 45.9 ms, 1 microbatch later"
    begin, later = (first.index(name) for name in numbered(first)[::3])
    assert times.index("3,375.0 ms") == begin
    assert times.index("3,420.9 ms") == later
    assert numbered(first)[::3] == ["F79", "F80"]


def test_long_period_is_said_to_be_cut() -> None:
    title = parts(draw(simulated("1f1b", 16, 64), 80))[1][0]
    assert title == "steady state: start of a period of 752.4 ms, 16 microbatches"


def test_without_a_period_the_middle_is_drawn() -> None:
    timeline = simulated("breadth-first", 16, 64)
    title, times, *_ = parts(draw(timeline, 100))[1]
    assert title == "middle of the run (no steady state was found)"
    assert 0 < timeline.makespan_ms / 2 - float(times.strip(" ms").replace(",", "")) < 150


def test_left_out_ranks_and_microbatches_are_listed() -> None:
    drawn = draw(simulated("zb-h1", 16, 66), 100)
    shown = {int(name[1:]) for rows in parts(drawn) for row in rows[2:] for name in numbered(row)}
    (ranks, listed) = re.findall(r"Left out: ranks ([\d, -]+); microbatches ([\d, -]+)\.", drawn.replace("\n", " "))[0]
    assert ranks == "2-6, 9-13"
    ends = [[int(end) for end in ends.split("-")] for ends in listed.split(", ")]
    assert {number for each in ends for number in range(each[0], each[-1] + 1)} == set(range(66)) - shown
    assert re.search(r"; \d+ of 256 microbatches\.", draw(simulated("zb-h1", 64, 256), 160))


def test_second_stage_of_a_rank_is_in_lower_case() -> None:
    timeline = simulated("zb-v", 16, 64)
    drawn = draw(timeline, 100)
    assert "Lower case: the second stage of a rank." in drawn
    last = parts(drawn)[0][-1]
    assert numbered(last)[:3] == ["F0", "f0", "F1"]


def test_very_short_passes_lose_their_numbers_only() -> None:
    _, (_, _, *rows), _ = parts(draw(simulated("zb-h1", 16, 64, wgrad_ms=0.5), 100))
    assert not re.search(r" W\d", " ".join(rows))
    assert len({name for row in rows for name in numbered(row) if name.startswith("B")}) >= 6
