"""Fetch: download the checkpoint and the data sets, and check them against their pins.

artifacts/source/
  model/NAME.gguf  or  model/config.json, model/*.safetensors, tokenizer files
  adapter/adapter_config.json, adapter/adapter_model.safetensors    where the recipe names an adapter
  data/boolq/none/validation/…    Arrow tables, read by pipeline/sources/corpus.py
  traffic/…       a server's traffic log, where the recipe names one; data/traffic holds it as a table
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from pipeline.recipe import KINDS, Recipe
from pipeline.sources.copying import Fetched, explained_os_errors, fetch_source
from pipeline.sources.corpus import QUESTION, count_rows
from pipeline.sources.source import FOLDERS, Source, folder_of
from pipeline.sources.traffic import NAME as TRAFFIC
from pipeline.sources.traffic import fetch_traffic
from tapeout.artifact import Artifact, create, load
from tapeout.errors import SourceError

# Files of a checkpoint besides its *.safetensors. Not optimizer states, pickles or other exports.
CHECKPOINT_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken", ".md"}
SAFETENSORS_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = frozenset({ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin"})

log = logging.getLogger(__name__)


def fetch(recipe: Recipe, folder: Path) -> Artifact[Source]:
    """Fetch both sources into the artifact ``folder``, and look at the data; :class:`SourceError` says what stopped it.

    Every data set with a short name is kept, and those that the recipe names must exist. So a recipe with another known
    task finds its data, and the artifact stays the same.
    """
    needed = recipe.datasets
    folders = {*FOLDERS.values(), *map(folder_of, needed)}
    with explained_os_errors(folder), create(folder, Source) as draft:
        model = fetch_source(
            recipe.model.source, draft.folder / "model", sha256=recipe.model.sha256, keep=_is_checkpoint_file
        )
        kind = _kind_of(model)
        adapter = _fetch_adapter(recipe, draft.folder / "adapter")
        data = fetch_source(
            recipe.data.source,
            draft.folder / "data",
            sha256=recipe.data.sha256,
            keep=lambda name: any(name.startswith(f"{wanted}/") for wanted in folders),
        )
        _require_datasets(data, [name for name in needed if name != TRAFFIC or not recipe.data.traffic])
        traffic, pin = recipe.data.traffic, recipe.data.traffic_sha256
        log = fetch_traffic(traffic, pin, draft.folder / "traffic", data.path) if traffic else None
        _check_data(recipe, data.path)
        record = Source(
            model_source=model.source,
            model_sha256=model.sha256,
            model_revision=model.revision,
            model_kind=kind,
            model_entry=model.path.relative_to(draft.folder).as_posix(),
            model_licenses=model.licenses,
            adapter_source=adapter and adapter.source,
            adapter_sha256=adapter and adapter.sha256,
            adapter_revision=adapter and adapter.revision,
            adapter_entry=adapter and adapter.path.relative_to(draft.folder).as_posix(),
            adapter_licenses=adapter.licenses if adapter else (),
            data_source=data.source,
            data_sha256=data.sha256,
            data_revision=data.revision,
            data_entry=data.path.relative_to(draft.folder).as_posix(),
            data_licenses=data.licenses,
            traffic_source=log and log.source,
            traffic_sha256=log and log.sha256,
            traffic_revision=log and log.revision,
            datasets=tuple(
                sorted(p.relative_to(data.path).parents[1].as_posix() for p in data.path.rglob("state.json"))
            ),
        )
        draft.finish(record, parents={})
    return load(folder, Source)


def _fetch_adapter(recipe: Recipe, folder: Path) -> Fetched | None:
    source, pin = recipe.model.adapter, recipe.model.adapter_sha256
    if source is None:
        return None
    files = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    adapter = fetch_source(source, folder, sha256=pin, keep=lambda name: name in files)
    if lacking := [name for name in files if not (adapter.path / name).is_file()]:
        raise SourceError(
            f"{adapter.source} is no LoRA adapter: it has no {' and no '.join(lacking)}",
            expected=f"{' and '.join(files)} in one folder",
            remedy="save it with peft as safetensors, or name the folder that holds both in model.adapter",
        )
    return adapter


def _is_checkpoint_file(name: str) -> bool:
    """Of the folder itself, not of folders in it: those hold other formats of the same weights."""
    path = PurePosixPath(name)
    if len(path.parts) > 1 or path.name.startswith("."):
        return False
    if path.suffix == ".safetensors":
        return not path.name.startswith("consolidated")  # Mistral's own layout of the same weights
    return path.suffix in CHECKPOINT_SUFFIXES


def _kind_of(model: Fetched) -> Literal["gguf", "safetensors"]:
    """What the fetched model is; :class:`SourceError` if transformers could not open it."""
    if model.path.is_file():
        with model.path.open("rb") as stream:
            magic = stream.read(4)
        if magic != b"GGUF":
            raise SourceError(
                f"{model.path.name} from {model.source} is not a GGUF file: it begins with {magic!r}",
                expected="a GGUF file, or a folder with config.json and *.safetensors",
                remedy="for a safetensors checkpoint name its folder, not the file",
            )
        return "gguf"
    adapter = sorted(ADAPTER_FILES.intersection(model.offered))
    if adapter and (model.path / "config.json").is_file():
        raise SourceError(
            f"{model.source} holds an adapter beside the model: {', '.join(adapter)}",
            expected="a model alone, so that it is clear which weights are meant",
            remedy="to merge the adapter, move its files to a folder of their own and name that in model.adapter; else "
            "remove them",
        )
    if adapter:
        raise SourceError(
            f"{model.source} is a LoRA adapter, not a model: it has {', '.join(adapter)} and no config.json",
            expected="a checkpoint in model.source",
            remedy=f"set model.adapter: {model.source}, and model.source to the model that it was trained on"
            f"{_base_model(model.path / ADAPTER_CONFIG)}",
        )
    weights = sorted(path.name for path in model.path.glob("*.safetensors"))
    if not weights or not (model.path / "config.json").is_file():
        raise SourceError(
            f"{model.source} is not a checkpoint: it has {_lacks(model, weights)}",
            expected="config.json and *.safetensors in one folder, or one GGUF file",
            remedy=_checkpoint_remedy(model),
        )
    index = model.path / SAFETENSORS_INDEX
    if index.is_file():
        try:
            shards: set[str] = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(
                f"{SAFETENSORS_INDEX} of {model.source} does not parse: {error!r}", remedy="complete the checkpoint"
            ) from error
        if missing := sorted(shards - set(weights)):
            raise SourceError(
                f"{model.source} lacks {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}",
                expected=f"the {len(shards)} files named in {SAFETENSORS_INDEX}",
                remedy="complete the checkpoint",
            )
    return "safetensors"


def _base_model(config: Path) -> str:
    """The model that an adapter names, in brackets."""
    try:
        return f" ({json.loads(config.read_text())['base_model_name_or_path']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _lacks(model: Fetched, weights: Sequence[str]) -> str:
    lacking = ["no *.safetensors"] if not weights else []
    if not (model.path / "config.json").is_file():
        lacking.append("no config.json")
    return " and ".join(lacking)


def _checkpoint_remedy(model: Fetched) -> str:
    ggufs = [name for name in model.offered if name.endswith(".gguf")]
    if ggufs:
        return f"name one of its GGUF files: {model.source}/{', '.join(ggufs[:4])}"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in model.offered):
        return "its weights are pickles, which may run code: save it again with safe_serialization=True"
    configs = [name.removesuffix("/config.json") for name in model.offered if name.endswith("/config.json")]
    if configs:
        return f"name the folder of the checkpoint: {model.source}/{configs[0]}"
    return "name a checkpoint's folder"


def _check_data(recipe: Recipe, data: Path) -> None:
    """What calibration and evidence will read, before any long work. A warning counts rows that are left out."""

    def count(dataset: str, column: str | None = None) -> int:
        column = column or QUESTION
        rows, blank, different = count_rows(data, dataset, column)
        if blank:
            log.warning("%s.%s: %d of %d rows are null or blank, and left out", dataset, column, blank, rows)
        return different

    for kind in KINDS:
        kind.check_data(recipe, data, count)


def _require_datasets(data: Fetched, needed: Sequence[str]) -> None:
    """:class:`SourceError` if a needed data set was not fetched."""
    if not data.path.is_dir():
        raise SourceError(
            f"{data.source} is a file",
            expected="a folder of data sets, each as written by `datasets.Dataset.save_to_disk`",
        )
    tables = {str(PurePosixPath(name).parents[1]) for name in data.offered if name.endswith("/state.json")}
    for dataset in needed:
        if folder_of(dataset) not in tables:
            names = {folder: name for name, folder in FOLDERS.items()}
            offered = sorted(names.get(table, table) for table in tables)
            near = difflib.get_close_matches(dataset, offered, n=3) or offered[:12]
            raise SourceError(
                f"{data.source} holds no data set {dataset!r} (folder {folder_of(dataset)})",
                expected="one of " + ", ".join(near),
                remedy="name a server's traffic log in data.traffic"
                if dataset == TRAFFIC
                else "correct calibrate.dataset, evaluate.tasks or shadow.datasets, or the data source",
            )
