"""Log-probabilities in the two shapes that OpenAI's endpoints give them, and prompts' in vLLM's. Called by `answers.py`."""

from collections.abc import Sequence
from itertools import accumulate

from paceline.core.outcome import TokenLogprobs
from paceline.core.request import Request
from paceline.server.detokenize import ReportedToken, Vocabulary


class LogprobWriter:
    """Writes the `logprobs` of one answer's choices, in one piece or as they come."""

    def __init__(self, vocabulary: Vocabulary, is_chat: bool) -> None:
        self._vocabulary = vocabulary
        self._is_chat = is_chat
        self._offsets: dict[int, int] = {}  # by choice: characters so far

    def entry(self, index: int, tokens: Sequence[ReportedToken]) -> dict[str, object] | None:
        """The next tokens of choice `index`; None if there are none, as for requests that do not ask."""
        if not tokens:
            return None
        if self._is_chat:
            return chat_logprobs(self._vocabulary, tokens)
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(self._vocabulary.token_text(token.token_id)) for token in tokens)
        return completion_logprobs(self._vocabulary, tokens, offset)


def chat_logprobs(vocabulary: Vocabulary, tokens: Sequence[ReportedToken]) -> dict[str, object]:
    """`logprobs` of a chat choice or delta."""
    content: list[dict[str, object]] = []
    for token in tokens:
        entry = _chat_entry(vocabulary, token.token_id, token.logprobs.logprob)
        top = zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True)
        entry["top_logprobs"] = [_chat_entry(vocabulary, token_id, logprob) for token_id, logprob in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(vocabulary: Vocabulary, tokens: Sequence[ReportedToken], first_offset: int) -> dict[str, object]:
    """`logprobs` of a completion choice; `first_offset`: characters of the answer before these tokens.

    As in OpenAI's the chosen token is among its `top_logprobs`, so that these are one more than asked for if it is not of the likeliest.
    """
    texts = [vocabulary.token_text(token.token_id) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprobs.logprob for token in tokens],
        "top_logprobs": [_by_text(vocabulary, token) for token in tokens],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=first_offset)),
    }


def prompt_logprobs(vocabulary: Vocabulary, request: Request, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, object] | None] | None:
    """vLLM's `prompt_logprobs`: for each prompt token the entries of itself and the likeliest, by id; nothing for the first one.

    None for a request that does not ask.
    """
    if request.sampling.num_prompt_logprobs is None:
        return None
    entries: list[dict[str, object] | None] = [None]
    for token_id, own in zip(request.prompt_token_ids[1:], logprobs, strict=True):
        by_id = {token_id: own.logprob, **dict(zip(own.top_token_ids, own.top_logprobs, strict=True))}
        entries.append({str(other): {"logprob": value, "decoded_token": vocabulary.token_text(other)} for other, value in by_id.items()})
    return entries


def _chat_entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, object]:
    return {"token": vocabulary.token_text(token_id), "logprob": logprob, "bytes": list(vocabulary.shown_bytes(token_id))}


def _by_text(vocabulary: Vocabulary, token: ReportedToken) -> dict[str, float]:
    likeliest = dict(zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True))
    return {vocabulary.token_text(token_id): logprob for token_id, logprob in {**likeliest, token.token_id: token.logprobs.logprob}.items()}
