"""Builds an executor from folders: weights, drafter, KV memory. Called once per engine, by the loop's process and by `llm.py`.

Everything that can be wrong with a model or a flag is refused here, before the first request.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import EngineConfig
from paceline.core.facts import Choice, EngineFacts
from paceline.core.progress import Progress
from paceline.errors import BadInputError
from paceline.executor.bandwidth import read_bandwidth
from paceline.executor.executor import Executor
from paceline.executor.grammar import Grammars
from paceline.executor.model_loader import Loaded, ModelLoader
from paceline.executor.step import Target
from paceline.forward.forward import Forward
from paceline.forward.memory import allocate_kv, page_bytes
from paceline.models.folder import read_eos_token_ids, read_vocabulary
from paceline.speculative.drafter import DRAFTERS, DrafterSetup, DraftModel, load_drafter_class
from paceline.speculative.same_tokens import check_same_tokens
from paceline.speculative.verify import Rule

_DEFAULT_KV_SHARE = 0.25  # of the memory that is free at start: the HTTP process and the page cache need the rest
_DEFAULT_KV_LIMIT_BYTES = 4 << 30
_CGROUP_FILES = (  # limit and usage of the group this process is in, as containers see it: version 2, then 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class _Memory:
    """The KV memory plan: one page id holds the target's and the drafter's KV of `page_size` tokens."""

    num_pages: int
    page_size: int
    target_page_bytes: int
    drafter_page_bytes: int
    max_model_len: int


def load_executor(config: EngineConfig, folder: str, draft_folder: str | None, progress: Progress) -> tuple[Executor, EngineFacts]:
    """Load the target from `folder` and, if `draft_folder` is given, a draft model from there.

    Raises BadInputError or UnsupportedModelError for what this build cannot run or this machine's memory cannot hold.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if draft_folder is not None:
        check_same_tokens(read_vocabulary(Path(folder)), read_vocabulary(Path(draft_folder)))
    models = ModelLoader(config, progress)
    loaded = models.load(Path(folder), "load target")
    loaded_draft = None if draft_folder is None else models.load(Path(draft_folder), "load draft model")
    target, draft = loaded.forward, None if loaded_draft is None else loaded_draft.forward
    memory = _plan_memory(config, target, draft)
    rule = Rule(config.verification)
    kv = allocate_kv(target, memory.num_pages, memory.page_size)
    draft_model = None if draft is None else DraftModel(draft, allocate_kv(draft, memory.num_pages, memory.page_size))
    name = _drafter_name(config, draft)
    drafter_class = load_drafter_class(name)
    assert drafter_class.num_lookahead == 0, "pages cover the planned drafts and nothing beyond"
    drafter = drafter_class(DrafterSetup(rule, target.spec.vocab_size, draft_model))
    facts = EngineFacts(
        model_name=Path(folder).name,
        architecture=target.spec.architecture,
        device="cpu",
        dtype=loaded.dtype,
        vocab_size=target.spec.vocab_size,
        max_model_len=memory.max_model_len,
        max_position_embeddings=target.spec.max_position_embeddings,
        num_pages=memory.num_pages,
        page_size=memory.page_size,
        target_page_bytes=memory.target_page_bytes,
        drafter_page_bytes=memory.drafter_page_bytes,
        target_weight_bytes=target.weight_bytes,
        drafter_weight_bytes=0 if draft is None else draft.weight_bytes,
        drafter=name,
        drafter_max_len=memory.max_model_len if draft is None else min(draft.spec.max_position_embeddings, memory.max_model_len),
        max_draft_length=0 if name == "none" else config.max_draft_length,
        eos_token_ids=_eos_token_ids(Path(folder), target.spec.vocab_size),
        choices=loaded.choices + _draft_choices(loaded_draft),
        memory_bandwidth=read_bandwidth(torch.get_num_threads()),
    )
    grammars = Grammars(Path(folder) / "tokenizer.json", target.spec.vocab_size, facts.eos_token_ids)
    return Executor(Target(target, kv, rule), drafter, grammars), facts


def _eos_token_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    token_ids = read_eos_token_ids(folder)
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise BadInputError(
                f"{folder} names the end token {token_id:,}, and its model has {vocab_size:,} tokens, 0 to {vocab_size - 1:,}; "
                "correct eos_token_id in generation_config.json or config.json or eos_token in tokenizer_config.json, or fetch it again"
            )
    return token_ids


def _plan_memory(config: EngineConfig, target: Forward, draft: Forward | None) -> _Memory:
    """Divide the KV budget into pages and cut the context to what they hold. Errors: BadInputError with the numbers."""
    page_size = config.block_size
    target_bytes = page_bytes(target, page_size)
    drafter_bytes = 0 if draft is None else page_bytes(draft, page_size)
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = min(int(_available_bytes() * _DEFAULT_KV_SHARE), _DEFAULT_KV_LIMIT_BYTES)
    limit = target.spec.max_position_embeddings
    wanted_len = limit if config.max_model_len is None else config.max_model_len
    if wanted_len > limit:
        raise BadInputError(
            f"--max-model-len {wanted_len:,} is beyond the model's {limit:,} positions; ask for at most that", param="max_model_len"
        )
    # More pages than every row at full length could fill would never be used.
    num_pages = min(budget // (target_bytes + drafter_bytes), config.max_batch_size * -(-wanted_len // page_size))
    held_len = num_pages * page_size
    if held_len < 2 or (config.max_model_len is not None and held_len < wanted_len):
        needed = -(-max(wanted_len, 2) // page_size) * (target_bytes + drafter_bytes)
        raise BadInputError(
            f"KV memory of {budget:,} bytes holds {held_len:,} tokens, one sequence of {wanted_len:,} needs {needed:,} bytes; "
            "raise --kv-cache-memory-bytes or lower --max-model-len",
            param="kv_cache_memory_bytes",
        )
    return _Memory(num_pages, page_size, target_bytes, drafter_bytes, min(wanted_len, held_len))


def _drafter_name(config: EngineConfig, draft: Forward | None) -> str:
    if draft is not None:
        return "draft_model"
    if config.speculation == "off" or config.max_draft_length == 0:
        return "none"
    if config.draft not in DRAFTERS:
        raise BadInputError(f"--draft {config.draft}: this build has none, ngram, or the name of a model", param="draft")
    return config.draft


def _draft_choices(draft: Loaded | None) -> tuple[Choice, ...]:
    if draft is None:
        return ()
    return tuple(Choice(f"draft {choice.name}", choice.implementation, choice.reason) for choice in draft.choices)


def _available_bytes() -> int:
    """Memory that can be used without swapping: as the kernel estimates it, and no more than a container's limit leaves."""
    limits = [_host_available_bytes()]
    for limit_path, usage_path in _CGROUP_FILES:
        try:
            limits.append(int(Path(limit_path).read_text()) - int(Path(usage_path).read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return max(min(limits), 0)


def _host_available_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
