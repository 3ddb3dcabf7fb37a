"""The report as one HTML file that needs no network: the verdict, what a manager needs, then what an engineer needs."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from paceline.prove.report import plots, sections
from paceline.prove.report.markup import Markup, joined, tag
from paceline.prove.report.words import sentence
from paceline.prove.results import Proof

# Nothing in the page runs and nothing is fetched, whatever a prompt or a server wrote into it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_page(proof: Proof, path: Path) -> None:
    """Raises MissingError without matplotlib, OSError if the file cannot be written."""
    path.write_text(page(proof), encoding="utf-8")


def page(proof: Proof) -> str:
    """The whole document. Raises MissingError without matplotlib."""
    title = _title(proof)
    style = files(__package__ or "").joinpath("page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{proof.verdict} · {title}"),
        tag("style", Markup(style)),
    )
    body = tag("body", tag("main", *_parts(proof, title)))
    return "<!doctype html>\n" + tag("html", head, body, lang="en")


def _title(proof: Proof) -> str:
    model = proof.environment.get("model")
    return f"Proof of acceleration: {model}" if model else "Proof of acceleration"


def _parts(proof: Proof, title: str) -> Iterator[Markup]:
    yield tag("h1", title)
    yield _verdict(proof)
    yield sections.figures(proof)
    yield joined(tag("p", line, class_="note") for line in sections.data_lines(proof))
    warnings = sections.warning_lines(proof)
    if warnings:
        yield tag("section", tag("h2", "Caution"), _items(warnings), class_="warnings")
    yield tag("h2", "Traditional and accelerated")
    yield sections.traditional_and_accelerated(proof)
    yield from _speedup_part(proof)
    yield _pair(proof)
    yield _details("Acceptance by category", sections.acceptance(proof))
    yield joined((tag("h2", "Criteria"), sections.criteria(proof)))
    yield joined((tag("h2", "The same text?"), sections.certificate(proof.certificate)))
    yield joined((tag("h2", "Latency in full"), sections.latencies(proof)))
    yield joined((tag("h2", "Where and how"), sections.environment(proof)))
    command = proof.environment.get("command")
    if command:
        yield joined((tag("h3", "To measure the same again"), tag("pre", str(command))))


def _verdict(proof: Proof) -> Markup:
    name = proof.verdict.value
    summary = tag("div", tag("strong", name), tag("p", sentence(proof.verdict)), class_=f"verdict {name.lower()}")
    return joined((summary, _items(proof.reasons))) if proof.reasons else summary


def _items(lines: list[str] | tuple[str, ...]) -> Markup:
    return tag("ul", *(tag("li", line) for line in lines))


def _details(title: str, content: Markup) -> Markup:
    return tag("details", tag("summary", title), content)


def _speedup_part(proof: Proof) -> Iterator[Markup]:
    yield tag("h2", "Speed-up by category")
    plot = plots.speedup_plot(proof)
    if plot is None:
        yield tag("p", "No pair of answers was measured in both ways.", class_="note")
        return
    yield tag(
        "p",
        "Time of traditional decoding over that of accelerated decoding, for the work that the reasons name; above 1 is faster. Bars are "
        "95 % intervals over blocks and prompts; grey ones hold 1, so that neither way is shown to be faster.",
        class_="note",
    )
    yield plot
    yield _details("All ratios as numbers", sections.speedups(proof))
    yield sections.measured_and_projected(proof)


def _pair(proof: Proof) -> Markup:
    """Pareto and acceptance side by side where the window is wide."""
    parts = [
        tag("section", tag("h2", title), tag("p", note, class_="note"), plot)
        for title, note, plot in (
            (
                "Speed and throughput",
                "A point per concurrency, which stands beside it; up and to the right is better.",
                plots.pareto_plot(proof),
            ),
            ("Drafts accepted", "Solid: when those before were accepted. Dashed: at all.", plots.acceptance_plot(proof)),
        )
        if plot is not None
    ]
    return tag("div", *parts, class_="pair") if parts else Markup("")
