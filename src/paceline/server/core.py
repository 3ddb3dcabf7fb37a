"""What a route needs of the server to run a job. `app.py` makes it, for the routes that stand in folders of their own."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Scope

from paceline.metrics.requests import RequestMetrics
from paceline.server.chat import Job, Preparation
from paceline.server.generation import Generation
from paceline.server.inflight import InFlight
from paceline.server.openai.errors import ErrorAnswer


@dataclass(frozen=True, slots=True)
class Core:
    """`refusal`: what to tell a good request that cannot run now; `refuse` tells it, in the form of the API that the scope asks."""

    model_name: str
    preparation: Preparation
    in_flight: InFlight
    metrics: RequestMetrics
    new_generation: Callable[[Job], Generation]
    refusal: Callable[[], ErrorAnswer | None]
    refuse: Callable[[ErrorAnswer, Scope], Response]
