"""`paceline models`: what is in the cache, and moving it in and out. The work itself is in `weights/`."""

from cyclopts import App

from paceline.cli.progress import ConsoleProgress
from paceline.cli.sizes import size_text

app = App(help="The models that Paceline knows by name, and the cache they live in.")


@app.command(name="list")
def list_all() -> None:
    """List the models, their state in the cache, their size and licence."""
    from paceline.weights.inventory import list_models
    from paceline.weights.store import default_store

    store = default_store()
    for entry in list_models(store):
        size = f"{size_text(entry.size_bytes)} on disk" if entry.state != "absent" else f"{size_text(entry.download_bytes)} to download"
        print(f"{entry.name:<30} {entry.state:<11} {size:<20} {entry.summary}")
        if entry.licence:
            print(f"{'':<30} licence {entry.licence}")
    print(f"cache: {store.root}")


@app.command
def pull(name: str, /) -> None:
    """Download, check and convert a model, unless it is in the cache."""
    from paceline.weights.pull import pull as pull_model
    from paceline.weights.store import default_store

    with ConsoleProgress() as progress:
        folder = pull_model(name, default_store(), progress)
    print(folder)


@app.command
def verify(name: str, /) -> int:
    """Hash a cached model's files; exit 1 if one is not as published."""
    from paceline.weights.inventory import verify as verify_model
    from paceline.weights.store import default_store

    with ConsoleProgress() as progress:
        damaged = verify_model(name, default_store(), progress)
    for file in damaged:
        print(f"{file.path} {file.reason}")
    if not damaged:
        print(f"{name}: every file is as published")
    return 1 if damaged else 0


@app.command
def evict(name: str, /) -> None:
    """Delete a model from the cache."""
    from paceline.weights.inventory import evict as evict_model
    from paceline.weights.store import default_store

    freed_bytes = evict_model(name, default_store())
    print(f"{name}: {size_text(freed_bytes)} freed")
