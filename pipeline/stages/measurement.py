"""What a kind of evidence measures with: the recipe's settings, and what earlier stages have made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.recipe import Recipe
from pipeline.stages.inputs import (
    ARTIFACTS,
    INCUMBENT,
    TOKENIZER,
    adapter_of,
    checkpoint_of,
    corpus_texts,
    encode_texts,
    fast_tokenizer,
    load_bundle,
    load_graph,
    load_quantized,
    load_source,
    stage_progress,
)
from tapeout.artifact import Artifact
from tapeout.errors import ArtifactError, RegistryError, TapeoutError
from tapeout.portable_graph import PortableGraph

if TYPE_CHECKING:
    from engines.bundle import EngineBundle
    from engines.protocol import Engine, FloatArray
    from engines.sequences import Sequences
    from engines.target import Probe
    from evals.answers import Answerer
    from evals.kind import S, SourceModel
    from pipeline.sources.source import Source
    from quantization.checkpoint import QuantizedModel
    from quantization.reference import QuantizedReference
    from tapeout.fingerprint import Fingerprint


@dataclass(frozen=True)
class Measurement:
    """See :class:`evals.kind.Context`."""

    recipe: Recipe
    stage: str

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def threads(self) -> int:
        from tapeout.cores import physical_cores

        return self.recipe.build.threads or physical_cores()

    def section(self, kind: type[S]) -> S:
        return self.recipe.section(kind)

    def source(self) -> Artifact[Source]:
        return load_source()

    def source_model(self) -> SourceModel:
        from pipeline.export.source_model import CheckpointModel
        from tapeout.work_folder import scratch_folder

        source = load_source()
        positions = load_graph().record.max_positions
        with scratch_folder(ARTIFACTS / "model") as scratch:
            return CheckpointModel(*checkpoint_of(source), scratch, adapter=adapter_of(source), positions=positions)

    def tokenizer(self) -> Any:
        from pipeline.export.tokenizer import load_tokenizer

        return load_tokenizer(load_graph().folder)

    def graph(self) -> Artifact[PortableGraph]:
        return load_graph()

    def bundle(self, role: str) -> Artifact[EngineBundle]:
        return load_bundle(ARTIFACTS / role)

    def engine(self, role: str, *, slots: int | None = None, threads: int | None = None) -> Sequences:
        return self._open(ARTIFACTS / role, slots, threads)

    def _open(self, folder: Path, slots: int | None = None, threads: int | None = None) -> Sequences:
        from engines.load import load
        from engines.sequences import Sequences

        count = threads or self.recipe.build.threads
        return Sequences(load(folder, threads=count, slots=slots or self.recipe.build.slots))

    def champion(self) -> tuple[Artifact[EngineBundle], Sequences, bool]:
        incumbent = json.loads(INCUMBENT.read_text())
        folder = Path(incumbent["location"]) if incumbent else ARTIFACTS / "baseline"
        try:
            champion = self._open(folder)
            bundle = load_bundle(folder)
            if incumbent is not None and bundle.digest != incumbent["digest"]:
                raise ArtifactError(f"{folder} holds bundle {bundle.digest[:12]}, not {incumbent['digest'][:12]}")
            if bundle.files[TOKENIZER].sha256 != self.bundle("candidate").files[TOKENIZER].sha256:
                raise ArtifactError(f"{folder} has another tokenizer than the candidate")
        except TapeoutError as error:
            if incumbent is None:
                raise
            raise RegistryError(
                f"the registered champion of {self.recipe.register_.model_name} cannot be replayed here: {error.found}",
                expected="a champion of the same model that runs on this machine",
                remedy="give another model or machine its own register.model_name, or `tapeout rollback` first",
            ) from error
        return bundle, champion, incumbent is None

    def answerer(self, engine: Engine, *, blocks: int | None = None) -> Answerer:
        from pipeline.stages.answering import served_core
        from runtime.wire.limits import Limits

        return served_core(engine, self.bundle("candidate"), Limits(), threads=self.threads, blocks=blocks)

    def draw_counts(self, logits: FloatArray) -> dict[str, tuple[int, int]]:
        from engines.load import at_level
        from runtime.engine.draw_check import draw_counts

        return draw_counts(at_level(self.bundle("candidate")), logits)

    def executed_on(self) -> Fingerprint:
        from engines.load import runs_here

        return runs_here(self.bundle("candidate"))

    def heldout_texts(self, count: int) -> list[str]:
        return corpus_texts(self.recipe, count)[1]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_texts(texts)

    def decode(self, tokens: Sequence[int]) -> str:
        return fast_tokenizer().decode(list(tokens))

    def chat_prompts(self, datasets: Sequence[str], count: int) -> list[list[int]]:
        from tokenizers import Tokenizer

        from pipeline.sources.corpus import chat_prompts
        from runtime.gateway.text.chat_template import ChatTemplate

        folder = self.bundle("candidate").folder
        tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
        template = ChatTemplate.load(folder)
        questions = chat_prompts(load_source(), datasets, count, self.seed)
        prompts = [template.render([{"role": "user", "content": question}]) for question in questions]
        return [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]

    def probe(self) -> Probe:
        from engines.load import open_probe

        return open_probe(self.bundle("candidate"), ARTIFACTS, threads=self.threads)

    def reference(self) -> tuple[Artifact[QuantizedModel], QuantizedReference]:
        from engines.load import find_target
        from quantization.reference import QuantizedReference

        quantized = load_quantized()
        capabilities = find_target(self.bundle("candidate").record.target).capabilities
        return quantized, QuantizedReference(
            quantized.folder,
            int8_activations=capabilities.int8_activations,
            fp8_activations=capabilities.fp8_activations,
            half_cache=capabilities.float_type == "fp16",
            recurrent_state=quantized.record.recurrent_state,
        )

    def head(self) -> str:
        return next(group.members[0] for group in load_graph().record.groups if group.name == "lm_head")

    def progress(self, step: str) -> None:
        stage_progress(self.stage)(step)
