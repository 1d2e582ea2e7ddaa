"""A graph shares the weights files of its source where they hold the same tensors; else it gets a copy."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.export.export import export
from tapeout.artifact import Artifact, load
from tapeout.errors import ArtifactError, ResourceError
from tapeout.portable_graph import PortableGraph
from tests.checkpoints import WEIGHTS, Tensors, change_weights, checkpoint, shard
from tests.exported import build_float, traced_once
from tests.families import random_model
from tests.family_engines import PROMPTS, largest_errors


def exported(source: Path) -> Artifact[PortableGraph]:
    graph = source.parent / "graph"
    with pytest.MonkeyPatch.context() as patch:
        traced_once(patch)
        return export(source, "", graph, max_positions=64, tolerance=1e-3, seed=0, parents={})


def shared(graph: Artifact[PortableGraph], source: Path) -> list[bool]:
    return [path.samefile(source / path.name) for path in sorted(graph.folder.glob("*.safetensors"))]


def test_shards_are_shared_and_make_the_same_engine(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    shard(source)
    graph = exported(source)
    assert shared(graph, source) == [True, True]
    bundle = build_float(graph, tmp_path / "bundle", slots=len(PROMPTS))
    assert max(largest_errors(bundle, random_model("llama"), "llama").values()) < 1e-3


def test_an_edit_of_the_source_is_seen_in_the_graph(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    graph = exported(source)
    with (source / WEIGHTS).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(ArtifactError, match=rf"{WEIGHTS} has sha256"):
        load(graph.folder, PortableGraph)


def test_a_source_with_more_than_the_graph_needs_is_copied(tmp_path: Path) -> None:
    """A head that is stored beside the embedding it is tied to."""

    def add_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    source = checkpoint(tmp_path / "source", "qwen2")
    change_weights(source, add_head)
    graph = exported(source)
    assert shared(graph, source) == [False] and "lm_head.weight" not in load_file(graph.folder / WEIGHTS)


def test_weights_are_copied_where_files_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "source")
    change_weights(source, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    weight_map = shard(source)

    def link(path: Path, target: Path) -> None:
        if path.name != min(weight_map.values()):  # the first one succeeds
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        path.symlink_to(target)

    monkeypatch.setattr(Path, "hardlink_to", link)
    with monkeypatch.context() as patch:
        patch.setattr("tapeout.resources.free_disk", lambda _: 1000)
        with pytest.raises(ResourceError, match=r"0\.0 GB of disk free") as caught:
            exported(source)
    assert "the weights of the graph" in caught.value.expected
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    stored = load_file(exported(source).folder / WEIGHTS)
    assert stored.keys() == weight_map.keys()
    assert all(torch.equal(load_file(source / file)[name], stored[name]) for name, file in weight_map.items())
