"""The start-up check that a drafter's token ids mean what the target's mean. Torch-free; called where a pair of models is chosen."""

from collections.abc import Mapping

from paceline.errors import BadInputError


def check_same_tokens(target_vocabulary: Mapping[str, int], draft_vocabulary: Mapping[str, int]) -> None:
    """Refuse two tokenizers (token -> id, added tokens included) whose tokens differ at an id that both vocabularies reach.

    Ids beyond the shorter vocabulary are padding to the other one and are never drafted. Raises BadInputError naming the first
    differing id.
    """
    target = {token_id: token for token, token_id in target_vocabulary.items()}
    draft = {token_id: token for token, token_id in draft_vocabulary.items()}
    num_shared = min(max(target, default=-1), max(draft, default=-1)) + 1
    for token_id in range(num_shared):
        if target.get(token_id) != draft.get(token_id):
            raise BadInputError(
                f"the draft model has other tokens than the target: id {token_id} is {_show(target.get(token_id))} in the target "
                f"and {_show(draft.get(token_id))} in the draft model; choose a draft model of the same family, or --draft ngram",
                param="draft",
            )
    if num_shared == 0:
        raise BadInputError("the draft model and the target share no token: one of the two tokenizers is empty; choose another --draft")


def _show(token: str | None) -> str:
    return "unused" if token is None else repr(token)
