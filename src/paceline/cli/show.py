"""`paceline config show` and `paceline config schema`: the settings as they would be used, and what they may be."""

import json

from cyclopts import App

from paceline.cli.settings import Origins
from paceline.config import ServerConfig, schema, settle_server, values


def config_app(origins: Origins) -> App:
    """The `config` verbs; `origins` is filled by the parser before they run."""
    app = App(help="Every setting, its value and where it came from.")

    def show(*, config: ServerConfig = ServerConfig()) -> None:  # noqa: B008 - frozen
        """Print every setting with its source, as lines of a --config file. Takes the flags of `serve`."""
        print("\n".join(render(config, origins.by_name)))

    def print_schema() -> None:
        """Print the JSON schema of a --config file."""
        print(json.dumps(schema(), indent=2))

    app.command(show)
    app.command(print_schema, name="schema")
    return app


def render(config: ServerConfig, origins: dict[str, str]) -> list[str]:
    """Lines `name: value  # source`, which a --config file could hold. Raises BadInputError for settings that cannot work."""
    settled = values(settle_server(config))
    given = values(config)
    lines: list[str] = []
    for name, value in settled.items():
        source = origins.get(name, "default") if value == given[name] else "batch_size"
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        lines.append(f"{f'{name}: {text}':<44}# {source}")
    return lines
