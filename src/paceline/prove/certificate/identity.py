"""Are the tokens those of plain decoding? Compares both arms, and looks at what a teacher-forced pass says where they part."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.prove.certificate.options import CertifyOptions, ShowProgress
from paceline.prove.certificate.server import Answer, Fields, Prompt, Server
from paceline.prove.results import Divergence


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt as it is sent."""

    question_id: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Arms:
    """`plain` is None where it is one token a request, which no server can speculate on."""

    speculative: Server
    plain: Server | None

    @property
    def teacher(self) -> Server:
        """Who is asked for log-probabilities: one token a request."""
        return self.plain or self.speculative


@dataclass(slots=True)
class Comparison:
    """What comparing one kind of decoding gave."""

    num_compared: int = 0
    num_draft_tokens: int | None = None  # in the speculative answers
    divergences: list[Divergence] = field(default_factory=list[Divergence])
    errors: dict[str, int] = field(default_factory=dict[str, int])  # by their text

    @property
    def is_identical(self) -> bool | None:
        return not self.divergences if self.num_compared else None

    def count_drafts(self, num_draft_tokens: int | None) -> None:
        if num_draft_tokens is not None:
            self.num_draft_tokens = (self.num_draft_tokens or 0) + num_draft_tokens

    def count_error(self, error: str) -> None:
        self.errors[error] = self.errors.get(error, 0) + 1


async def compare(kind: str, arms: Arms, questions: Sequence[Question], options: CertifyOptions, show: ShowProgress) -> Comparison:
    """Every question in both arms; `kind` is "greedy" or "seeded"."""
    comparison = Comparison()
    num_done = 0

    async def one(index: int, question: Question) -> None:
        nonlocal num_done
        await _compare_one(comparison, arms, question, kind, replace(options, seed=options.seed + index))
        num_done += 1
        show(f"same tokens, {kind}", num_done, len(questions))

    await asyncio.gather(*(one(index, question) for index, question in enumerate(questions)))
    comparison.divergences.sort(key=lambda divergence: divergence.question_id)
    return comparison


async def _compare_one(comparison: Comparison, arms: Arms, question: Question, kind: str, options: CertifyOptions) -> None:
    fields: Fields = {"max_tokens": options.max_tokens, "temperature": 0.0, "logprobs": 1}
    if kind == "seeded":
        fields = {**fields, "temperature": options.temperature, "seed": options.seed + 1}
    speculative = await _ask(arms.speculative, question.prompt, fields)
    if speculative.error is not None:
        comparison.count_error(speculative.error)
        return
    if arms.plain is None:
        plain = await _one_by_one(arms.speculative, question.prompt, speculative, fields)
    else:
        plain = await _ask(arms.plain, question.prompt, fields)
    if plain.error is not None:
        comparison.count_error(plain.error)
        return
    comparison.num_compared += 1
    comparison.count_drafts(speculative.num_draft_tokens)
    position = first_difference(plain, speculative)
    if position is not None:
        comparison.divergences.append(await _divergence(arms, question, kind, position, (plain, speculative), options))


async def _ask(server: Server, prompt: Prompt, fields: Fields) -> Answer:
    """The answer, without log-probabilities where the server has none."""
    answer = await server.complete(prompt, fields)
    if answer.error is None or "logprobs" not in fields:
        return answer
    return await server.complete(prompt, {name: value for name, value in fields.items() if name != "logprobs"})


async def _one_by_one(server: Server, prompt: Prompt, other: Answer, fields: Fields) -> Answer:
    """Plain decoding with one request for each token, as far as the other answer went."""
    whole = Answer()
    for _ in range(len(other.token_ids) or len(other.tokens) or len(other.text)):
        answer = await _ask(server, _extended(prompt, whole), {**fields, "max_tokens": 1})
        if answer.error is not None:
            return answer
        if not answer.text and not answer.token_ids:
            return replace(whole, finish_reason="stop")
        text = whole.text + answer.text
        whole = replace(whole, text=text, tokens=whole.tokens + answer.tokens, token_ids=whole.token_ids + answer.token_ids)
        if answer.finish_reason == "stop":
            return replace(whole, finish_reason="stop")
        if not answer.tokens and not answer.token_ids and len(text) >= len(other.text):
            return replace(whole, text=text[: len(other.text)])
    return whole


def _extended(prompt: Prompt, answer: Answer, num_pieces: int | None = None) -> Prompt:
    """The prompt with the first pieces of an answer behind it; all of them without a number."""
    if isinstance(prompt, tuple):
        return prompt + answer.token_ids[:num_pieces]
    if num_pieces is None:
        return prompt + answer.text
    return prompt + ("".join(answer.tokens[:num_pieces]) if answer.tokens else answer.text[:num_pieces])


def first_difference(plain: Answer, speculative: Answer) -> int | None:
    """The first place where two answers differ, by what both have: token ids, or texts of tokens, or characters.

    A plain answer that was cut off at its length says nothing about what follows.
    """
    ours, theirs = pieces(plain, speculative)
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return position
    if len(ours) == len(theirs):
        return None
    is_cut = len(ours) < len(theirs) and plain.finish_reason is None
    return None if is_cut else min(len(ours), len(theirs))


def pieces(plain: Answer, speculative: Answer) -> tuple[tuple[int, ...] | tuple[str, ...], tuple[int, ...] | tuple[str, ...]]:
    """Both answers in the finest form that both have."""
    if plain.token_ids and speculative.token_ids:
        return plain.token_ids, speculative.token_ids
    if plain.tokens and speculative.tokens:
        return plain.tokens, speculative.tokens
    return tuple(plain.text), tuple(speculative.text)


async def _divergence(
    arms: Arms, question: Question, kind: str, position: int, answers: tuple[Answer, Answer], options: CertifyOptions
) -> Divergence:
    gap = await _top2_gap(arms.teacher, question.prompt, answers[0], position)
    # Under a seed the noise decides as well, and it cannot be asked for: two tokens far apart in the law may be a near tie.
    is_near_tie = None if gap is None or kind != "greedy" else gap < options.epsilon
    plain, speculative = (_shown(answer, position) for answer in answers)
    return Divergence(question.question_id, kind, position, (plain, speculative), gap, is_near_tie)


async def _top2_gap(server: Server, prompt: Prompt, answer: Answer, position: int) -> float | None:
    """Nats between the two likeliest tokens behind the common beginning."""
    if isinstance(prompt, tuple) and not answer.token_ids:
        return None
    context = _extended(prompt, answer, position)
    found = await server.complete(context, {"max_tokens": 1, "temperature": 0.0, "logprobs": 2})
    if found.error is not None or not found.top or len(found.top[0]) < 2:
        return None
    first, second = sorted(found.top[0].values(), reverse=True)[:2]
    return first - second


def _shown(answer: Answer, position: int) -> str:
    if answer.tokens:
        return answer.tokens[position] if position < len(answer.tokens) else "<end>"
    if answer.token_ids:
        return f"<{answer.token_ids[position]}>" if position < len(answer.token_ids) else "<end>"
    return answer.text[position] if position < len(answer.text) else "<end>"


def salt(name: str, seed: int) -> str:
    """A `cache_salt`: neither arm may find what the other one computed."""
    return hashlib.sha256(f"{name} {seed}".encode()).hexdigest()[:16]
