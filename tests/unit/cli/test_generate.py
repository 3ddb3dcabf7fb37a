"""`paceline generate` on a tiny random model: the same tokens as the library gives, and what an answer cost."""

from pathlib import Path

import pytest

from paceline.cli.generate import print_answer, summary
from paceline.cli.main import run
from paceline.config import EngineConfig
from paceline.core.outcome import DraftStats, RequestStats, TokenDelta
from paceline.core.request import FinishReason, SamplingParams
from paceline.errors import EngineDeadError
from paceline.llm import LLM
from paceline.server.detokenize import Detokenizer, Vocabulary
from tests.fakes.tiny_models import make_tiny_model

PROMPT = "abc abc abc abc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=320)


def arguments(folder: Path, *more: str) -> list[str]:
    return ["generate", PROMPT, "--model", str(folder), "--dtype", "float32", "--threads", "1", "--max-tokens", "12", *more]


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_the_answer_is_the_librarys(folder: Path, capsys: pytest.CaptureFixture[str], draft: str) -> None:
    assert run(arguments(folder, "--no-chat-template", "--draft", draft)) == 0
    captured = capsys.readouterr()
    llm = LLM(EngineConfig(model=str(folder), dtype="float32", draft="none", threads=1))
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.0))
    whole = TokenDelta("a", output.token_ids, output.finish_reason)
    assert captured.out.removesuffix("\n") == Detokenizer(Vocabulary(llm.tokenizer), output.prompt_token_ids, ()).push(whole).text
    assert captured.err.splitlines()[-1].startswith(f"[{len(output.token_ids)} tokens, ")
    assert "tok/s, acceptance length " in captured.err


def test_a_seed_gives_the_same_sample_and_other_seeds_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert run(arguments(folder, "--temperature", "1", "--seed", seed)) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(folder, "--no-chat-template", "--max-model-len", "4")) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "limit 4" in message
    assert "--max-model-len 16" in message
    assert run([arguments(folder)[0], "abc " * 600, *arguments(folder, "--no-chat-template")[2:]]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "limit 512" in message
    assert "--max-model-len" not in message, "the model has no more positions"


@pytest.mark.parametrize("options", [["--temperature", "0.000001"], ["--temperature", "1", "--top-k", "1"], ["--top-k", str(2**63 - 1)]])
def test_options_mean_what_they_mean_over_http(folder: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert run(arguments(folder)) == 0
    greedy = capsys.readouterr().out
    assert run(arguments(folder, *options)) == 0
    assert capsys.readouterr().out == greedy


def test_a_model_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "x", "--model", "smollm2-135m-instuct"]) == 2
    assert "did you mean smollm2-135m-instruct?" in capsys.readouterr().err


def test_the_summary_counts_decoding_and_drafts() -> None:
    draft = DraftStats(num_spec_steps=4, num_plain_steps=2, num_draft_tokens=20, num_accepted_tokens=6)
    stats = RequestStats(draft, 5, 0, 0, queue_ms=1.0, prefill_ms=99.0, decode_ms=500.0)
    assert summary(26, stats) == "[26 tokens, 50.0 tok/s, acceptance length 2.50, first token after 100 ms]"
    one = RequestStats(DraftStats(), 5, 0, 0, queue_ms=0.0, prefill_ms=3.0, decode_ms=0.0)
    assert summary(1, one) == "[1 tokens, acceptance length 1.00, first token after 3 ms]"


def test_an_engine_that_gives_up_is_an_error(folder: Path) -> None:
    llm = LLM(EngineConfig(model=str(folder), dtype="float32", draft="none", threads=1))
    failed = [TokenDelta("a", (1,)), TokenDelta("a", (), FinishReason.ERROR, error="out of pages")]
    with pytest.raises(EngineDeadError, match="out of pages"):
        print_answer(failed, Detokenizer(Vocabulary(llm.tokenizer), (1,), ()))
    with pytest.raises(EngineDeadError):
        print_answer(failed[:1], Detokenizer(Vocabulary(llm.tokenizer), (1,), ()))
