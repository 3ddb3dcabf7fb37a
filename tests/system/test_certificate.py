"""The certificate of the real model: speculation changes no token and no law."""

import pytest

from paceline.prove.certificate.certify import certify
from paceline.prove.certificate.options import CertifyOptions
from paceline.prove.datasets.prompt import Prompt
from tests.e2e.conftest import DEFAULT_MODEL, serve

pytestmark = pytest.mark.system

PROMPTS = [Prompt("capital", "qa", ("What is the capital of France?",)), Prompt("heap", "coding", ("Explain what a heap is.",))]


async def test_the_default_model_gets_its_certificate() -> None:
    """In the dtype in which it is served."""
    with serve([DEFAULT_MODEL, "--speculation", "on", "--kv-cache-memory-bytes", str(128 << 20)]) as server:
        certificate = await certify(server.url, PROMPTS, CertifyOptions(max_tokens=16, num_samples=40))
    assert certificate.holds is True, (certificate.broken, certificate.unknown)
    assert certificate.num_compared == 2 * 4
    assert certificate.num_draft_tokens is not None and certificate.num_draft_tokens > 20
    assert len(certificate.law_tests) == 10
    assert all(test.num_drafted == 40 for test in certificate.law_tests), "each sample is of a position where a draft was verified"
