"""Source: the checkpoint and the data sets of a run, as files, with what they were fetched from."""

from __future__ import annotations

from typing import ClassVar, Literal

from tapeout.artifact import Record

# Short names (those of lm-eval's tasks where there is one) and where their splits lie in the data folder.
FOLDERS = {
    "arc_challenge": "ai2_arc/ARC-Challenge",
    "arc_easy": "ai2_arc/ARC-Easy",
    "boolq": "boolq/none",
    "gsm8k": "gsm8k/main",
    "hellaswag": "hellaswag/none",
    "nq_open": "nq_open/none",
    "openbookqa": "openbookqa/main",
    "piqa": "piqa/plain_text",
    "sciq": "sciq/none",
    "social_iqa": "social_i_qa/none",
    "traffic": "traffic/log",  # made of data.traffic (pipeline/sources/traffic.py)
    "trivia_qa": "trivia_qa/rc.wikipedia.nocontext",
    "winogrande": "winogrande/winogrande_xl",
}


def folder_of(dataset: str) -> str:
    """Where a data set lies in the data folder: a short name, or that folder itself (``super_glue/copa``)."""
    return FOLDERS.get(dataset, dataset.strip("/"))


class Source(Record):
    """``model_sha256`` and ``data_sha256``: of what a pin covers (pipeline/sources/locations.py); None for a folder.

    ``model_revision``: the commit a Hugging Face source resolved to.
    ``model_entry``: what transformers opens, relative to the artifact: one GGUF file or one folder.
    ``adapter_…``: the same of a LoRA adapter to merge; None where there is none.
    ``traffic_…``: the same of a server's traffic log.
    ``data_entry``: the folder that holds the data sets, likewise; ``datasets``: their folders in it.
    """

    artifact_type: ClassVar[str] = "Source"
    remedy: ClassVar[str] = "run `dvc repro fetch`"
    schema_version: ClassVar[int] = 3  # 3: adapters

    model_source: str
    model_sha256: str | None
    model_revision: str | None
    model_kind: Literal["gguf", "safetensors"]
    model_entry: str
    model_licenses: tuple[str, ...]
    adapter_source: str | None = None
    adapter_sha256: str | None = None
    adapter_revision: str | None = None
    adapter_entry: str | None = None
    adapter_licenses: tuple[str, ...] = ()
    data_source: str
    data_sha256: str | None
    data_revision: str | None
    traffic_source: str | None = None
    traffic_sha256: str | None = None
    traffic_revision: str | None = None
    data_entry: str
    data_licenses: tuple[str, ...]
    datasets: tuple[str, ...]
