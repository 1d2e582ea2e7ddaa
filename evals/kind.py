"""What a kind of evidence is: its report, its soundness rules, its checks and bounds, and how it is shown.

``evals/kinds`` holds one folder per kind. The gate, the recipe and the HTML report iterate over them and name none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar, cast

from pydantic import Field, TypeAdapter

from evals.block import Block
from evals.check import Findings, JudgedVerdict
from evals.items import read_items, write_items, write_metrics
from tapeout.artifact import Artifact, ArtifactRef, Frozen, Parents, Record, create, load
from tapeout.fingerprint import Fingerprint
from tapeout.recipe import BaseRecipe, Count, Section

if TYPE_CHECKING:
    from engines.bundle import EngineBundle
    from engines.protocol import Engine, FloatArray, IntArray
    from engines.sequences import Sequences
    from engines.target import Probe
    from evals.answers import Answerer
    from tapeout.portable_graph import PortableGraph

S = TypeVar("S", bound=Section)


class Bounds(Section):
    """A part of section ``gate``. A bound is compared with the confidence bound of a value, not with its mean."""

    confidence: float = Field(default=0.95, ge=0.9, lt=1)


class DocumentBounds(Bounds):
    min_documents: Count = 30


class Executed(Frozen):
    """Was measured by running the engines."""

    executed_on: Fingerprint  # of the machine and the libraries that the candidate ran on


class EvidenceRecord(Executed, Record):
    """A report that was measured by running the engines."""


R = TypeVar("R", bound=Frozen)
T = TypeVar("T", bound=Frozen)  # an item
B = TypeVar("B", bound=Bounds)
W = TypeVar("W", bound=Record)


@dataclass(frozen=True)
class Report(Generic[R, T]):
    """A report as the gate reads it. ``ref``: type and digest of its artifact."""

    ref: ArtifactRef
    record: R
    items: tuple[T, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """All that the gate may look at.

    ``reports``: by the name of their kind. Reports of an engine are missing only if it was not executed.
    """

    baseline: str  # bundle digests
    candidate: str
    built_from: ArtifactRef  # what the candidate was built from: a QuantizedModel, or a LoweredGraph
    target: str  # what the candidate was built for, such as "ort-cpu" or "sm89"
    hardware: tuple[Fingerprint, ...]  # and the libraries that it was built for, one for each level
    reports: Mapping[str, Report[Any, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # how the recipe asks for them to be measured
    absent: tuple[str, ...] = ()  # types of reports of an executed engine that are not there; filled in by the gate
    not_executed: str = ""  # why stages have not executed the candidate, as a clause
    calibrated_on: frozenset[str] = frozenset()  # hashes of the token ids of calibration samples

    @property
    def judged(self) -> dict[str, tuple[str, str]]:
        """By the field in which a report names it: a title, and the digest."""
        return {
            "baseline": ("baseline", self.baseline),
            "candidate": ("candidate", self.candidate),
            "built_from": (self.built_from.artifact_type, self.built_from.digest),
        }


class ReferenceModel(Protocol):
    """The quantized model that an engine was built from."""

    def __call__(self, tokens: Sequence[int]) -> FloatArray: ...

    def teacher_forced(
        self, tokens: Sequence[int], outputs: Mapping[str, FloatArray], attention: Mapping[str, FloatArray]
    ) -> tuple[FloatArray, dict[str, tuple[float, float]]]:
        """Logits, and of each linear the relative error over the document and at the worst position.

        ``attention``: see :meth:`engines.target.Probe.attention`; linears read that in place of the model's own.
        """
        ...

    def attention_errors(self) -> Mapping[str, tuple[float, float]]:
        """Of each attention that the last call of ``teacher_forced`` was given, by the linear that reads it: the
        relative error over the document and at the worst position, given the same outputs of linears before.
        """
        ...

    def states(self) -> Mapping[str, Sequence[FloatArray]]:
        """Recurrent state that the tokens of the last call of ``teacher_forced`` left, by the name of its tensor, in
        the order of layers.
        """
        ...

    def choices(self) -> Mapping[str, IntArray]:
        """Experts ``[S, k]`` that the tokens of the last call chose, by the down projection of their layer."""
        ...

    def experts(self) -> Mapping[str, int]:
        """How many each layer has, likewise."""
        ...

    def state_rounding(self, tokens: Sequence[int]) -> tuple[FloatArray, FloatArray] | None:
        """Logits with states of recurrences in float32, and as the model keeps them, activations in float; None where
        that is float32.
        """
        ...

    def embedding(self) -> FloatArray:
        """The embedding of every token id, ``[V, H]``."""
        ...


class SourceModel(Protocol):
    """The model of the checkpoint as it came, in transformers."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """As its generation settings have them."""
        ...

    def parts(self, tokens: Sequence[int]) -> Iterator[FloatArray]:
        """Logits ``[S, V]`` after each token of a text, in order, in parts of bounded size."""
        ...

    def batch(self, texts: Sequence[Sequence[int]], last: Sequence[int]) -> list[FloatArray]:
        """Logits ``[last, V]`` after the last tokens of each of several texts."""
        ...

    def embedding(self) -> FloatArray:
        """The embedding of every token id, ``[V, H]``."""
        ...


class Context(Protocol):
    """What a kind can measure with: the engines, texts and settings of one run. ``role``: baseline or candidate."""

    @property
    def seed(self) -> int: ...
    @property
    def threads(self) -> int: ...
    def section(self, kind: type[S]) -> S: ...
    def source(self) -> Artifact[Any]: ...
    def source_model(self) -> SourceModel: ...
    def tokenizer(self) -> Any:
        """transformers' own tokenizer of the exported model."""
        ...

    def graph(self) -> Artifact[PortableGraph]: ...
    def bundle(self, role: str) -> Artifact[EngineBundle]: ...
    def engine(self, role: str, *, slots: int | None = None, threads: int | None = None) -> Sequences:
        """``slots``: as built, and ``threads``: as the recipe says, unless given."""
        ...

    def champion(self) -> tuple[Artifact[EngineBundle], Sequences, bool]:
        """The registered champion, or the baseline and True where there is none."""
        ...

    def answerer(self, engine: Engine, *, blocks: int | None = None) -> Answerer:
        """The core that serves, over an engine of this run. ``blocks``: of its pool, if fewer than the engine has."""
        ...

    def draw_counts(self, logits: FloatArray) -> Mapping[str, tuple[int, int]]:
        """By settings: tokens the candidate's library draws from ``[P, V]`` logits, how many numpy does not draw."""
        ...

    def executed_on(self) -> Fingerprint:
        """Of this machine, by what selects the candidate's kernels."""
        ...

    def heldout_texts(self, count: int) -> list[str]:
        """Documents that calibration did not see."""
        ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def chat_prompts(self, datasets: Sequence[str], count: int) -> list[list[int]]: ...
    def probe(self) -> Probe: ...
    def reference(self) -> tuple[Artifact[Any], ReferenceModel]:
        """The quantized model that the candidate was built from, and the same as a torch model."""
        ...

    def head(self) -> str:
        """Parameter name of the output head."""
        ...

    def progress(self, step: str) -> None: ...


class CountTexts(Protocol):
    """How many different texts a column of a data set has; :class:`SourceError` where it holds none.

    ``column`` None: that of questions.
    """

    def __call__(self, dataset: str, column: str | None = None) -> int: ...


class EvidenceKind(Generic[R, T, B]):
    """One kind of evidence. Each folder of ``evals/kinds`` holds one instance, ``KIND``.

    ``folder``: below ``artifacts/``, and the name of its report among the parents of a verdict. Kinds that are measured
    together share one. ``needed``: always, once the engine was executed, or never.
    """

    order: ClassVar[int]  # of checks, facts and blocks
    name: ClassVar[str]
    folder: ClassVar[str] = ""
    needed: ClassVar[Literal["always", "executed", "never"]] = "executed"
    stage: ClassVar[str] = ""  # the stage that writes the report; empty: another kind's, or none
    measure_module: ClassVar[str] = ""  # its ``measure(context, folder)`` is that stage
    # Its ``measure(context, folder, reason)`` is the stage where kernels of absent hardware can be emulated.
    emulated_module: ClassVar[str] = ""
    sections: ClassVar[Mapping[str, type[Section]]] = {}  # of the recipe, by name
    artifact_types: ClassVar[tuple[str, ...]] = ()  # of its report
    items_file: ClassVar[str] = ""
    report: type[R]
    item: type[T] | TypeAdapter[T]
    bounds: type[B]
    absent: ClassVar[Block | None] = None  # shown where there is no report

    def conflicts(self, recipe: BaseRecipe) -> list[str]:
        """What its sections promise and the rest of the recipe cannot keep."""
        return []

    def datasets(self, recipe: BaseRecipe) -> Sequence[str]:
        """The data sets that it reads below ``data.source``."""
        return ()

    def check_data(self, recipe: BaseRecipe, data: Path, count: CountTexts) -> None:
        """Look at what it will read of the ``data`` folder, where it is fetched: :class:`SourceError` or
        :class:`EvidenceError` for what it could not use.
        """

    def load(self, folder: Path, recipe: BaseRecipe) -> Report[R, T]:
        """Read the report and hash its files again."""
        found = load(folder, cast(type[Record], self.report))
        found.verify()
        return Report(found.ref, cast(R, found.record), read_items(folder / self.items_file, self.item))

    def write(
        self,
        folder: Path,
        record: W,
        *,
        parents: Parents,
        items: Iterable[T] = (),
        metrics: Mapping[str, float] | None = None,
        add_files: Callable[[Path], None] = lambda _: None,
    ) -> Artifact[W]:
        """A report as an artifact, with its items and ``metrics``, flat numbers for ``dvc metrics``.

        ``add_files``: writes the files that are special to it into the folder.
        """
        with create(folder, type(record)) as draft:
            add_files(draft.folder)
            if self.items_file:
                write_items(draft.folder / self.items_file, items)
            if metrics is not None:
                write_metrics(draft.folder, metrics)
            draft.finish(record, parents=parents)
        return load(folder, type(record))

    def deviations(self, report: Report[R, T], recipe: BaseRecipe) -> list[str]:
        """Where the report was not measured as the recipe asks."""
        return []

    def given(self, evidence: Evidence) -> Report[R, T] | None:
        return evidence.reports.get(self.name)

    def problems(self, report: Report[R, T], evidence: Evidence) -> list[str]:
        """Why this report cannot be judged."""
        return []

    def findings(self, evidence: Evidence, bounds: Bounds) -> Findings:
        report = self.given(evidence)
        assert isinstance(bounds, self.bounds)
        return Findings() if report is None else self.judge(report, evidence, bounds)

    def judge(self, report: Report[R, T], evidence: Evidence, bounds: B) -> Findings:
        raise NotImplementedError(self.name)

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block | None:
        """What the HTML report shows of it, from the report's folder. None: its checks say everything."""
        return None
