"""The start-up check of two tokenizers, and that it needs no torch."""

import subprocess
import sys

import pytest

from paceline.errors import BadInputError
from paceline.speculative.same_tokens import check_same_tokens


def vocabulary(*tokens: str) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def test_equal_tokens_pass_with_either_side_longer() -> None:
    check_same_tokens(vocabulary("a", "b", "c"), vocabulary("a", "b", "c"))
    check_same_tokens(vocabulary("a", "b", "c", "<pad>"), vocabulary("a", "b", "c"))
    check_same_tokens(vocabulary("a", "b"), vocabulary("a", "b", "c"))
    check_same_tokens({"a": 0, "c": 5}, {"a": 0, "c": 5, "d": 9})


def test_the_first_differing_id_is_named_with_both_tokens() -> None:
    with pytest.raises(BadInputError, match=r"id 1 is 'b' in the target and 'x' in the draft model") as error:
        check_same_tokens(vocabulary("a", "b", "c", "d"), vocabulary("a", "x", "y"))
    assert error.value.param == "draft"


def test_an_id_used_by_one_side_only_differs() -> None:
    with pytest.raises(BadInputError, match="id 1 is unused in the target and 'b' in the draft model"):
        check_same_tokens({"a": 0, "c": 2}, vocabulary("a", "b", "c"))


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(BadInputError, match="share no token"):
        check_same_tokens({}, vocabulary("a"))


def test_it_reaches_no_torch() -> None:
    code = "import sys, paceline.speculative.same_tokens; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
