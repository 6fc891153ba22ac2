"""Training runs as YAML that renders to a command line of `s3r-openrlhf`.

A recipe is a mapping: `description`, `base` (the recipe it changes, if any), `s3r` (its keys are the `--s3r.*`
flags) and sections of OpenRLHF's flags, nested at the dots: `actor: {adam: {lr: 1.0e-5}}` is
`--actor.adam.lr 1e-05`. true sets a switch, null leaves a flag out, a list gives several words. Within a
text, `${rl_integration}` is the folder of that package.

Every key and type is checked against OpenRLHF 0.11.2 (openrlhf/flags.json, which a test compares with its parser),
so that a misspelt setting fails here and not on the cluster.
"""

import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from s3r_sglang.rl_integration.openrlhf import options

COMMAND = "s3r-openrlhf"
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


class RecipeError(ValueError):
    """The recipe is unusable; the message is one sentence that says what to change."""


@dataclass(frozen=True)
class Recipe:
    """A checked recipe: `settings` maps each flag, without dashes, to its value."""

    name: str
    description: str
    settings: dict[str, Any]

    def arguments(self) -> list[str]:
        """Words of the command line after the command itself."""
        return [word for name, value in self.settings.items() for word in _words(name, value)]

    def command(self) -> str:
        """The command for a POSIX shell, one flag per line."""
        lines = [shlex.join(_words(name, value)) for name, value in self.settings.items()]
        return " \\\n    ".join([COMMAND, *filter(None, lines)])


def names() -> list[str]:
    """Recipes that the package ships."""
    return sorted(Path(file.name).stem for file in _folder().iterdir() if file.name.endswith(".yaml"))


def load(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and check it.

    Args:
        source: path of a YAML file, or a name out of `names`.
        overrides: `key=value` with a dotted key and a YAML value, such as `actor.adam.lr=1.0e-6`.

    Raises:
        RecipeError: it cannot be read, or has a key or value that OpenRLHF or `s3r-openrlhf` would not take.
    """
    content = _read(source)
    description = content.pop("description", "")
    settings = _flatten(content)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise RecipeError(f"an override must be key=value, not {override!r}")
        settings[key.strip()] = _yaml(text, override)
    folder = str(resources.files("s3r_sglang.rl_integration"))
    for name, value in settings.items():
        if isinstance(value, str):
            settings[name] = value.replace("${rl_integration}", folder)
        _check(name, settings[name])
    return Recipe(Path(source).stem, description, settings)


def _folder() -> Any:
    return resources.files("s3r_sglang.configs") / "openrlhf"


def _read(source: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The mapping of a recipe on top of that of its base; `above` are the recipes that have it for theirs."""
    if source in above:
        raise RecipeError(f"recipe '{source}' is based on itself")
    path = Path(source).expanduser()
    if not path.is_file():
        path = _folder() / f"{source}.yaml"
        if not path.is_file():
            raise RecipeError(f"recipe '{source}' is neither a file nor one of {', '.join(names())}")
    content = _yaml(path.read_text(), str(path))
    if not isinstance(content, dict):
        raise RecipeError(f"{path} must hold a mapping")
    base = content.pop("base", None)
    return content if base is None else _merge(_read(base, (*above, source)), content)


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


@cache
def flags() -> dict[str, dict[str, Any]]:
    """Flags of the command, without dashes: kind (switch, value, list), type, and choices or number of words."""
    known = json.loads((_folder() / "flags.json").read_text())
    for action in options.parser()._actions:
        for name in action.option_strings:
            kind = "switch" if action.nargs == 0 else "value"
            entry = {"kind": kind, "type": getattr(action.type, "__name__", "str")}
            known[name.removeprefix("--")] = entry | (
                {"choices": [*action.choices]} if action.choices else {}
            )
    return known


def _check(name: str, value: Any) -> None:
    flag = flags().get(name)
    if flag is None:
        near = difflib.get_close_matches(name, flags(), 1, cutoff=0.0)[0]
        raise RecipeError(f"unknown setting '{name}'; did you mean '{near}'?")
    if value is None:
        return
    if flag["kind"] == "switch":
        if not isinstance(value, bool):
            raise RecipeError(f"{name} is a switch: true or false, not {value!r}")
        return
    if flag["kind"] == "list" and not isinstance(value, list):
        raise RecipeError(f"{name} takes a list, not {value!r}")
    if "words" in flag and len(value) != flag["words"]:
        raise RecipeError(f"{name} takes {flag['words']} values, not {len(value)}")
    types = _PYTHON_TYPES.get(flag["type"], (str,))
    for item in value if flag["kind"] == "list" else [value]:
        # YAML reads 1e-5 as text; it wants 1.0e-5.
        if isinstance(item, bool) or not isinstance(item, types):
            raise RecipeError(f"{name} must be of type {flag['type']}, not {item!r}")
        if "choices" in flag and item not in flag["choices"]:
            raise RecipeError(f"{name} must be one of {', '.join(flag['choices'])}, not {item!r}")


def _words(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    # A value that begins with a dash would be taken for a flag.
    return [f"--{name}={value}"] if str(value).startswith("-") else [f"--{name}", str(value)]
