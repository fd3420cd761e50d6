"""What a costs file must not contain, and what the message then suggests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, read_costs_file
from megatron.zero_bubble.core.ir import Placement

TIMES = {"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1}
LAYER = {"layers": ["a*4"], "parts": {"a": TIMES}}


def parse(text: str | dict[str, Any]) -> CostsFile:
    return CostsFile.parse(text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**TIMES, "com_ms": 1}, "got 'com_ms'; did you mean comm_ms[?] rename or remove it"),
        ({**TIMES, "Activations": 1}, "got 'Activations'; did you mean activation[?]"),
        ({**TIMES, "zzz": 1}, "allowed keys are activation, .*; got 'zzz'; remove or rename it"),
        ({**LAYER, "parts": {"a": {**TIMES, "forwards_ms": 1}}}, "got 'forwards_ms'; did you mean forward_ms[?]"),
        ('{"forward_ms": 1, "forward_ms": 2, "backward_ms": 1, "wgrad_ms": 1}', "got 'forward_ms' 2 times; remove all"),
        ('{"layers": ["a"], "parts": {"a": {"wgrad_ms": 1, "wgrad_ms": 2}}}', "got 'wgrad_ms' 2 times"),
        ({**TIMES, "links": [[0, 1, 1.0], [0, 1, 2.0]]}, r"at most once; got \[0, 1, 2.0\]; remove or correct it"),
        ({**TIMES, "links": [[0, 0, 1.0]]}, r"every pair of two ranks, 0 or above, at most once; got \[0, 0, 1.0\]"),
        ({**TIMES, "links": [[-1, 0, 1.0]]}, r"got \[-1, 0, 1.0\]"),
        (dict.fromkeys(TIMES, 0), "F, B or W must take some time; got 0 ms for all of them"),
        ({name: [0, 0] for name in TIMES}, "F, B or W must take some time"),
        ({"layers": ["a"], "parts": {"a": dict.fromkeys(TIMES, 0)}}, "F, B or W must take some time"),
        ('{"forward_ms": %s}' % (5000 * "9"), "a number has at most 600 digits; got 99999999999999999999... of 5000"),
    ],
)
def test_invalid_content_is_refused(content: str | dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(content)


@pytest.mark.parametrize("content", [TIMES, LAYER])
def test_links_are_those_of_the_pipeline(content: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({**content, "links": [[0, 3, 1.0], [2, 99, 1.0]]}))
    for place in (Placement.linear, Placement.vee):
        with pytest.raises(UserError, match=r"costs.json: links must be .* 0 to 3 .*; got \[2, 99, 1.0\]; "):
            read_costs_file(file).on(place(4))
    parse({**content, "links": [[0, 3, 1.0]]}).on(Placement.linear(4))
    parse({**content, "wgrad_ms": 0} if content is TIMES else content)  # one of the passes may take no time
