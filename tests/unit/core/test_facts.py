"""What the facts say of a prompt: whether it fits, and which remedy there is."""

from dataclasses import replace

import pytest

from paceline.errors import BadInputError
from tests.fakes.fake_engine import FACTS

SMALL = replace(FACTS, max_model_len=128, max_position_embeddings=1000, num_pages=100, page_size=16)


def refusal(num_tokens: int) -> str:
    with pytest.raises(BadInputError) as caught:
        SMALL.check_prompt(num_tokens, "messages")
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    return str(caught.value)


def test_a_prompt_leaves_room_for_one_token() -> None:
    SMALL.check_prompt(127)
    assert refusal(128).startswith("prompt has 128 tokens, limit 128, the answer included; shorten it")


@pytest.mark.parametrize(("num_tokens", "flag"), [(128, 256), (255, 256), (256, 512), (700, 1000), (999, 1000)])
def test_the_flag_is_offered_up_to_the_models_own_limit(num_tokens: int, flag: int) -> None:
    assert refusal(num_tokens).endswith(f"shorten it or start with --max-model-len {flag}")


@pytest.mark.parametrize("num_tokens", [1000, 5000])
def test_beyond_it_only_a_shorter_prompt_helps(num_tokens: int) -> None:
    assert refusal(num_tokens).endswith("; shorten it")


def test_more_kv_memory_is_asked_for_where_it_is_short() -> None:
    with pytest.raises(BadInputError, match=r"start with --max-model-len 256$"):
        replace(SMALL, num_pages=16).check_prompt(200)
    with pytest.raises(BadInputError, match=r"start with --max-model-len 256 and a larger --kv-cache-memory-bytes$"):
        replace(SMALL, num_pages=15).check_prompt(200)
