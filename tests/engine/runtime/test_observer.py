"""Several observers as one: every event reaches all of them, in the order of its kind."""

import inspect

import pytest

from megatron.zero_bubble.engine.runtime.observer import IterationObserver, Observers

EVENTS = {
    name: list(inspect.signature(event).parameters)[1:]
    for name, event in inspect.getmembers(IterationObserver, inspect.isfunction)
}
INNER_FIRST = {"end", "completed", "sent", "posted", "received", "settled", "validated", "end_iteration"}


@pytest.mark.parametrize("event", EVENTS)
def test_events_that_end_something_reach_the_innermost_observer_first(event: str) -> None:
    informed: list[str] = []
    outer, inner = IterationObserver(), IterationObserver()
    setattr(outer, event, lambda *_: informed.append("outer"))
    setattr(inner, event, lambda *_: informed.append("inner"))
    getattr(Observers([outer, inner]), event)(*EVENTS[event])
    assert informed == (["inner", "outer"] if event in INNER_FIRST else ["outer", "inner"])
