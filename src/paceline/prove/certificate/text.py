"""A certificate as lines for a terminal or a page."""

from collections.abc import Iterator

from paceline.prove.results import Certificate

_TIE = {True: "near tie", False: "no near tie", None: "near tie or not: unknown"}
_WORDS = {True: "identical", False: "different", None: "could not be compared"}


def certificate_lines(certificate: Certificate) -> Iterator[str]:
    """What was compared, what was found, what is broken, what is not known."""
    verdict = {True: "holds", False: "does not hold", None: "is incomplete"}[certificate.holds]
    yield f"The certificate {verdict}: {certificate.num_compared} pairs of answers, plain decoding by {certificate.plain}."
    drafts = certificate.num_draft_tokens
    yield (
        f"Greedy tokens: {_WORDS[certificate.greedy_identical]}. Seeded tokens: {_WORDS[certificate.seeded_identical]}. "
        f"Draft tokens verified in them: {'not told' if drafts is None else f'{drafts:,}'}."
    )
    if certificate.divergences:
        yield f"First tokens that differ (near tie: top-2 gap below {certificate.epsilon:g} nats):"
    for found in certificate.divergences:
        gap = "gap unknown" if found.top2_gap is None else f"top-2 gap {found.top2_gap:.4f} nats"
        shown = f"{found.tokens[0]!r} -> {found.tokens[1]!r}"
        yield f"  {found.kind} {found.question_id} token {found.position}: {shown}, {gap}, {_TIE[found.is_near_tie]}"
    if certificate.law_tests:
        yield (
            f"Laws of the sampling options (chi-square, Holm, {certificate.alpha:g} chance of a false alarm over all; "
            "drafted: samples in which a draft was verified):"
        )
        yield f"  {'option':<20}{'samples':>8}{'drafted':>8}{'chi2':>10}{'df':>5}{'p':>10}{'limit':>10}  against"
    for test in certificate.law_tests:
        drafted = "?" if test.num_drafted is None else str(test.num_drafted)
        yield (
            f"  {test.option:<20}{test.num_samples:>8}{drafted:>8}{test.chi2:>10.1f}{test.num_degrees:>5}{test.p:>10.2g}"
            f"{test.threshold:>10.1g}  {'the law' if test.against == 'law' else 'plain samples'}{'  BROKEN' if test.is_broken else ''}"
        )
    for sentence in certificate.broken:
        yield f"BROKEN: {sentence}"
    for sentence in certificate.unknown:
        yield f"unknown: {sentence}"
