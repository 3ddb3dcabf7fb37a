"""Control blocks on real models: drafts are held back from everyone for a while, and no token changes."""

from dataclasses import replace
from pathlib import Path

from paceline.core.request import SamplingParams
from tests.fakes.token_engine import Engine, engine, make_models, requests

SAMPLING = SamplingParams(200, temperature=0.8, seed=3, ignore_eos=True)


def test_blocks_hold_drafts_back_and_change_no_token(tmp_path: Path) -> None:
    models = make_models(tmp_path)
    each = Engine(models, engine("draft_model", speculation="on", control_share=0.5, enable_prefix_caching=False, max_draft_length=1))
    batch = requests(SAMPLING)[:2]
    plain = each.run([replace(request, max_draft_length=0) for request in batch])
    deltas = each.deltas(batch)
    assert [tuple(token for delta in each for token in delta.token_ids) for each in deltas] == plain
    for row in deltas:
        stats = row[-1].stats
        assert stats is not None
        assert stats.draft.num_control_steps >= 18
        assert stats.draft.num_control_steps == sum(delta.is_control for delta in row)
        assert stats.draft.num_spec_steps > 10
        assert all(delta.num_drafted == 0 and len(delta.token_ids) == 1 for delta in row if delta.is_control)
