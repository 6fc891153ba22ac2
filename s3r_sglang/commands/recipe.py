"""`s3r recipe`: training runs as ready commands."""

from rich.console import Console
from rich.table import Table

from s3r_sglang.configs import recipes
from s3r_sglang.configs.recipes import RecipeError


def execute(name: str | None, overrides: list[str], console: Console) -> None:
    """Print the command of recipe `name` to standard output, or list the recipes.

    Raises:
        RecipeError: there is no such recipe, or an override does not fit.
    """
    if name:
        print(recipes.load(name, overrides).command())
        return
    if overrides:
        raise RecipeError("overrides need the name of a recipe")
    table = Table("recipe", "what", box=None)
    for shipped in recipes.names():
        table.add_row(shipped, recipes.load(shipped).description)
    console.print(table)
