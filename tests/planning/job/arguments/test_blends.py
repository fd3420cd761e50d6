import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.blends import Blend, parse_blend


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        ("a", Blend(("a",), None)),
        ("a b", Blend(("a", "b"), None)),
        ("0.3 a 0.7 b", Blend(("a", "b"), (0.3, 0.7))),
        ("2 a", Blend(("a",), (2.0,))),
    ],
)
def test_blends_are_parsed_as_in_megatron(words: str, blend: Blend) -> None:
    assert parse_blend("--data-path", words.split()) == blend


@pytest.mark.parametrize("words", ["0.3 a b", "a 0.3", "0.3 a 0.7", "0.3 0.7 a", "0.3", "a 0.3 b 0.7"])
def test_weights_and_prefixes_must_alternate(words: str) -> None:
    with pytest.raises(UserError, match=f"--data-path takes prefixes, or a weight before every prefix, got {words}"):
        parse_blend("--data-path", words.split())


def test_weights_must_be_positive() -> None:
    with pytest.raises(UserError, match=r"got 0\.0; remove that data set"):
        parse_blend("--data-path", ["0", "a", "1", "b"])
