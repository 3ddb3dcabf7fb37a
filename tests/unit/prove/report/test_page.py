"""The page: everything is there, nothing is fetched, and no text of a prompt or a server becomes markup."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from paceline.errors import MissingError
from paceline.prove.record import Arm
from paceline.prove.report import plots, sections
from paceline.prove.report.markup import Markup, tag
from paceline.prove.report.page import page
from paceline.prove.report.words import TIMES
from paceline.prove.results import Divergence, Proof, Speedup, Verdict
from tests.fakes.made_proof import CONCURRENCIES, made_environment, made_proof

VOID = {"meta", "br"}
NASTY = "</style><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\" ' & $\\frac{ \x00\x1b[31m \ud800 اهلا"


class Reader(HTMLParser):
    """The elements, attributes and text of a page; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


def hostile_proof() -> Proof:
    proof = made_proof(Verdict.INCONCLUSIVE)
    environment = made_environment() | {
        "model": NASTY,
        NASTY: NASTY,
        "command": f"paceline prove --url {NASTY}",
        "dataset": {"label": NASTY, "sha256": NASTY, "num_prompts": NASTY},
        "warnings": [NASTY],
        "utilisation": [{"concurrency": 1, "counter": NASTY, "baseline": NASTY, "speculative": 1.0}],
    }
    divergence = Divergence(NASTY, NASTY, 3, (NASTY, NASTY), None, None)
    assert proof.certificate is not None
    law = replace(proof.certificate.law_tests[0], option=NASTY, against=NASTY)
    certificate = replace(
        proof.certificate, divergences=(divergence,) * 30, law_tests=(law,), broken=(NASTY,), unknown=(NASTY,), plain=NASTY
    )
    return replace(
        proof,
        reasons=(NASTY,),
        environment=environment,
        criteria=tuple(replace(one, name=NASTY, threshold=NASTY) for one in proof.criteria),
        arms=tuple(replace(one, category=NASTY) if one.category == "qa" else one for one in proof.arms),
        speedup=tuple(replace(one, category=NASTY) if one.category == "qa" else one for one in proof.speedup),
        certificate=certificate,
    )


@pytest.fixture(scope="module")
def whole() -> Reader:
    return Reader(page(made_proof()))


def test_the_verdict_comes_first_and_each_part_is_there(whole: Reader) -> None:
    text = " ".join(" ".join(whole.text).split())
    order = ["PASS", "traditional", "Speed-up by category", "Speed and throughput", "Drafts accepted", "Criteria", "Where and how"]
    places = [text.index(words, text.index("Proof of acceleration: ")) for words in order]
    assert places == sorted(places)
    for words in (
        "not SPEED-Bench",
        "0" * 64,
        "prove --quick",
        "multilingual",
        "not met",
        "near tie",
        "temperature 0.7",
        "5af571cb",
    ):
        assert words in text
    assert whole.tags.count("svg") == 3
    assert "1.36\u00d7" in text


def test_nothing_is_fetched_and_nothing_runs(whole: Reader) -> None:
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(whole.tags)
    assert all(value.startswith("#") for name in ("href", "xlink:href", "src") for value in whole.values(name))
    assert any("default-src 'none'" in value for value in whole.values("content"))
    assert not re.search(r"url\((?!#)|@import", " ".join((*whole.text, *whole.values("style"))))


def test_ids_are_unique_and_each_reference_finds_its_own(whole: Reader) -> None:
    ids = whole.values("id")
    assert len(ids) == len(set(ids)) > 50
    references = [value[1:] for value in whole.values("xlink:href")]
    references += re.findall(r"url\(#([^)]+)\)", " ".join(whole.values("clip-path")))
    assert references
    assert set(references) <= set(ids)


def test_plots_follow_the_page_in_colour_and_keep_text_as_text(whole: Reader) -> None:
    styles = " ".join(whole.values("style"))
    assert "var(--fast)" in styles
    assert not set(re.findall(r"#[0-9a-f]{6}", styles)) - {"#000000"}  # matplotlib's black: only on paths without a stroke of their own
    assert "coding" in whole.text


def test_hostile_text_stays_text_wherever_it_stands() -> None:
    text = page(hostile_proof())
    text.encode("utf-8")
    reader = Reader(text)
    assert not {"script", "img"} & set(reader.tags)
    assert not any(name.startswith("on") for name, _ in reader.attributes)
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    shown = " ".join(reader.text)
    assert shown.count("<script>alert(1)</script>") > 10, "it is shown, not dropped"


def test_without_escaping_the_test_above_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.prove.report.markup.escaped", Markup)
    assert "<script>" in sections.environment(hostile_proof())


def bare(verdict: Verdict) -> Proof:
    return Proof(verdict, ("nothing was measured",), {}, (), (), (), None, ())


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_proof_without_anything_is_a_page_all_the_same(verdict: Verdict) -> None:
    reader = Reader(page(bare(verdict)))
    assert verdict.value in reader.text
    assert "svg" not in reader.tags


@pytest.mark.parametrize("ratio", [float("nan"), float("inf"), 0.0, 1e-9, 1e9, 1.0])
def test_odd_ratios_are_drawn_or_left_out(ratio: float) -> None:
    cell = Speedup("qa", 1, ratio, None, None, (float("nan"), ratio), None, None, None, 0)
    Reader(page(replace(bare(Verdict.INCONCLUSIVE), speedup=(cell,))))


def test_many_points_make_many_panels() -> None:
    proof = made_proof()
    cells = tuple(replace(cell, concurrency=2**place) for place in range(4) for cell in proof.speedup if cell.concurrency == 1)
    text = str(plots.speedup_plot(replace(proof, speedup=cells, arms=())))
    assert all(f"concurrency {2**place}<" in text for place in range(4))


def test_the_pareto_plot_is_drawn_for_one_arm_alone() -> None:
    proof = made_proof()
    only = tuple(point for point in proof.pareto if point.arm == Arm.BASELINE)
    text = str(plots.pareto_plot(replace(proof, pareto=only)))
    assert "traditional" in text
    assert "accelerated" not in text


def test_without_matplotlib_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from tests.fakes.made_proof import made_proof\n"
        "from paceline.prove.report.page import page\n"
        "from paceline.errors import MissingError\n"
        "try:\n    page(made_proof())\nexcept MissingError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "paceline[prove]" in done.stdout
    assert MissingError.exit_code == 3


def test_an_attribute_cannot_end_before_its_end() -> None:
    assert tag("a", "x", title='"><script>') == '<a title="&quot;&gt;&lt;script&gt;">x</a>'
    assert tag("br") == "<br>"
    assert tag("td", Markup("<b>"), "<b>", class_="num", hidden=True, id=None) == '<td class="num" hidden><b>&lt;b&gt;</td>'


def test_goodput_names_its_objectives() -> None:
    proof = made_proof()
    assert "objectives of goodput" not in sections.latencies(proof)
    proof = replace(proof, environment={**proof.environment, "goodput_objectives": "ttft:500,tpot:50 ms"})
    assert "The objectives of goodput are ttft:500,tpot:50 ms." in sections.latencies(proof)


def test_the_projection_comes_out_when_its_line_is_multiplied() -> None:
    """Acceptance length in the place of tokens per step would not: it leaves out the steps without drafts."""
    shown = Reader(sections.measured_and_projected(made_proof()))
    found = re.findall(r"concurrency \d+\n([\d.]+)\n([\d.]+)\n([\d.]+)\n([\d.]+)" + TIMES, "\n".join(shown.text))
    assert len(found) == len(CONCURRENCIES)
    for line in found:
        plain_ms, fast_ms, tokens, projected = map(float, line)
        assert plain_ms * tokens / fast_ms == pytest.approx(projected, rel=0.02)


def test_the_pareto_plot_is_per_gpu_where_their_number_is_known() -> None:
    proof = made_proof()
    words = "tokens/s of all answers, per GPU"
    assert words not in str(plots.pareto_plot(proof))
    known = tuple(replace(point, output_tps_per_gpu=point.output_tps / 8) for point in proof.pareto)
    assert words in str(plots.pareto_plot(replace(proof, pareto=known)))
    assert words not in str(plots.pareto_plot(replace(proof, pareto=(*known[:1], *proof.pareto[1:]))))
