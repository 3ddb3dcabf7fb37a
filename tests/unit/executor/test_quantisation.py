"""What `--quantization` comes to: the scheme that is taken, why, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest
import torch
from gguf import GGMLQuantizationType

from paceline.config import EngineConfig
from paceline.core.facts import Choice, EngineFacts
from paceline.core.progress import SilentProgress
from paceline.errors import BadInputError
from paceline.executor import quantisation
from paceline.executor.load import load_executor
from paceline.executor.quantisation import Decision, Remembered, decide
from paceline.forward.packed import Blocks, NoBlocks
from paceline.models.convert import convert_gguf
from paceline.native.library import Library
from tests.fakes.random_model import native_spec, random_program, random_spec
from tests.fakes.tiny_gguf import make_tiny_gguf
from tests.fakes.tiny_models import make_tiny_model

PROGRAM = random_program(native_spec())
LIBRARY = cast(Library, object())
AUTO = EngineConfig(draft="none", kv_cache_memory_bytes=4 << 20, threads=1)
FAST, SLOW = 1e12, 1e3  # bytes per second


class FourBits:
    """Every matrix of the layers is Q4_K."""

    kinds = {name: "Q4_K" for op in PROGRAM.ops if op.layer >= 0 for _, name in op.weights}  # noqa: RUF012

    def rows(self, name: str) -> None:
        raise AssertionError


def decided(config: EngineConfig, blocks: Blocks | None = None, library: Library | str = LIBRARY, bandwidth: float = FAST) -> Decision:
    return decide(config, PROGRAM, blocks or NoBlocks(), library, lambda: bandwidth)


def test_auto_takes_what_the_checkpoint_has() -> None:
    assert decided(AUTO, cast(Blocks, FourBits()), bandwidth=FAST) == Decision("int4", "the checkpoint has 4 bits per weight")


def test_auto_takes_no_bits_from_a_file_that_has_more() -> None:
    class FiveBits(FourBits):
        kinds = dict.fromkeys(FourBits.kinds, "Q5_0")

    reason = "most of the checkpoint's weights are not in 4-bit blocks that can be taken over"
    assert decided(AUTO, cast(Blocks, FiveBits()), bandwidth=SLOW) == Decision("int8", reason)
    assert decided(replace(AUTO, quantization="int4"), cast(Blocks, FiveBits())).scheme == "int4"


def test_auto_weighs_size_against_bandwidth() -> None:
    fast, slow = decided(AUTO, bandwidth=FAST), decided(AUTO, bandwidth=SLOW)
    assert fast.scheme == "int8"
    assert slow.scheme == "int4"
    assert "MB in 8 bits took" in fast.reason
    assert slow.reason.endswith("when first measured, above 20")
    # 100 * 64 + 2 layers of 64 * (128 + 64) + 3 * 64 * 160 weights, with a half-precision scale for each 32.
    exact_ms = (100 * 64 + 2 * (64 * 192 + 3 * 64 * 160)) * 34 / 32 / quantisation._MOST_MS * 1e3
    assert decided(AUTO, bandwidth=exact_ms * 1.01).scheme == "int8"
    assert decided(AUTO, bandwidth=exact_ms * 0.99).scheme == "int4"


def test_the_bandwidth_is_measured_only_when_it_decides() -> None:
    def never() -> float:
        raise AssertionError

    assert decide(replace(AUTO, quantization="int8"), PROGRAM, NoBlocks(), LIBRARY, never).scheme == "int8"
    assert decide(replace(AUTO, quantization="none"), PROGRAM, NoBlocks(), LIBRARY, never).scheme is None


def test_a_measured_choice_is_remembered(tmp_path: Path) -> None:
    """A busy neighbour at the second start must not change the tokens."""
    identity = {"folder": "x"}
    first = decide(AUTO, PROGRAM, NoBlocks(), LIBRARY, lambda: FAST, Remembered(identity, tmp_path))
    again = decide(AUTO, PROGRAM, NoBlocks(), LIBRARY, lambda: SLOW, Remembered(identity, tmp_path))
    assert again == first
    other = decide(AUTO, PROGRAM, NoBlocks(), LIBRARY, lambda: SLOW, Remembered({"folder": "y"}, tmp_path))
    assert other.scheme == "int4"
    for text in ("{", '{"scheme": "int3", "reason": "x"}', '{"scheme": "int8"}', "[]"):
        for file in (tmp_path / "quantization").iterdir():
            file.write_text(text)
        assert decide(AUTO, PROGRAM, NoBlocks(), LIBRARY, lambda: SLOW, Remembered(identity, tmp_path)).scheme == "int4"


def test_whoever_chooses_first_chooses_for_all(tmp_path: Path) -> None:
    """Two engines that start together and measure apart must not give other tokens."""
    mine, others = (Remembered({"folder": "x"}, tmp_path) for _ in range(2))

    def while_another_is_first() -> float:
        assert others.keep(Decision("int4", "measured beside a busy neighbour")).scheme == "int4"
        return FAST

    expected = Decision("int4", "measured beside a busy neighbour")
    assert decide(AUTO, PROGRAM, NoBlocks(), LIBRARY, while_another_is_first, mine) == expected
    assert others.read() == expected
    assert len(list((tmp_path / "quantization").iterdir())) == 1, "nothing unfinished is left"


def test_a_choice_that_cannot_be_kept_is_always_int8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "quantization").write_text("a file where the folder should be")
    for bandwidth in (FAST, SLOW):
        decision = decide(AUTO, PROGRAM, NoBlocks(), LIBRARY, lambda: bandwidth, Remembered({"folder": "x"}, tmp_path))  # noqa: B023
        assert decision.scheme == "int8"
        assert "--quantization" in decision.reason
    assert "the choice of quantisation is not kept" in caplog.text


def test_an_unfinished_choice_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "this file system has no links", str(source))

    monkeypatch.setattr("os.link", refuse)
    assert "--quantization" in Remembered({"folder": "x"}, tmp_path).keep(Decision("int4", "measured")).reason
    assert list((tmp_path / "quantization").iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_explicit_dtype(dtype: Literal["float32", "bfloat16"]) -> None:
    config = replace(AUTO, dtype=dtype)
    assert decided(config) == Decision(None, f"--dtype {dtype} was asked for")
    assert decided(replace(config, quantization="none")).scheme is None
    with pytest.raises(BadInputError, match=f"--quantization int8 and --dtype {dtype} contradict"):
        decided(replace(config, quantization="int8"))


def test_without_the_library_auto_is_none_and_int8_is_refused() -> None:
    reason = "the native library was not built (no C compiler at installation)"
    assert decided(AUTO, library=reason) == Decision(None, reason)
    with pytest.raises(BadInputError, match=r"no C compiler.*--quantization none"):
        decided(replace(AUTO, quantization="int8"), library=reason)


def test_a_shape_that_the_native_step_does_not_run() -> None:
    program = random_program(random_spec())
    assert "intermediate size is 136" in decide(AUTO, program, NoBlocks(), LIBRARY, lambda: FAST).reason
    with pytest.raises(BadInputError, match="intermediate size is 136"):
        decide(replace(AUTO, quantization="int4"), program, NoBlocks(), LIBRARY, lambda: FAST)


def loaded(folder: Path, config: EngineConfig, draft: Path | None = None) -> EngineFacts:
    return load_executor(config, str(folder), None if draft is None else str(draft), SilentProgress())[1]


def choice(facts: EngineFacts, name: str) -> Choice:
    return next(choice for choice in facts.choices if choice.name == name)


def test_facts_say_what_was_taken_and_why(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = make_tiny_model(tmp_path / "model", "qwen2")
    facts = loaded(folder, AUTO)
    assert facts.dtype == choice(facts, "quantization").implementation == "int8"
    assert choice(facts, "forward").implementation == "native"
    assert choice(facts, "weights").reason == "16 from floats to int8"
    floats = loaded(folder, replace(AUTO, quantization="none"))
    assert floats.dtype == "bfloat16"
    assert choice(floats, "quantization") == Choice("quantization", "none", "asked for")
    assert facts.target_page_bytes * 2 == floats.target_page_bytes, "half precision"
    assert facts.target_weight_bytes < 0.7 * floats.target_weight_bytes


def test_a_drafter_follows_the_same_flag_by_its_own_checkpoint(tmp_path: Path) -> None:
    target, odd = make_tiny_model(tmp_path / "target"), make_tiny_model(tmp_path / "odd", head_dim=8)
    config = replace(AUTO, draft=str(odd))
    facts = loaded(target, config, odd)
    assert choice(facts, "forward").implementation == "native"
    assert choice(facts, "draft quantization").implementation == "none"
    assert "not a multiple of 16" in choice(facts, "draft quantization").reason
    assert facts.target_page_bytes == facts.drafter_page_bytes, "two bytes of 16 elements, four of 8"
    with pytest.raises(BadInputError, match="multiple of 16"):
        loaded(target, replace(config, quantization="int8"), odd)


def test_a_four_bit_gguf_file_keeps_its_blocks(tmp_path: Path) -> None:
    gguf, folder = tmp_path / "model.gguf", tmp_path / "folder"
    make_tiny_gguf(gguf, "qwen3", GGMLQuantizationType.Q4_1, head_kind=GGMLQuantizationType.Q8_0)
    folder.mkdir()
    convert_gguf(gguf, folder, SilentProgress())
    facts = loaded(folder, AUTO)
    assert facts.dtype == "int4"
    assert choice(facts, "weights").reason == "15 Q4_1 matrices as in the file; 1 Q8_0 matrices as in the file"
    again = loaded(folder, AUTO)
    assert again.choices == facts.choices


def test_a_damaged_cache_is_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    folder = make_tiny_model(tmp_path / "model")
    loaded(folder, AUTO)
    (file,) = (tmp_path / "cache" / "packed").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-64])
    assert loaded(folder, AUTO).dtype == "int8"
    assert "weights are packed anew" in caplog.text
    assert file.read_bytes() == whole
    monkeypatch.setattr("paceline.forward.packed._pack", lambda *given: pytest.fail("packed again"))
    assert loaded(folder, AUTO).dtype == "int8"
