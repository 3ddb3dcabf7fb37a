"""A progress listener that remembers which stages it was told of."""


class RecordedProgress:
    """`stages` in order, each once; an update that makes no sense fails the test."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def update(self, stage: str, done: int, total: int) -> None:
        assert done >= 0
        assert total == 0 or done <= total
        if not self.stages or self.stages[-1] != stage:
            self.stages.append(stage)
