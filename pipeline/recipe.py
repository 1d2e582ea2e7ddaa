"""params.yaml as a frozen, validated ``Recipe``. Unknown keys are errors that name the nearest valid key.

Only this module parses and validates parameters; nothing downstream checks them again (docs/recipes.md
documents every one, and a test compares that page with this module).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from pipeline.artifact import Frozen
from pipeline.errors import RecipeError

TARGETS = Path(__file__).parents[1] / "engines" / "targets"
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ModelSource(Frozen):
    """Where the checkpoint comes from: ``hf://``, ``pypi://``, ``file:`` or ``https://``."""

    source: str
    sha256: Sha256 | None = None


class DataSource(Frozen):
    """Where the Arrow tables for calibration, evaluation and shadow replay come from."""

    source: str
    sha256: Sha256 | None = None


class Export(Frozen):
    max_positions: Count = 2048  # rotary tables and KV slots are built up to here
    tolerance: float = Field(default=1e-3, gt=0)  # max relative logit error against transformers


class Calibrate(Frozen):
    dataset: str = "boolq"
    column: str = "passage"
    rows: Count = 128
    tokens: Count = 256  # per row
    layers_per_pass: Count = 64  # bounds memory: statistics of this many layers are held at once


class Rule(Frozen):
    """The first rule whose ``match`` (glob over ``layers.N.unit``) fits a linear decides its format.

    Units: ``qkv``, ``o``, ``gate_up``, ``down``, and ``linear.NAME`` for anything else inside a layer.
    """

    match: str
    bits: Literal[4, 8, 32]  # 32 leaves the linear in float
    group_size: Literal[16, 32, 64, 128, 256] = 32
    symmetric: bool = False
    activations: Literal["float", "int8"] = "float"  # int8: static scale; weights then symmetric per output channel

    @model_validator(mode="after")
    def _int8_products_take_int8_weights(self) -> Rule:
        if self.activations == "int8" and self.bits != 8:
            raise ValueError(f"activations: int8 needs bits: 8, found bits: {self.bits}")
        return self


class KVCache(Frozen):
    dtype: Literal["float32", "int8"] = "int8"
    granularity: Literal["per_tensor", "per_channel"] = "per_channel"


class Quantize(Frozen):
    method: Literal["awq", "rtn"] = "awq"
    rules: tuple[Rule, ...] = (Rule(match="*", bits=8, group_size=64, symmetric=True),)
    embeddings: Rule = Rule(match="*", bits=8, group_size=64, symmetric=True)  # and lm_head
    kv_cache: KVCache = KVCache()
    scale_grid: Count = 20  # AWQ and SmoothQuant exponents tried between 0 and 1, besides doing nothing

    @model_validator(mode="after")
    def _tables_are_weight_only(self) -> Quantize:
        if self.embeddings.activations != "float":
            raise ValueError("embeddings.activations must be float: a table is gathered, and its head shares it")
        return self


class Build(Frozen):
    target: str = "ort-cpu"  # a folder of engines/targets (docs/targets.md)
    slots: Count = 16
    threads: Annotated[int, Field(ge=0)] = 0  # 0: every physical core

    @field_validator("target")
    @classmethod
    def _known(cls, name: str) -> str:
        # By its folder, not by import: parameters are read below the engines, and without loading any.
        known = sorted(p.parent.name.replace("_", "-") for p in TARGETS.glob("*/__init__.py"))
        if name not in known:
            raise ValueError(f"no target {name!r}; expected one of {', '.join(known)}")
        return name


class Benchmark(Frozen):
    prompt_tokens: Count = 128
    new_tokens: Count = 64
    batches: tuple[Count, ...] = (1, 4, 16)
    repeats: Count = 3
    price_per_hour: float = Field(default=0.10, gt=0)  # US dollars for this machine


class Evaluate(Frozen):
    tasks: tuple[str, ...] = ("arc_easy", "piqa", "openbookqa", "winogrande", "sciq")
    items: Count = 2500  # pooled over the tasks, shared out by size
    documents: Count = 64
    document_tokens: Count = 256
    parity_documents: Count = 32  # of the same documents, for engine against quantized torch model


class Shadow(Frozen):
    prompts: Count = 200
    max_new_tokens: Count = 48
    datasets: tuple[str, ...] = ("nq_open", "trivia_qa")


class Gate(Frozen):
    """Bounds the verdict is judged by. A bound is compared with the 95 % confidence bound, not the mean."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    accuracy_margin: Fraction = 0.02
    min_items: Count = 2500
    max_flips: Fraction = 0.12
    max_kl: float = Field(default=0.03, gt=0)
    min_top_token: Fraction = 0.91
    max_perplexity_ratio: float = Field(default=1.05, gt=1)
    min_documents: Count = 30
    min_shadow_prompts: Count = 200
    min_shadow_agreement: Fraction = 0.90
    max_shadow_kl: float = Field(default=0.04, gt=0)
    max_parity_kl: float = Field(default=1e-3, gt=0)
    min_parity_top_token: Fraction = 0.995
    max_parity_error: float = Field(default=0.01, gt=0)  # relative, of any one product on any document
    min_speed_ratio: float = Field(default=1.0, gt=0)
    min_repeats: Count = 3  # paired repeats per batch and phase


class Register(Frozen):
    model_name: str = "tapeout-default"
    experiment: str = "tapeout"


class Recipe(Frozen):
    model: ModelSource
    data: DataSource
    seed: int = 0
    export: Export = Export()
    calibrate: Calibrate = Calibrate()
    quantize: Quantize = Quantize()
    build: Build = Build()
    benchmark: Benchmark = Benchmark()
    evaluate: Evaluate = Evaluate()
    shadow: Shadow = Shadow()
    gate: Gate = Gate()
    register_: Register = Field(default=Register(), alias="register")


def load_recipe(path: Path = Path("params.yaml")) -> Recipe:
    """Read and validate; :class:`RecipeError` lists every problem at once."""
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise RecipeError(
            f"no {path}", expected="a recipe", remedy="run in the project's folder, or pass --params"
        ) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} holds {type(raw).__name__}", expected="a mapping of parameter sections")
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise RecipeError(f"{path}: " + "; ".join(lines), expected="the keys and values in docs/recipes.md") from error


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        valid = sorted(_valid_keys(problem["loc"][:-1]))
        near = difflib.get_close_matches(str(problem["loc"][-1]), valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
        return f"unknown key {where!r} ({hint})"
    return f"{where}: {problem['msg']} (found {problem.get('input')!r})"


def _valid_keys(loc: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in loc:
        if isinstance(part, int):
            continue
        fields = {f.alias or name: f for name, f in model.model_fields.items()}
        annotation: Any = fields[str(part)].annotation
        args = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = args[0] if args else annotation
    return [f.alias or name for name, f in model.model_fields.items()]
