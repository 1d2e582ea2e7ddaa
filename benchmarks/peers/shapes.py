"""Random weights in the shape of a known model, for all engines: a checkpoint, its GGUF file, and bundles of ours.

Speed does not depend on the weights' values. Quality does, so nothing of it is measured: no KL, and classes follow
from the bits per weight. Bundles are built by the pipeline's own stages, with rounding to nearest: one with the
recipe's schemes, and one for each plan that was chosen for another model, with its schemes at the same depth.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import scale
from benchmarks import shapes as known
from benchmarks.peers.environments import PeerError, peers_folder
from benchmarks.shapes import SHAPES, Shape
from quantization.plan import PrecisionPlan
from tapeout import artifact
from tapeout.schemes import CANDIDATE_SCHEMES, EMBEDDING_CANDIDATES, Scheme

SHARED = {"fetch": "source", "export": "graph", "calibrate": "calibration"}  # stages of a shape, and their artifacts
STAGES = ("sensitivity", "plan", "quantize", "build-candidate")  # of each bundle
# Contexts of 8,192 tokens and an answer.
SETTINGS = (
    "quantize.candidates=[rtn]",
    "calibrate.samples=4",
    "calibrate.tokens=64",
    "plan.samples=1",
    "export.max_positions=8448",
)
LLAMA_CPP = "TAPEOUT_LLAMA_CPP"  # names the user's checkout of llama.cpp
CONVERTER = "convert_hf_to_gguf.py"
# What no rule of a recipe may round again.
MXFP4_RULE = {"match": "layers.*.experts_*", "format": "mxfp4"}
UPS = (".gate_up", ".experts_up")  # gates and ups of a layer's linears, and of its experts


@dataclass(frozen=True)
class Prepared:
    """``gguf`` is missing where no peer asked for it."""

    checkpoint: Path  # graph artifact
    source: Path  # source artifact
    gguf: Path
    bundles: dict[str, Path]  # by name


def asked_shape(name: str, layers: int | None) -> tuple[str, Shape]:
    """The shape, whole or its first ``layers``, and the name of its folder and page."""
    return (f"{name}-{layers}-layers", SHAPES[name].cut(layers)) if layers else (name, SHAPES[name])


def prepare(
    name: str,
    shape: Shape,
    recipe: Path,
    plans: Mapping[str, Path],
    tokenizer: Path,
    progress: Callable[[str], None],
    *,
    gguf: bool,
) -> Prepared:
    """Make what is missing of a shape, in the folder of the peers. All but kernels is kept between runs.

    ``plans``: artifacts of plans, by the names of the bundles that get their schemes. `default` has the recipe's.
    ``gguf``: whether a peer needs that file.
    """
    folder = peers_folder() / "shapes" / name
    checkpoint, work, file = folder / "checkpoint", folder / "work", folder / gguf_name(shape)
    if not checkpoint.is_dir():
        progress(f"writing random weights in the shape of {name}")
        partial = checkpoint.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        known.write(shape, partial, tokenizer)
        partial.rename(checkpoint)
    if gguf and not file.is_file():
        progress(f"writing the GGUF file of {name}")
        partial = file.with_suffix(".partial")
        write_gguf(shape, checkpoint, partial)
        partial.rename(file)
    layers = shape.config["num_hidden_layers"]
    settings = {"default": [*SETTINGS, *own_settings(shape, recipe)]} | {
        plan: [*SETTINGS, *settings_of(artifact.load(path, PrecisionPlan).record, layers)]
        for plan, path in plans.items()
    }
    bundles: dict[str, Path] = {}
    for bundle, words in settings.items():
        progress(f"building our bundle {bundle} of {name}")
        place = work if bundle == "default" else folder / f"work-{bundle}"
        _build(checkpoint, place, work / "artifacts", recipe.resolve(), words)
        bundles[bundle] = place / "artifacts/candidate"
    return Prepared(work / "artifacts/graph", work / "artifacts/source", file, bundles)


def own_settings(shape: Shape, recipe: Path) -> list[str]:
    """What a shape changes of the recipe: experts in MXFP4 are kept as they are, and others get the schemes of linears
    in their place: what holds for the gates and ups of a layer holds for those of its experts.
    """
    rules = yaml.safe_load(recipe.read_text())["plan"]["schemes"]
    if rules == "auto" or not shape.has_experts:
        return []
    ups = [rule | {"match": str(rule["match"]).replace(*UPS)} for rule in rules if UPS[0] in str(rule["match"])]
    added = [MXFP4_RULE] if shape.is_mxfp4 else ups
    return [f"plan.schemes={json.dumps([*added, *rules])}"] if added else []


def _build(checkpoint: Path, work: Path, shared: Path, recipe: Path, settings: Sequence[str]) -> None:
    """Run the stages of a bundle whose settings changed, else only the last: kernels are always of this version.

    What bundles share is made once, and again only where it is missing.
    """
    (work / "artifacts").mkdir(parents=True, exist_ok=True)
    for folder in SHARED.values():
        if (shared / folder).is_dir() and not (work / "artifacts" / folder).exists():
            (work / "artifacts" / folder).symlink_to((shared / folder).resolve(), target_is_directory=True)
    params, bundle = work / "params.yaml", work / "artifacts/candidate"
    built = params.read_text() if params.is_file() and bundle.is_dir() else None
    shutil.rmtree(bundle, ignore_errors=True)  # after an interruption there is none, and all is built again
    scale.write_recipe(params, recipe, checkpoint, settings)
    stages = [stage for stage, folder in SHARED.items() if not (work / "artifacts" / folder).exists()]
    stages += STAGES[-1:] if built == params.read_text() and not stages else STAGES
    words = [str(checkpoint), str(work), "--recipe", str(recipe), "--stages", *stages]
    scale.main([*words, "--set", *settings])


def settings_of(plan: PrecisionPlan, layers: int) -> list[str]:
    """A plan as settings of a recipe for a model of so many layers: each has the schemes of the layer at its depth.

    A plan that was chosen holds the menu's schemes, with groups fitted to its model. One that is written out does not.
    """

    def asked(scheme: Scheme, candidate_schemes: Sequence[Scheme]) -> dict[str, Any]:
        scheme = scheme.widest if scheme.expert_bits else scheme  # another model has other experts
        return (as_in_candidates(scheme, candidate_schemes) if plan.search else scheme).model_dump()

    schemes = plan.schemes
    depth = 1 + max(int(name.split(".")[1]) for name in schemes if name.startswith("layers."))
    rules: list[dict[str, Any]] = []
    for layer in range(layers):
        here = f"layers.{layer * depth // layers}."
        for name, scheme in schemes.items():
            if name.startswith(here):
                rules.append({"match": f"layers.{layer}.{name.removeprefix(here)}"} | asked(scheme, CANDIDATE_SCHEMES))
    written = {
        "plan.schemes": rules,
        "plan.embeddings": asked(plan.embeddings.scheme, EMBEDDING_CANDIDATES),
        "plan.kv_cache": plan.kv_cache.settings.model_dump(),
    }
    return [f"{key}={json.dumps(value)}" for key, value in written.items()]


def as_in_candidates(scheme: Scheme, candidate_schemes: Sequence[Scheme]) -> Scheme:
    """The candidate scheme before its groups shrank to what divides the channels of the plan's model.

    >>> as_in_candidates(Scheme(bits=8, group_size=64, symmetric=True), CANDIDATE_SCHEMES).name
    '8-bit g128'
    """
    if scheme in candidate_schemes or scheme.group_size is None:
        return scheme
    alike = [
        other for other in candidate_schemes if other.model_copy(update={"group_size": scheme.group_size}) == scheme
    ]
    return next((other for other in alike if (other.group_size or 0) > scheme.group_size), scheme)


def gguf_name(shape: Shape) -> str:
    """The file's name says the format of its linears, as adapters read it."""
    return f"model-{'MXFP4' if shape.is_mxfp4 else 'Q8_0'}.gguf"


def write_gguf(shape: Shape, checkpoint: Path, path: Path) -> None:
    """The checkpoint for llama.cpp, by its own converter: linears in Q8_0, from which other formats are made, but
    experts that are published in MXFP4 as they are. :class:`PeerError` without a checkout or where it fails.
    """
    checkout = os.environ.get(LLAMA_CPP)
    script = Path(checkout or "/nonexistent") / CONVERTER
    if not script.is_file():
        raise PeerError(
            f"${LLAMA_CPP} is {checkout or 'not set'}",
            expected=f"a checkout of llama.cpp with {CONVERTER}",
            remedy="see docs/benchmarks/kinds.md, or name other peers with --peers",
        )
    command = [sys.executable, str(script.resolve()), str(checkpoint), "--outfile", str(path), "--outtype", "q8_0"]
    command += shape.converter_flags
    log = path.with_suffix(".log")
    with log.open("w") as stream:
        code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise PeerError(f"{CONVERTER} ended with exit code {code}", expected="a GGUF file", remedy=f"read {log}")
