"""What a certificate is asked for: the input of `certify.certify`.

    certificate = await certify(base_url, prompts, CertifyOptions(), show_progress)

It raises MissingError if there is no server, and nothing else: whatever a server refuses or breaks is part of the certificate.
"""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import BadInputError

ShowProgress = Callable[[str, int, int], None]
"""Stage, requests answered in it, requests of it in all."""


@dataclass(frozen=True, slots=True)
class CertifyOptions:
    """Defaults are those of `--certify`, two minutes on two cores with a small model; the quick proof takes a part of it."""

    baseline_url: str | None = None  # a server of its own for plain decoding
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = None
    num_prompts: int = 12  # compared, evenly taken from those given
    max_tokens: int = 40  # of each compared answer
    temperature: float = 0.8  # of the seeded comparison
    num_samples: int = 100  # of each law test
    concurrency: int = 16  # requests in flight
    epsilon: float = 0.15  # nats; bfloat16 logits between 16 and 32 are multiples of 0.125
    alpha: float = 0.001  # chance of a false alarm over all law tests together
    seed: int = 0
    timeout_s: float = 120.0  # of one request

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("num_prompts", self.num_prompts, 0, 10_000),
            ("max_tokens", self.max_tokens, 1, 1 << 20),
            ("temperature", self.temperature, 0.01, 100),
            ("num_samples", self.num_samples, 0, 1_000_000),
            ("concurrency", self.concurrency, 1, 1024),
            ("epsilon", self.epsilon, 0, 10),
            ("alpha", self.alpha, 1e-12, 0.5),
            ("timeout_s", self.timeout_s, 0.1, 86_400),
        ):
            if not low <= value <= high:
                raise BadInputError(f"{name} is {value}, allowed are {low:,} to {high:,}", param=name)
