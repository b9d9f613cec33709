"""`minineo models`: what can be loaded by name."""

from dataclasses import asdict

from rich.table import Table

from ..checkpoints import KnownModel, known_models
from .app import JsonOption, Screen, app, check_writable, write_json


@app.command("models", epilog="Example: minineo models --json -")
def models_command(
    json_file: JsonOption = None,
):
    """List the models that can be loaded by name, and which of them are on this machine.

    A folder with config.json and weights, or owner/name of any GPT-Neo on the hub, does as well.
    """
    check_writable(json_file)
    models = known_models()
    if json_file != "-":
        Screen(highlight=False).print(model_table(models))
    if json_file is not None:
        write_json({"schema": 1, "models": [asdict(model) for model in models]}, json_file)
    return 0


def model_table(models: list[KnownModel]) -> Table:
    """Return a table with a row for every model."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("float32", justify="right")
    table.add_column("where")
    for model in models:
        here = model.place in ("embedded", "here")
        table.add_row(
            model.name,
            f"{model.parameters / 1e6:,.1f} M",
            f"{model.float32_bytes / 1e6:,.0f} MB",
            model.place if model.repo is None else f"{model.place}: {model.repo}",
            style=None if here else "dim",
        )
    return table
