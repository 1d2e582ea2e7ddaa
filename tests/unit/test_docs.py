"""The documents say what the code says: every parameter, command and path that they name exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.main import get_command

from pipeline.cli.main import app
from pipeline.recipe import Recipe
from tapeout.formats import formats
from tapeout.recipe import METHODS, KVCache, Rule
from tapeout.schemes import Scheme

ROOT = Path(__file__).parents[2]
RECIPES = (ROOT / "docs/recipes.md").read_text()
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "docs/architecture.md",
        "docs/recipes.md",
        "docs/targets.md",
        "docs/operations.md",
        "docs/ci.md",
        "docs/formats.md",
        "docs/deploy.md",
        "CHANGELOG.md",
    )
]
ROW = re.compile(r"^\| `([a-z_.\[\]0-9]+)` \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, str, str]]:
    return {name: (kind, default, meaning) for name, kind, default, meaning in ROW.findall(RECIPES)}


def parameters(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, annotation and default of every parameter; a section is its parameters, rules are also one."""
    for field_name, field in model.model_fields.items():
        name = prefix + (field.alias or field_name)
        if Scheme in parts(field.annotation):
            yield name, None, None
        elif Rule in parts(field.annotation):
            yield name, None, None
            yield f"{name}[].match", str, PydanticUndefined
            yield f"{name}[].experts", None, None
            yield from (p for p in parameters(Scheme, f"{name}[].") if not p[0].endswith("expert_bits"))  # of rules
        elif KVCache in parts(field.annotation):
            yield name, None, None
            yield from parameters(KVCache, f"{name}.")
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from parameters(field.annotation, f"{name}.")
        else:
            yield name, field.annotation, field.default


def parts(annotation: Any) -> set[Any]:
    """A type and those it is made of."""
    return {annotation, *(part for inner in get_args(annotation) for part in parts(inner))}


def written(default: Any) -> str:
    match default:
        case bool():
            return str(default).lower()
        case None:
            return "none"
        case dict():
            return ", ".join(f"{key}: {value}" for key, value in default.items()) or "none"
        case tuple():
            return ", ".join(str(item) for item in default)
        case _ if default is PydanticUndefined:
            return "required"
        case _:
            return str(default)


def test_every_parameter_is_documented_and_no_other() -> None:
    assert list(documented()) == [name for name, _, _ in parameters()]


@pytest.mark.parametrize(("name", "annotation", "default"), [p for p in parameters() if p[1] is not None])
def test_defaults_and_choices_are_those_of_the_code(name: str, annotation: Any, default: Any) -> None:
    kind, stated, _ = documented()[name]
    assert stated == written(default)
    if name.endswith("[].bits"):
        assert set(map(int, re.split(r", | or ", kind))) == {known.bits for known in formats().values()}
    elif type(None) in get_args(annotation) and any(get_origin(part) is Literal for part in get_args(annotation)):
        sizes = next(part for part in get_args(annotation) if get_origin(part) is Literal)
        assert re.split(r", | or ", kind) == [str(choice) for choice in get_args(sizes)]
    elif get_origin(annotation) is Literal:
        assert re.split(r", | or ", kind) == [str(choice) for choice in get_args(annotation)]


def test_every_method_is_documented_and_no_other() -> None:
    section = RECIPES.split("## quantize")[1].split("## build")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {path.stem for path in METHODS.glob("[!_]*.py")}


def test_yaml_in_the_recipe_page_is_valid() -> None:
    import yaml

    blocks = re.findall(r"```yaml\n(.*?)```", RECIPES, re.DOTALL)
    assert len(blocks) >= 2
    base = {"model": {"source": "x"}, "data": {"source": "x"}}
    for block in blocks:
        Recipe.model_validate(base | yaml.safe_load(block))


def command_lines() -> list[str]:
    lines = [line.strip() for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    return [line for line in lines if line.startswith(("tapeout ", "make "))]


def test_the_readme_shows_every_command() -> None:
    shown = {line.split()[1] for line in command_lines() if line.startswith("tapeout ")}
    group: Any = get_command(app)
    registered = set(group.commands)
    assert registered - {"stage"} <= shown <= registered


@pytest.mark.parametrize("line", [line for line in command_lines() if line.startswith("tapeout ")])
def test_commands_in_the_documents_parse(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    if ">" in words:
        words = words[: words.index(">")]
    group: Any = get_command(app)
    command = group.commands[words[0]]
    command.make_context(words[0], list(words[1:]))


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {line.split()[1] for line in command_lines() if line.startswith("make ")}
    assert named <= targets and {"repro", "test"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_the_documents_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    files = re.findall(r"`((?:pipeline|quantization|engines|evals|runtime|tests|docs|\.ci|\.github)/[\w./-]*)`", text)
    assert not [name for name in files if not (ROOT / name).exists()]
