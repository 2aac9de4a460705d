"""``qcollect recipes``: what is bundled, what a recipe resolves to, whether one is right."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from qcollect.cli.console import make_table, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="List, show and check recipes.", rich_markup_mode=None)

NameOrFile = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A bundled recipe's name, or a YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe field; may be given several times."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
def list_(json: Json = False) -> None:
    """List the bundled recipes.

    Example: qcollect recipes ls
    """
    from qcollect.recipe.load import list_recipes

    summaries = list_recipes()
    if json:
        print_json([{key: str(value) for key, value in asdict(s).items()} for s in summaries])
        return
    table = make_table("recipe", "description")
    for summary in summaries:
        table.add_row(Text(summary.name), Text(summary.description))
    print_table(table)


@app.command("show")
def show(recipe: NameOrFile, settings: Settings = None, json: Json = False) -> None:
    """Print a recipe with every default filled in; the keys are those --set takes.

    Example: qcollect recipes show tiny --set capture.values=both
    """
    import yaml

    from qcollect.recipe.load import load_recipe

    fields = load_recipe(recipe, settings or []).to_dict()
    if json:
        print_json(fields)
    else:
        typer.echo(yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1000), nl=False)


@app.command("validate")
def validate(recipe: NameOrFile, settings: Settings = None) -> None:
    """Check a recipe file; every fault is named with its line.

    Example: qcollect recipes validate my_recipe.yaml
    """
    from qcollect.recipe.load import load_recipe

    loaded = load_recipe(recipe, settings or [])
    typer.echo(f"{loaded.path}: valid")
