"""The certificate of a server, over HTTP: finds out what it offers, compares tokens, tests laws, and says what it breaks."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp

from paceline.prove.certificate.cases import WORDS, list_text, page_aligned
from paceline.prove.certificate.chi_square import holm_thresholds
from paceline.prove.certificate.findings import absences, broken_laws, broken_tokens, failures, unknown_divergences, unseen_drafts
from paceline.prove.certificate.identity import Arms, Comparison, Question, compare, salt
from paceline.prove.certificate.law_tests import LawReport, LawTests
from paceline.prove.certificate.options import CertifyOptions, ShowProgress
from paceline.prove.certificate.server import Exchange, Keep, Line, Server, first_model, root_url
from paceline.prove.datasets.prompt import Prompt as Conversation
from paceline.prove.results import Certificate, LawTest

_COPY = "Repeat this list exactly, word for word:{words}.\nThe list again:"
_NUM_COPIES = 2  # prompts that make every drafter draft, beside those given
_PROBE_TOKENS = 12


def _silent(stage: str, num_done: int, num_total: int) -> None:
    del stage, num_done, num_total


def _keep_nothing(exchange: Exchange) -> None:
    del exchange


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the server was found to offer."""

    arms: Arms
    how_plain: str
    takes_token_ids: bool


async def certify(
    base_url: str,
    prompts: Sequence[Conversation],
    options: CertifyOptions | None = None,
    show: ShowProgress = _silent,
    keep: Keep = _keep_nothing,
) -> Certificate:
    """The certificate of the server at `base_url`. Raises MissingError if no server answers there.

    A server without `max_draft_length` is compared with itself at one token a request, or with `options.baseline_url`.
    Every completion goes to `keep`.
    """
    options = options or CertifyOptions()
    headers = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        line = Line(session, asyncio.Semaphore(options.concurrency), keep)
        offer = await _offer(line, root_url(base_url), options)
        questions = await _questions(offer, prompts, options)
        greedy = await compare("greedy", offer.arms, questions, options, show)
        seeded = Comparison()
        if offer.arms.plain is not None:
            seeded = await compare("seeded", offer.arms, questions, options, show)
        laws = LawReport()
        if options.num_samples:
            laws = await _laws(offer, options, show)
    return _certificate(offer, greedy, seeded, laws, options)


async def _offer(line: Line, url: str, options: CertifyOptions) -> _Offer:
    model = options.model or await first_model(line.session, url)
    always: dict[str, object] = {"return_token_ids": True, "stream": False}
    server = Server(line, url, model, always | {"cache_salt": salt("speculative", options.seed)})
    salted = {"cache_salt": salt("plain", options.seed)}
    token_ids = await server.tokenize(list_text(options.seed))
    plain: Server | None = None
    how_plain = "one token a request"
    if options.baseline_url is not None:
        baseline_url = root_url(options.baseline_url)
        baseline_model = options.model or await first_model(line.session, baseline_url)
        plain = Server(line, baseline_url, baseline_model, always | salted)
        how_plain = f"the server at {baseline_url}"
    else:
        without = server.asking({"max_draft_length": 0, **salted})
        probe = {"max_tokens": _PROBE_TOKENS, "temperature": 0.0}
        answers = [await arm.complete(_copy_text(0), probe) for arm in (server, without)]
        if answers[0].num_draft_tokens and answers[1].num_draft_tokens == 0:
            plain, how_plain = without, "max_draft_length 0 on the same server"
    takes_token_ids = False
    if token_ids is not None:
        found = await server.complete(token_ids, {"max_tokens": 1, "temperature": 0.0})
        takes_token_ids = found.error is None and bool(found.token_ids)
    return _Offer(Arms(server, plain), how_plain, takes_token_ids)


async def _questions(offer: _Offer, prompts: Sequence[Conversation], options: CertifyOptions) -> list[Question]:
    """Prompts evenly taken from those given, as the model's chat has them where that can be known, and some that are copied."""
    num = min(options.num_prompts, len(prompts))
    chosen = [prompts[index * len(prompts) // num] for index in range(num)]
    texts = [(f"copy-{index}", _copy_text(index)) for index in range(_NUM_COPIES)]
    questions: list[Question] = []
    for conversation in chosen:
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        messages.append({"role": "user", "content": conversation.turns[0]})
        token_ids = await offer.arms.speculative.tokenize_chat(messages) if offer.takes_token_ids else None
        if token_ids is None:
            texts.append((conversation.question_id, conversation.turns[0]))
        else:
            questions.append(Question(conversation.question_id, token_ids))
    for question_id, text in texts:
        token_ids = await offer.arms.speculative.tokenize(text) if offer.takes_token_ids else None
        questions.append(Question(question_id, text if token_ids is None else token_ids))
    return questions


def _copy_text(index: int) -> str:
    words = ",".join(WORDS[(index + place * place) % len(WORDS)] for place in range(24))
    return _COPY.format(words=words)


async def _laws(offer: _Offer, options: CertifyOptions, show: ShowProgress) -> LawReport:
    tests = LawTests(offer.arms, await _law_prompt(offer, options.seed), options, show)
    word_ids = await offer.arms.speculative.tokenize(WORDS[0]) or ()
    if len(word_ids) != 1:
        tests.report.unknown.append("logit_bias: no route of the server tells the ids of tokens")
    return await tests.run(await tests.cases(word_ids[0] if len(word_ids) == 1 else None))


async def _law_prompt(offer: _Offer, seed: int) -> tuple[int, ...] | str:
    text = list_text(seed)
    if not offer.takes_token_ids:
        return text
    token_ids = await offer.arms.speculative.tokenize(text)
    return text if token_ids is None else page_aligned(token_ids)


def _certificate(offer: _Offer, greedy: Comparison, seeded: Comparison, laws: LawReport, options: CertifyOptions) -> Certificate:
    tests = _judged(laws.tests, options.alpha)
    counts = [found.num_draft_tokens for found in (greedy, seeded) if found.num_draft_tokens is not None]
    divergences = (*greedy.divergences, *seeded.divergences)
    num_draft_tokens = sum(counts) if counts else None
    errors = Counter(greedy.errors) + Counter(seeded.errors) + laws.errors
    broken = [*broken_tokens(divergences), *broken_laws(tests), *failures(errors)]
    unknown = [*unknown_divergences(divergences), *unseen_drafts(num_draft_tokens, tests), *absences(errors)]
    if seeded.is_identical is None:
        unknown.append("seeded output: there is no plain arm with seeds to compare it with")
    unknown += [f"{option} is refused: {words}" for option, words in laws.refused.items()]
    return Certificate(
        greedy_identical=greedy.is_identical,
        seeded_identical=seeded.is_identical,
        num_compared=greedy.num_compared + seeded.num_compared,
        divergences=divergences,
        law_tests=tests,
        plain=offer.how_plain,
        num_draft_tokens=num_draft_tokens,
        epsilon=options.epsilon,
        alpha=options.alpha,
        broken=tuple(broken),
        unknown=(*unknown, *laws.unknown),
    )


def _judged(tests: Sequence[LawTest], alpha: float) -> tuple[LawTest, ...]:
    thresholds = holm_thresholds([test.p for test in tests], alpha)
    return tuple(
        replace(test, threshold=threshold, is_broken=test.p < threshold) for test, threshold in zip(tests, thresholds, strict=True)
    )
