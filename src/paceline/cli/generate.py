"""`paceline generate`: one answer in the terminal, from an engine in this process."""

import asyncio
import secrets
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.progress import ConsoleProgress
from paceline.config import AnswerConfig, EngineConfig, check_engine, check_ranges
from paceline.errors import BadInputError, EngineDeadError

if TYPE_CHECKING:
    from paceline.core.outcome import RequestStats, TokenDelta
    from paceline.server.detokenize import Detokenizer
    from paceline.server.template import ChatTemplate

UseTemplate = Annotated[bool, Parameter(help="Put the prompt into the model's chat template, if it has one.")]


def generate(
    prompt: str,
    /,
    *,
    chat_template: UseTemplate = True,
    config: EngineConfig = EngineConfig(),  # noqa: B008 - frozen
    answer: AnswerConfig = AnswerConfig(),  # noqa: B008 - frozen
) -> None:
    """Answer one prompt in the terminal; a prompt of - is read from stdin.

    The text goes to stdout as it comes; speed and acceptance length follow on stderr.
    """
    check_engine(config)
    check_ranges(answer)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise BadInputError("the prompt is empty; give at least one character")
    from paceline.core.request import SamplingParams
    from paceline.llm import LLM
    from paceline.server.detokenize import Detokenizer, Vocabulary
    from paceline.server.template import load_chat_template

    with ConsoleProgress() as progress:
        llm = LLM(config, progress)
    template = load_chat_template(llm.folder) if chat_template else None
    if template is not None:
        # The template writes its special tokens itself.
        rendered = asyncio.run(_rendered(template, text))
        prompt_token_ids = llm.tokenizer.encode(rendered, add_special_tokens=False).ids
    else:
        prompt_token_ids = llm.tokenizer.encode(text).ids
    facts, num_prompt_tokens = llm.facts, len(prompt_token_ids)
    facts.check_prompt(num_prompt_tokens)
    sampling = SamplingParams(
        max_tokens=min(answer.max_tokens, facts.max_model_len - num_prompt_tokens),
        temperature=answer.temperature,
        top_k=answer.top_k,
        top_p=answer.top_p,
        min_p=answer.min_p,
        presence_penalty=answer.presence_penalty,
        frequency_penalty=answer.frequency_penalty,
        repetition_penalty=answer.repetition_penalty,
        min_tokens=answer.min_tokens,
        seed=secrets.randbits(64) if config.seed is None else config.seed,
    )
    detokenizer = Detokenizer(Vocabulary(llm.tokenizer), prompt_token_ids, ())
    num_tokens, stats = print_answer(llm.stream(prompt_token_ids, sampling), detokenizer)
    print(summary(num_tokens, stats), file=sys.stderr)


async def _rendered(template: "ChatTemplate", text: str) -> str:
    try:
        return await template.render([{"role": "user", "content": text}])
    finally:
        await template.close()


def print_answer(deltas: Iterable["TokenDelta"], detokenizer: "Detokenizer") -> tuple[int, "RequestStats"]:
    """Print text as it comes; returns the number of tokens and what they cost. Raises EngineDeadError if the engine gave up."""
    num_tokens = 0
    for delta in deltas:
        print(detokenizer.push(delta).text, end="", flush=True)
        num_tokens += len(delta.token_ids)
        if delta.error is not None:
            raise EngineDeadError(delta.error)
        if delta.finish_reason is not None and delta.stats is not None:
            print()
            return num_tokens, delta.stats
    raise EngineDeadError("the engine ended the answer without its statistics")


def summary(num_tokens: int, stats: "RequestStats") -> str:
    """One line on what an answer cost: `[57 tokens, 45.1 tok/s, acceptance length 2.41, first token after 132 ms]`.

    tok/s is that of decoding, the first token (which the prompt's pass yields) left out. Acceptance length is tokens
    per verification of a draft; 1 if there was none.
    """
    parts = [f"{num_tokens} tokens"]
    if stats.decode_ms > 0 and num_tokens > 1:
        parts.append(f"{(num_tokens - 1) * 1e3 / stats.decode_ms:.1f} tok/s")
    parts.append(f"acceptance length {1 + stats.draft.num_accepted_tokens / max(stats.draft.num_spec_steps, 1):.2f}")
    parts.append(f"first token after {stats.queue_ms + stats.prefill_ms:.0f} ms")
    return f"[{', '.join(parts)}]"
