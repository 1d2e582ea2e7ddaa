"""PortableGraph records of llama checkpoints for tests that need no ONNX: what export would say, by naming rule."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open

from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.portable_graph import LinearGroup, PortableGraph
from tests.states import attention_state

UNITS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
EMBEDDING = "model.embed_tokens.weight"


def llama_graph(checkpoint: Path, folder: Path) -> Artifact[PortableGraph]:
    """Copy a llama checkpoint with tied embeddings into an artifact; there is no ``model.onnx`` in it."""
    config = json.loads((checkpoint / "config.json").read_text())
    weights = safe_open(checkpoint / "model.safetensors", framework="numpy")
    layers = [
        (f"layers.{n}.{unit}", tuple(f"model.layers.{n}.{part}.weight" for part in parts))
        for n in range(config["num_hidden_layers"])
        for unit, parts in UNITS.items()
    ]
    groups: list[LinearGroup] = []
    for name, members in [*layers, ("lm_head", (EMBEDDING,))]:
        shapes = [weights.get_slice(member).get_shape() for member in members]
        groups.append(
            LinearGroup(
                name=name,
                members=members,
                biases=(None,) * len(members),
                in_features=shapes[0][1],
                out_features=tuple(shape[0] for shape in shapes),
            )
        )
    with artifact.create(folder, PortableGraph) as draft:
        shutil.copytree(checkpoint, draft.folder, dirs_exist_ok=True)
        draft.finish(
            PortableGraph(
                architecture="LlamaForCausalLM",
                layers=config["num_hidden_layers"],
                state=attention_state(config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]),
                hidden_size=config["hidden_size"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_size=config["head_dim"],
                value_size=config["head_dim"],
                vocab_size=config["vocab_size"],
                tied_embeddings=True,
                embedding=EMBEDDING,
                rotary="half",
                max_positions=config["max_position_embeddings"],
                model_positions=config["max_position_embeddings"],
                groups=tuple(groups),
                stop_tokens=(config["eos_token_id"],),
                max_relative_error=0.0,
                versions={},
            ),
            parents={},
        )
    return artifact.load(folder, PortableGraph)
