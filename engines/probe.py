"""The output of every linear of a bundle on ONNX Runtime, for comparing an engine with a reference layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort

from engines.bundle import GREEDY, EngineBundle
from engines.protocol import FloatArray
from engines.sessions import CPU, cpu_options, library_of
from tapeout.artifact import Artifact


class OrtProbe:
    """See :data:`engines.target.Probe`. The bundle's own graph, with the outputs of its linears as extra outputs."""

    def __init__(self, bundle: Artifact[EngineBundle], *, threads: int = 0) -> None:
        self._record = bundle.record
        model = onnx.load(str(bundle.folder / "model.onnx"), load_external_data=False)
        present = {output.name for output in model.graph.output}
        for linear in self._record.linear_outputs:
            if linear.value not in present:
                model.graph.output.append(onnx.helper.make_empty_tensor_value_info(linear.value))
        options = cpu_options(threads, library_of(bundle))
        # A model given as bytes finds its weights beside this path.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.folder))
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=CPU)

    def __call__(self, tokens: Sequence[int]) -> tuple[FloatArray, dict[str, FloatArray]]:
        io, count = self._record.io, len(tokens)
        feeds: dict[str, np.ndarray] = {
            "input_ids": np.asarray(tokens, np.int64)[None],
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "seqlens_k": np.array([count - 1], np.int32),
            "total_sequence_length": np.array(count, np.int32),
            "logit_positions": np.arange(count, dtype=np.int64),
            GREEDY: np.array(False),
        }
        feeds = {name: value for name, value in feeds.items() if name in io.inputs}
        for layer, shape in enumerate(io.kv_layers):
            for part in ("key", "value"):
                feeds[f"past_key_values.{layer}.{part}"] = np.zeros(io.kv_shape(shape, 1, count), io.kv_element)
        names = ["logits", *dict.fromkeys(linear.value for linear in self._record.linear_outputs)]
        values = dict(zip(names, self._session.run(names, feeds), strict=True))
        outputs: dict[str, FloatArray] = {}
        for linear in self._record.linear_outputs:
            stacked = np.asarray(values[linear.value]).reshape(count, -1)
            edges = np.cumsum((0, *linear.rows))
            for weight, begin, end in zip(linear.weights, edges, edges[1:], strict=False):
                outputs[weight] = stacked[:, begin:end]
        return np.asarray(values["logits"]), outputs
