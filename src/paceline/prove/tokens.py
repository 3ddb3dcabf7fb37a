"""Token counts of texts, from the server that has the tokenizer. Called by `measure.py` for servers whose streams come without usage."""

from typing import Any, cast

import msgspec

from paceline.errors import BadInputError, MissingError
from paceline.prove.client import ChatClient

_ROUTES = ("/tokenize", "/extras/tokenize/count")  # of vLLM and llama.cpp; of llama-cpp-python


class TokenCounter:
    """Counts by one of the routes that servers have for it."""

    def __init__(self, client: ChatClient, model: str, route: str) -> None:
        self._client, self._model, self._route = client, model, route

    @classmethod
    async def find(cls, client: ChatClient, model: str) -> "TokenCounter":
        """Raises BadInputError where there is none: a speed in tokens needs their number."""
        for route in _ROUTES:
            counter = cls(client, model, route)
            if await counter.count("one two three"):
                return counter
        raise BadInputError(
            f"{client.base_url} does not say how many tokens its answers have (no usage in its streams, no route that counts tokens)"
        )

    async def count(self, text: str) -> int | None:
        """Tokens of `text` without special ones; None if the server does not say."""
        if not text:
            return 0
        # The text under each server's name for it; they skip the others.
        body = {"model": self._model, "prompt": text, "content": text, "input": text, "add_special_tokens": False, "add_special": False}
        try:
            status, answer = await self._client.post(self._route, body)
            told: object = msgspec.json.decode(answer)
        except (MissingError, msgspec.DecodeError, RecursionError):
            return None
        if status != 200 or not isinstance(told, dict):
            return None
        fields = cast("dict[str, Any]", told)
        count, tokens = fields.get("count"), fields.get("tokens")
        if isinstance(count, int):
            return count
        return len(cast("list[object]", tokens)) if isinstance(tokens, list) else None
