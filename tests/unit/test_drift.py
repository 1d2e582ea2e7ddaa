"""Drift: equal traffic is none however small it is, other traffic is, and chance is not called drift."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from numpy.random import Generator
from tokenizers import Tokenizer, models, pre_tokenizers

from engines.kernels.serving import Clipping, ValueCounts
from evals.kinds.drift import KIND, Distance, DriftReport, DriftSettings
from evals.kinds.drift.measure import distances, drift
from pipeline.cli.main import main
from pipeline.recipe import load_recipe
from pipeline.sources.source import Source
from quantization.calibration import Calibration, CalibrationSample, sample_hash
from tapeout.artifact import Artifact, ArtifactRef, Record, create, load
from tapeout.errors import EvidenceError
from tapeout.recipe import Calibrate
from tests.judged import write_stub

SETTINGS = DriftSettings()
VOCABULARY = 5000


def texts(rng: Generator, count: int, *, length: float = 60, shift: int = 0, skew: float = 1.3) -> list[list[int]]:
    """Tokens as rare as words are."""
    sizes = np.maximum(rng.normal(length, length / 4, count).astype(int), 4)
    return [((rng.zipf(skew, size) + shift) % VOCABULARY).tolist() for size in sizes]


def found(live: list[list[int]], samples: list[list[int]]) -> dict[str, Distance]:
    return {distance.name: distance for distance in distances(SETTINGS, live, samples)}


@pytest.mark.parametrize(("live", "samples"), [(1000, 128), (100, 128), (30, 16)])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_traffic_is_no_drift(live: int, samples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for distance in found(texts(rng, live), texts(rng, samples)).values():
        assert not distance.drifted and distance.value < distance.bound, distance


def test_a_plain_distance_would_call_it_drift() -> None:
    """Why chance is taken off: 30 exchanges of the same traffic lie above the bound."""
    from scipy.spatial.distance import jensenshannon

    rng = np.random.default_rng(0)
    counts = [np.bincount(np.concatenate(texts(rng, count)), minlength=VOCABULARY) for count in (30, 16)]
    assert jensenshannon(*counts, base=2) > SETTINGS.max_tokens


def test_other_tokens_are_drift() -> None:
    rng = np.random.default_rng(0)
    by_name = found(texts(rng, 200, shift=17), texts(rng, 128))
    assert by_name["tokens"].drifted and not by_name["lengths"].drifted


@pytest.mark.parametrize("length", [30, 120])
def test_other_lengths_are_drift(length: int) -> None:
    rng = np.random.default_rng(0)
    by_name = found(texts(rng, 200, length=length), texts(rng, 128))
    assert by_name["lengths"].drifted and not by_name["tokens"].drifted
    assert by_name["lengths"].value == pytest.approx(abs(length - 60) / 60, rel=0.3)


def test_a_small_difference_that_is_certain_is_no_drift() -> None:
    rng = np.random.default_rng(0)
    by_name = found(texts(rng, 1000, length=66), texts(rng, 500))
    assert by_name["lengths"].p_value <= 0.01 and not by_name["lengths"].drifted


@pytest.mark.parametrize(("clipped", "drifted"), [(2e-5, False), (5e-4, False), (5e-3, True)])
@pytest.mark.parametrize("name", ["kv", "activations"])
def test_live_texts_that_an_engine_clips_more_of_are_drift(name: str, clipped: float, drifted: bool) -> None:
    """Samples lose 2 of 100,000 values, as those of the default model do; ``clipped``: what live texts lose."""
    rng = np.random.default_rng(0)
    live, samples = texts(rng, 120), texts(rng, 128)
    shares = {id(text): share for group, share in ((live, clipped), (samples, 2e-5)) for text in group}

    def counts(text: Sequence[int]) -> Clipping:
        stored = 11_520 * len(text)
        return Clipping(**{name: ValueCounts(stored, int(rng.binomial(stored, shares[id(text)])))})

    by_name = {one.name: one for one in distances(SETTINGS, live, samples, clip_counts=counts)}
    assert list(by_name) == [
        "lengths",
        "tokens",
        f"{name}_clipped",
    ]  # an engine without the other has no distance of it
    found = by_name[f"{name}_clipped"]
    assert found.drifted is drifted
    assert found.value == pytest.approx(clipped - 2e-5, rel=0.1, abs=2e-6)


def test_what_cannot_be_compared_is_refused() -> None:
    for live, samples in (([], [[1]]), ([[1]], []), ([[1], []], [[1]])):
        with pytest.raises(EvidenceError):
            distances(SETTINGS, live, samples)


def calibration(folder: Path) -> Artifact[Calibration]:
    write_stub(folder, "Calibration", "samples", {})

    class Stub(Record):
        artifact_type = "Calibration"
        name: str

    return load(folder, Stub)  # type: ignore[return-value]


def test_the_latest_exchanges_count_and_few_give_no_advice(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made = calibration(tmp_path / "calibration")
    samples, old, new = texts(rng, 128), texts(rng, 300, shift=17), texts(rng, 120)
    few = DriftSettings(exchanges=120)
    assert not drift(few, old + new, samples, tmp_path / "a", calibration=made).record.recalibrate
    assert drift(few, new + old, samples, tmp_path / "b", calibration=made).record.recalibrate
    report = drift(SETTINGS, old[:50], samples, tmp_path / "c", calibration=made).record
    assert not report.recalibrate and "too few" in report.advice
    again = drift(few, new + old, samples, tmp_path / "d", calibration=made)
    assert again.digest == load(tmp_path / "b", DriftReport).digest
    block = KIND.block(tmp_path / "b", None)  # type: ignore[arg-type]
    assert block.metrics["drift.tokens"] == again.record.distances[1].value
    assert "recalibrate: tokens drifted" in str(block.facts[0].value)


# the command


WORDS = [f"w{i}" for i in range(400)]
OTHERS = [f"v{i}" for i in range(400)]


def passages(rng: Generator, count: int, words: list[str]) -> list[str]:
    return [" ".join(rng.choice(words, 60).tolist()) for _ in range(count)]


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the artifacts that the command reads, of a tokenizer with one token a word, and a recipe."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", *WORDS, *OTHERS])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "artifacts" / "graph").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "artifacts" / "graph" / "tokenizer.json"))
    with create(tmp_path / "artifacts" / "source", Source) as draft:
        table = Dataset.from_dict({"passage": passages(rng, 40, WORDS)})
        table.save_to_disk(str(draft.folder / "data" / "boolq" / "none" / "validation"))
        values = dict.fromkeys(Source.model_fields) | {
            "model_source": "file:m", "model_kind": "gguf", "model_entry": "m", "model_licenses": (),
            "adapter_licenses": (), "data_source": "file:d", "data_entry": "data", "data_licenses": (),
            "datasets": ("boolq/none",),
        }  # fmt: skip
        draft.finish(Source(**values), parents={})
    recipe = "model: {source: file:m}\ndata: {source: file:d} # kept\ncalibrate: {samples: 32, tokens: 64}\nseed: 3\n"
    (tmp_path / "params.yaml").write_text(recipe)
    return tmp_path


def calibrate(folder: Path) -> None:
    from pipeline.sources.corpus import calibration_and_heldout

    source = load(folder / "artifacts" / "source", Source)
    tokenizer = Tokenizer.from_file(str(folder / "artifacts" / "graph" / "tokenizer.json"))
    chosen, _ = calibration_and_heldout(source, Calibrate(samples=32, tokens=64), 0, 3, tokenizer)
    samples = [tokenizer.encode(text).ids[:64] for text in chosen]
    with create(folder / "artifacts" / "calibration", Calibration) as draft:
        lines = [CalibrationSample(sample_hash=sample_hash(one), tokens=len(one), holdout=False) for one in samples]
        (draft.folder / "samples.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in lines))
        record = Calibration(
            asked=Calibrate(), samples_hash="0", samples=32, holdout_samples=8, tokens_per_sample=64, tokens=1,
            layers=1, statistics=(), versions={},
        )  # fmt: skip
        draft.finish(record, parents={"graph": ArtifactRef("PortableGraph", "0" * 64)})


def write_log(folder: Path, words: list[str], count: int = 150) -> None:
    rng = np.random.default_rng(1)
    folder.mkdir()
    calls = [{"messages": [], "prompts": [text[:99]], "responses": [text[99:]]} for text in passages(rng, count, words)]
    (folder / "traffic.jsonl").write_text("".join(json.dumps(call) + "\n" for call in calls))


def test_the_command_says_whether_to_recalibrate(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrate(calibrated)
    before = (calibrated / "params.yaml").read_text()
    write_log(calibrated / "same", WORDS)
    assert main(["drift", "same", "--write", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recalibrate"] is False
    assert (calibrated / "params.yaml").read_text() == before
    write_log(calibrated / "other", OTHERS)
    assert main(["drift", "other", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["recalibrate"] and shown["advice"] == "recalibrate: tokens drifted"
    assert (calibrated / "params.yaml").read_text() == before
    (calibrated / "params.yaml").write_bytes(before.replace("\n", "\r\n").encode())
    assert main(["drift", "other", "--write"]) == 0
    assert (calibrated / "params.yaml").read_bytes().count(b"\n") == (calibrated / "params.yaml").read_bytes().count(
        b"\r\n"
    )
    recipe = load_recipe(calibrated / "params.yaml")
    assert (recipe.calibrate.dataset, recipe.calibrate.column) == ("traffic", "text")
    assert (
        recipe.data.traffic == f"file:{calibrated / 'other'}" and "# kept" in (calibrated / "params.yaml").read_text()
    )
    assert "run `dvc repro`" in capsys.readouterr().err


def test_too_few_exchanges_are_inconclusive(calibrated: Path) -> None:
    calibrate(calibrated)
    write_log(calibrated / "few", OTHERS, 20)
    assert main(["drift", "few"]) == 3


def test_mistakes_are_named(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrate(calibrated)
    (calibrated / "empty").mkdir()
    assert main(["drift", "empty"]) == 2
    assert "holds no exchange" in capsys.readouterr().err
    write_log(calibrated / "log", WORDS)
    params = calibrated / "params.yaml"
    params.write_text(params.read_text().replace("seed: 3", "seed: 4"))
    assert main(["drift", "log"]) == 2
    assert "was made of other samples" in capsys.readouterr().err
    assert not (calibrated / "artifacts" / "drift").exists()
