"""The sections of the page, each from a proof to markup. `page.py` puts them in order."""

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from paceline.prove.record import Arm
from paceline.prove.report.comparison import comparison
from paceline.prove.report.markup import Markup, joined, tag
from paceline.prove.report.plots import category_order
from paceline.prove.report.words import (
    ARM_NAMES,
    NONE,
    TIMES,
    arm_of,
    at_concurrency,
    certificate_sentence,
    concurrencies,
    interval,
    interval_words,
    number,
    overall,
    point_of,
    points,
    significant,
    text_of,
    threshold_parts,
    times,
)
from paceline.prove.results import OVERALL, ArmSummary, Certificate, Divergence, LawTest, Percentiles, Proof, Speedup

_SHOWN_DIVERGENCES = 20
_SHOWN_APART = ("command", "dataset", "warnings", "utilisation")


def table(heads: Sequence[str], rows: Iterable[Markup], class_: str | None = None) -> Markup:
    """A table that scrolls by itself where the page is narrow."""
    head = tag("tr", *(tag("th", text) for text in heads))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_=class_), class_="scroll")


def _line(cells: Iterable[str], class_: str | None = None) -> Markup:
    return tag("tr", *(cell if isinstance(cell, Markup) else tag("td", cell) for cell in cells), class_=class_)


def _note(text: str) -> Markup:
    return tag("p", text, class_="note")


def figures(proof: Proof) -> Markup:
    """The ratios that the verdict rests on, large."""
    parts = [
        tag(
            "div",
            tag("dt", at_concurrency(cell.concurrency)),
            tag("dd", times(cell.ratio), tag("small", interval_words(cell.ci95)), tag("small", f"{cell.num_pairs} pairs")),
        )
        for cell in overall(proof)
    ]
    return tag("dl", *parts, class_="figures") if parts else Markup("")


def traditional_and_accelerated(proof: Proof) -> Markup:
    rows: list[Markup] = []
    for point, lines in comparison(proof):
        rows.append(tag("tr", tag("th", str(point), colspan=4), class_="group"))
        for row in lines:
            tone = {True: "improvement better", False: "improvement worse", None: "improvement"}[row.is_better]
            rows.append(_line((row.label, row.baseline, row.speculative, tag("td", row.improvement, class_=tone))))
    if not rows:
        return _note("Nothing was measured.")
    note = "The first line of each part is the proof; the others are as measured, without intervals of their own."
    return joined((table(("", "traditional", "accelerated", "improvement"), rows), _note(note)))


def speedups(proof: Proof) -> Markup:
    """Every cell as numbers, with the projection beside the measurement."""
    parts: list[Markup] = []
    heads = ("category", "ratio", "95 % interval", "lower bound, all cells at once", "projected", "one answer", "throughput", "pairs")
    for concurrency in concurrencies(proof):
        cells = {cell.category: cell for cell in proof.speedup if cell.concurrency == concurrency}
        if cells:
            names = [*category_order(set(cells)), *([OVERALL] if OVERALL in cells else [])]
            parts += [tag("h3", at_concurrency(concurrency)), table(heads, (_speedup_line(cells[name]) for name in names))]
    return joined(parts)


def _speedup_line(cell: Speedup) -> Markup:
    low, high = cell.ci95
    tone = "better" if low > 1 else "worse" if high < 1 else None
    ratios = (times(cell.projected_ratio), times(cell.user_tps_ratio), times(cell.output_tps_ratio))
    cells = (tag("td", times(cell.ratio), class_=tone), interval(cell.ci95), number(cell.simultaneous_low), *ratios, str(cell.num_pairs))
    name = "all together" if cell.category == OVERALL else cell.category
    return _line((name, *cells), "all" if cell.category == OVERALL else None)


def measured_and_projected(proof: Proof) -> Markup:
    """t_ar, t_sd and the projection's tokens per step beside the ratio that was measured, per point of the sweep.

    These are tokens over all steps, those without drafts included, as the steps' times are: the line must come out when it is multiplied.
    """
    rows: list[Markup] = []
    for cell in overall(proof):
        plain, fast = (arm_of(proof, arm, point_of(cell)) for arm in Arm)
        if plain is None or fast is None:
            continue
        steps = (significant(plain.step_ms), significant(fast.step_ms), number(_tokens_per_step(plain, fast, cell)))
        rows.append(_line((at_concurrency(cell.concurrency), *steps, times(cell.projected_ratio), times(cell.ratio))))
    if not rows:
        return Markup("")
    heads = ("", "plain step (ms)", "speculative step (ms)", "tokens per step", "projected", "measured")
    why = f"Projected: plain step {TIMES} tokens per step / speculative step. It leaves out prompts, waiting and the first token."
    return joined((tag("h3", "Projected and measured"), table(heads, rows), _note(why)))


def _tokens_per_step(plain: ArmSummary, fast: ArmSummary, cell: Speedup) -> float | None:
    if not plain.step_ms or fast.step_ms is None or cell.projected_ratio is None:
        return None
    return cell.projected_ratio * fast.step_ms / plain.step_ms


def acceptance(proof: Proof) -> Markup:
    """Acceptance length in both poolings and acceptance by position, per category."""
    parts: list[Markup] = []
    for point in points(proof):
        arms = {one.category: one for one in proof.arms if one.arm == Arm.SPECULATIVE and point_of(one) == point}
        arms = {name: one for name, one in arms.items() if one.acceptance_length is not None}
        if not arms:
            continue
        depth = max(len(one.conditional_acceptance) for one in arms.values())
        names = [*category_order(set(arms)), *([OVERALL] if OVERALL in arms else [])]
        heads = ("category", "mean of requests", "over all steps", *(f"draft {place}" for place in range(1, depth + 1)))
        parts += [tag("h3", str(point)), table(heads, (_acceptance_line(arms[name], depth) for name in names))]
    if not parts:
        return _note("The server tells nothing of its drafts.")
    why = (
        "Acceptance length is tokens per verification of a draft, the step's own token included. Mean of requests weighs each answer "
        "alike, as SPEED-Bench's harness does; over all steps is what Prometheus counters and AIPerf give. Draft i: the share that is "
        "accepted when those before it were."
    )
    return joined((_note(why), *parts))


def _acceptance_line(one: ArmSummary, depth: int) -> Markup:
    length = one.acceptance_length
    lengths = (NONE, NONE) if length is None else (number(length.mean_of_means), number(length.token_weighted))
    shares = [number(share) for share in one.conditional_acceptance] + [NONE] * (depth - len(one.conditional_acceptance))
    is_all = one.category == OVERALL
    return _line(("all together" if is_all else one.category, *lengths, *shares), "all" if is_all else None)


_LATENCIES: tuple[tuple[str, Callable[[ArmSummary], Percentiles | None]], ...] = (
    ("first token", lambda arm: arm.ttft_ms),
    ("per further token", lambda arm: arm.tpot_ms),
    ("between tokens", lambda arm: arm.itl_ms),
    ("between chunks", lambda arm: arm.chunk_gap_ms),
    ("whole answer", lambda arm: arm.e2e_ms),
)


def latencies(proof: Proof) -> Markup:
    """Percentiles, errors and goodput of both arms over all categories."""
    parts: list[Markup] = []
    for point in points(proof):
        found = (arm_of(proof, arm, point) for arm in Arm)
        arms = [one for one in found if one is not None]
        if not arms:
            continue
        heads = ("ms", *(f"{ARM_NAMES[one.arm]} {share}" for one in arms for share in ("p50", "p95", "p99")))
        rows = [_line((label, *(text for one in arms for text in _percentiles(value(one))))) for label, value in _LATENCIES]
        counts = "; ".join(f"{ARM_NAMES[one.arm]}: {_counts(one)}" for one in arms)
        parts += [tag("h3", str(point)), table(heads, rows), _note(counts + ".")]
    if "goodput_objectives" in proof.environment:
        parts.append(_note(f"The objectives of goodput are {proof.environment['goodput_objectives']}."))
    return joined(parts)


def _percentiles(value: Percentiles | None) -> tuple[str, str, str]:
    return (NONE, NONE, NONE) if value is None else (significant(value.p50), significant(value.p95), significant(value.p99))


def _counts(one: ArmSummary) -> str:
    goodput = "" if one.goodput is None else f", {number(100 * one.goodput, 1)} % within the objectives"
    return f"{one.num_requests:,} requests, {one.num_errors:,} errors, {one.num_output_tokens:,} tokens{goodput}"


def criteria(proof: Proof) -> Markup:
    if not proof.criteria:
        return _note("No criteria were given.")
    words = {
        True: tag("td", "met", class_="text yes"),
        False: tag("td", "not met", class_="text no"),
        None: tag("td", "not measured", class_="text"),
    }
    rows: list[Markup] = []
    for one in proof.criteria:
        bound, conditions = threshold_parts(one.threshold)
        cells = (tag("td", one.name), tag("td", bound), tag("td", significant(one.value)), words[one.passed])
        rows.append(_line((*cells, tag("td", conditions, class_="text"))))
    return table(("criterion", "threshold", "measured", "", ""), rows)


def certificate(found: Certificate | None) -> Markup:
    """Whether both arms give the same text, and whether sampling keeps the model's law."""
    if found is None:
        return _note("There is none; --certify compares the answers of both arms token by token, and tests the law of sampled ones.")
    words = {True: tag("td", "identical", class_="yes"), False: tag("td", "not identical", class_="no"), None: tag("td", "not compared")}
    rows = [_line(("greedy answers", words[found.greedy_identical])), _line(("seeded answers", words[found.seeded_identical]))]
    tone = {True: "yes", False: "no", None: "unsure"}[found.holds]
    parts = [tag("p", certificate_sentence(found), class_=tone)]
    if found.broken:
        parts.append(_list(found.broken))
    parts.append(table(("", f"{found.num_compared:,} pairs of answers"), rows))
    if found.unknown:
        title = f"What could not be checked ({len(found.unknown)})"
        parts.append(tag("details", tag("summary", title), _list(found.unknown)))
    if found.plain:
        parts.append(_note(f"Plain decoding was asked for by {found.plain}."))
    if found.divergences:
        parts += [tag("h3", "Where answers differ"), _divergences(found.divergences)]
    if found.law_tests:
        heads = ("option", "chi-square", "degrees", "p", "samples", "of them drafted", "against", "")
        parts += [tag("h3", "Law of sampled tokens"), table(heads, (_law_line(test) for test in found.law_tests))]
        parts.append(_note(f"A p below its threshold is a broken law; the chance that any lawful one is called so is {found.alpha:g}."))
    return joined(parts)


def _list(lines: Iterable[str]) -> Markup:
    return tag("ul", *(tag("li", line) for line in lines))


def _law_line(test: LawTest) -> Markup:
    drafted = NONE if test.num_drafted is None else f"{test.num_drafted:,}"
    tone = tag("td", "broken", class_="no") if test.is_broken else tag("td", "kept", class_="yes")
    cells = (significant(test.chi2), f"{test.num_degrees:,}", number(test.p, 4), f"{test.num_samples:,}", drafted, test.against)
    return _line((test.option, *cells, tone))


def _divergences(found: tuple[Divergence, ...]) -> Markup:
    ties = {True: "near tie", False: "no tie", None: "unknown"}
    rows = (
        _line(
            (
                one.question_id,
                one.kind,
                str(one.position),
                " / ".join(map(repr, one.tokens)),
                number(one.top2_gap, 5),
                ties[one.is_near_tie],
            )
        )
        for one in found[:_SHOWN_DIVERGENCES]
    )
    rest = len(found) - _SHOWN_DIVERGENCES
    more = _note(f"{rest} more in the JSON.") if rest > 0 else Markup("")
    return joined((table(("prompt", "kind", "token", "tokens", "gap of the two likeliest (nats)", ""), rows), more))


def environment(proof: Proof) -> Markup:
    """Where it was measured; what the server does not say is named as such."""
    rows = [
        tag("tr", tag("td", key.replace("_", " ")), tag("td", text_of(value), class_="env"))
        for key, value in proof.environment.items()
        if key not in _SHOWN_APART
    ]
    return tag("table", tag("tbody", *rows), class_="env-table")


def data_lines(proof: Proof) -> list[str]:
    """Which data set, how much of it, and its hash."""
    found = proof.environment.get("dataset")
    if not isinstance(found, dict):
        return []
    dataset = cast(dict[str, object], found)
    num_prompts = f", {dataset['num_prompts']} prompts" if dataset.get("num_prompts") is not None else ""
    return [f"Data: {dataset.get('label')}{num_prompts}", f"sha256 {dataset.get('sha256')}"]


def warning_lines(proof: Proof) -> list[str]:
    found = proof.environment.get("warnings")
    return [str(line) for line in cast(list[object], found)] if isinstance(found, list) else []
