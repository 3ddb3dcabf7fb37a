"""Does every sampling option keep its law under speculation? Samples of the speculative arm against the law of the model.

Each output position behind the first, given the tokens before it, is one table of counts: the likeliest 15 tokens and the rest. Tables
of one option are summed, which keeps chi-square's law, since each conditions on what came before (Billingsley 1961, for Markov chains).
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.prove.certificate.cases import NEUTRAL, Case, cases
from paceline.prove.certificate.chi_square import ChiSquare, goodness_of_fit, homogeneity
from paceline.prove.certificate.identity import Arms
from paceline.prove.certificate.law import Law, Options, law_of
from paceline.prove.certificate.options import CertifyOptions, ShowProgress
from paceline.prove.certificate.server import Answer, Prompt, Server
from paceline.prove.results import LawTest

NUM_BINS = 15
MIN_CONTEXT_SAMPLES = 12  # contexts that fewer samples have come to are left out: two bins need 10 expected counts
MAX_CONTEXTS = 12  # of one option
MAX_LOGPROBS = 20  # OpenAI's limit
_FIRST_SEED = 1_000_000
_UNLIKELY = 0.001


@dataclass(slots=True)
class LawReport:
    tests: list[LawTest] = field(default_factory=list[LawTest])
    refused: dict[str, str] = field(default_factory=dict[str, str])  # by option: the server's words
    unknown: list[str] = field(default_factory=list[str])
    errors: Counter[str] = field(default_factory=Counter[str])


class LawTests:
    """The tests of one server. Every fault of it is part of the report."""

    def __init__(self, arms: Arms, prompt: Prompt, options: CertifyOptions, show: ShowProgress) -> None:
        self._arms, self._options, self._show = arms, options, show
        self._teacher = Teacher(arms.teacher, prompt)
        self._has_names = False  # the names of tokens come from the tokenizer, not with each sample
        self._num_done = self._num_samples = 0
        self.report = LawReport()

    async def cases(self, word_id: int | None) -> list[Case]:
        """Cases that fit the law at the first position that is tested."""
        first = await self._teacher.first_answer()
        if first is None:
            return cases({}, (), word_id)
        self._has_names = bool(first.token_ids) and await self._teacher.server.detokenize(first.token_ids[:1]) == first.tokens[0]
        return cases(await self._teacher.logprobs(first.tokens[:1], first) or {}, first.tokens[:1], word_id)

    async def run(self, chosen: Sequence[Case]) -> LawReport:
        """All cases at once."""
        self._num_samples = sum(self._options.num_samples * (1 if case.options is not None else 2) for case in chosen)
        results = await asyncio.gather(*(self._run_case(case) for case in chosen))
        self.report.tests.extend(test for test in results if test is not None)
        return self.report

    async def _run_case(self, case: Case) -> LawTest | None:
        good = await self._samples(self._arms.speculative, case, self._options.seed)
        if not good:
            if case.name not in self.report.refused:
                self.report.unknown.append(f"{case.name}: there are no samples whose tokens have names")
            return None
        drafted = [answer.num_draft_tokens for answer in good if answer.num_draft_tokens is not None]
        num_drafted = sum(count > 0 for count in drafted) if drafted else None
        without: ChiSquare | None = None
        if case.options is not None:
            result = await self._against_law(case, case.options, good)
            without = await self._against_law(case, case.without, good) if case.options != case.without else None
        elif self._arms.plain is None:
            self.report.unknown.append(f"{case.name}: log-probabilities do not give its law, and there is no plain arm to sample")
            return None
        else:
            result = against_plain(good, await self._samples(self._arms.plain, case, self._options.seed + 1), case.num_tokens)
        if result is None or result.num_degrees == 0:
            self.report.unknown.append(f"{case.name}: in no context were there enough samples, or log-probabilities, to test it")
            return None
        return LawTest(
            option=case.name,
            chi2=round(result.statistic, 4),
            p=result.p,
            num_samples=len(good),
            num_degrees=result.num_degrees,
            num_drafted=num_drafted,
            against="law" if case.options is not None else "plain",
            is_as_without=without is not None and result.p < _UNLIKELY < without.p,
        )

    async def _samples(self, server: Server, case: Case, seed: int) -> list[Answer]:
        """Independent samples with seeds and names. The first one alone tells whether the option is refused."""
        first = await self._sample(server, case, _FIRST_SEED * (seed + 1))
        if first.is_refusal:
            self.report.refused[case.name] = first.error or ""
        if first.error is not None:
            if not first.is_refusal:
                self.report.errors[first.error] += 1
            return []
        seeds = range(_FIRST_SEED * (seed + 1) + 1, _FIRST_SEED * (seed + 1) + self._options.num_samples)
        answers = [first, *await asyncio.gather(*(self._sample(server, case, each) for each in seeds))]
        self.report.errors.update(answer.error for answer in answers if answer.error is not None)
        named = [await self._named(answer) for answer in answers if answer.error is None]
        return [answer for answer in named if answer.tokens]

    async def _sample(self, server: Server, case: Case, seed: int) -> Answer:
        fields = {**NEUTRAL, "temperature": 1.0, "max_tokens": case.num_tokens, "seed": seed, **case.fields}
        answer = await server.complete(self._teacher.prompt, fields if self._has_names else {**fields, "logprobs": 1})
        self._num_done += 1
        self._show("laws of the sampling options", self._num_done, self._num_samples)
        return answer

    async def _named(self, answer: Answer) -> Answer:
        if not self._has_names:
            return answer
        return replace(answer, tokens=tuple([await self._teacher.name(token_id) for token_id in answer.token_ids]))

    async def _against_law(self, case: Case, options: Options, answers: Sequence[Answer]) -> ChiSquare | None:
        tables = tables_of(answers, case.num_tokens)
        examples = {answer.tokens[:position]: answer for answer in answers for position in range(1, len(answer.tokens))}
        result = ChiSquare()
        for context in _largest(tables):
            logprobs = await self._teacher.logprobs(context, examples[context])
            if logprobs is None:
                return None
            law = law_of(logprobs, context, options)
            if law is not None:
                result += fit(law, tables[context])
        return result


def tables_of(answers: Sequence[Answer], num_tokens: int) -> dict[tuple[str, ...], Counter[str]]:
    """Counts of the next token by what was said before it, at positions where a draft can have been verified."""
    tables: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for answer in answers:
        for position in range(1, min(num_tokens - 1, len(answer.tokens))):
            tables[answer.tokens[:position]][answer.tokens[position]] += 1
    return tables


def _largest(tables: Mapping[tuple[str, ...], Counter[str]]) -> list[tuple[str, ...]]:
    usable = [context for context, counts in tables.items() if counts.total() >= MIN_CONTEXT_SAMPLES]
    return sorted(usable, key=lambda context: (-tables[context].total(), context))[:MAX_CONTEXTS]


def fit(law: Law, counts: Mapping[str, int]) -> ChiSquare:
    """Counts against a law: its likeliest tokens and one bin for all others."""
    bins = list(law.probs)[:NUM_BINS]
    rest_prob = sum(prob for token, prob in law.probs.items() if token not in bins) + law.rest
    num_rest = sum(count for token, count in counts.items() if token not in bins)
    num_forbidden = sum(count for token, count in counts.items() if token not in law.probs) if law.rest == 0 else 0
    observed = [counts.get(token, 0) for token in bins] + [num_rest - num_forbidden]
    return goodness_of_fit(observed, [law.probs[token] for token in bins] + [rest_prob], num_forbidden)


def against_plain(speculative: Sequence[Answer], plain: Sequence[Answer], num_tokens: int) -> ChiSquare | None:
    """Two samples: of each context the likeliest tokens of both together, and the rest."""
    if not plain:
        return None
    ours, theirs = tables_of(speculative, num_tokens), tables_of(plain, num_tokens)
    result = ChiSquare()
    for context in _largest(ours):
        if theirs[context].total() < MIN_CONTEXT_SAMPLES:
            continue
        bins = [token for token, _ in (ours[context] + theirs[context]).most_common(NUM_BINS)]
        rows = [[table[context][token] for token in bins] for table in (ours, theirs)]
        rests = [table[context].total() - sum(row) for table, row in zip((ours, theirs), rows, strict=True)]
        result += homogeneity([*rows[0], rests[0]], [*rows[1], rests[1]])
    return result


class Teacher:
    """Log-probabilities of the token behind a context, each asked for once: options do not change them."""

    def __init__(self, server: Server, prompt: Prompt) -> None:
        self.server, self.prompt = server, prompt
        self._known: dict[tuple[str, ...], asyncio.Task[Mapping[str, float] | None]] = {}
        self._names: dict[int, asyncio.Task[str | None]] = {}

    async def first_answer(self) -> Answer | None:
        """The likeliest first token; None without log-probabilities."""
        answer = await self._ask(self.prompt)
        return answer if answer.error is None and answer.tokens else None

    async def logprobs(self, context: tuple[str, ...], example: Answer) -> Mapping[str, float] | None:
        """Of the token behind `context`, with which `example` begins. None if the server does not say."""
        if context not in self._known:
            self._known[context] = asyncio.create_task(self._logprobs(context, example))
        return await self._known[context]

    async def name(self, token_id: int) -> str:
        """The text of a token."""
        if token_id not in self._names:
            self._names[token_id] = asyncio.create_task(self.server.detokenize((token_id,)))
        return await self._names[token_id] or f"<{token_id}>"

    async def _logprobs(self, context: tuple[str, ...], example: Answer) -> Mapping[str, float] | None:
        if isinstance(self.prompt, tuple):
            answer = await self._ask(self.prompt + example.token_ids[: len(context)])
        else:
            answer = await self._ask(self.prompt + "".join(context))
        return answer.top[0] if answer.error is None and answer.top and len(answer.top[0]) > 1 else None

    async def _ask(self, prompt: Prompt) -> Answer:
        return await self.server.complete(prompt, {**NEUTRAL, "temperature": 0.0, "max_tokens": 1, "logprobs": MAX_LOGPROBS})
