"""What clients are told when the engine fails."""

from paceline.engine.loop import _failure_reason
from paceline.errors import MissingError


def test_an_error_for_users_is_told_and_others_are_not() -> None:
    told = _failure_reason(MissingError("there is too little memory for a pass of 8,192 tokens; lower --max-num-batched-tokens"))
    assert told == "the engine failed: there is too little memory for a pass of 8,192 tokens; lower --max-num-batched-tokens"
    assert _failure_reason(RuntimeError("a secret of the prompt")) == "the engine failed: RuntimeError"
