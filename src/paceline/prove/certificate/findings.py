"""What a certificate found, as sentences: what a server breaks, and what could not be found out. Called by `certify.py`."""

from collections.abc import Iterator, Mapping, Sequence

from paceline.prove.certificate.law_tests import MIN_CONTEXT_SAMPLES
from paceline.prove.results import Divergence, LawTest

_NO_ROUTE = ("HTTP 404", "HTTP 405", "HTTP 501")


def broken_tokens(divergences: Sequence[Divergence]) -> Iterator[str]:
    """Tokens that are not those of plain decoding, and no near tie."""
    for found in divergences:
        if found.is_near_tie is False and found.top2_gap is not None:
            yield (
                f"{_place(found)}: {found.tokens[1]!r} instead of {found.tokens[0]!r}, "
                f"the likeliest two are {found.top2_gap:.3f} nats apart, no near tie"
            )


def broken_laws(tests: Sequence[LawTest]) -> Iterator[str]:
    """Options whose samples do not follow their law."""
    for test in tests:
        if test.is_broken:
            yield (
                f"{test.option} does not keep its law: chi-square {test.chi2:.1f} with {test.num_degrees} degrees of freedom, "
                f"p = {test.p:.1e} over {test.num_samples} samples" + ("; they follow the law without it" if test.is_as_without else "")
            )


def failures(errors: Mapping[str, int]) -> Iterator[str]:
    """Requests that failed; `errors` counts them by their text."""
    for text, count in errors.items():
        if not text.startswith(_NO_ROUTE):
            yield f"requests failed: {text} ({count} times)"


def absences(errors: Mapping[str, int]) -> Iterator[str]:
    """A server without the route breaks no promise of its output."""
    for text in errors:
        if text.startswith(_NO_ROUTE):
            yield f"output: the server has no /v1/completions ({text})"


def unknown_divergences(divergences: Sequence[Divergence]) -> Iterator[str]:
    """Tokens that differ for a reason that cannot be known."""
    for found in divergences:
        if found.is_near_tie is None:
            # Noise decides beside the law, and no server tells it.
            is_seeded = found.kind == "seeded"
            yield f"{_place(found)}: " + (
                "whether by a near tie cannot be known under a seed" if is_seeded else "the server gives no log-probabilities"
            )


def unseen_drafts(num_draft_tokens: int | None, tests: Sequence[LawTest]) -> Iterator[str]:
    """Comparisons that say nothing of speculation, because there was none."""
    if num_draft_tokens == 0:
        yield "no draft was verified in any compared answer: speculation is off, or its drafter found nothing"
    for test in tests:
        if test.num_drafted is not None and test.num_drafted < MIN_CONTEXT_SAMPLES:
            yield (
                f"{test.option}: a draft was verified in only {test.num_drafted} of {test.num_samples} samples; "
                "where the server chooses whether to draft, start it so that it always does (--speculation on)"
            )


def _place(found: Divergence) -> str:
    return f"{found.kind} output of {found.question_id} differs from plain decoding at token {found.position}"
