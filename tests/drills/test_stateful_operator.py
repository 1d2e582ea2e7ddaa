"""An operator with a vector of state: a running mean beside the MLP of a llama, through every stage."""

from __future__ import annotations

import json
from pathlib import Path

from tests.drills.checkout import Checkout

# A family that transformers does not have, as a package of its users would register it.
MODEL = '''"""A llama with a running mean of each layer's MLP inputs, and a checkpoint of it made of the tiny llama."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.integrations import use_kernel_func_from_hub_with_fallback
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class MeanConfig(LlamaConfig):
    model_type = "running_mean_llama"


@use_kernel_func_from_hub_with_fallback("running_mean", "a_package_that_nobody_has")
def running_mean(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """``x [B, S, C]``, ``decay [C]``."""
    state, means = torch.zeros_like(x[:, 0]), []
    for column in x.unbind(1):
        state = decay * state + (1 - decay) * column
        means.append(state)
    return torch.stack(means, 1)


class MeanLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.decay = torch.nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        hidden_states = super().forward(hidden_states, **options)
        mean = running_mean(self.post_attention_layernorm(hidden_states), torch.sigmoid(self.decay))
        return hidden_states + 0.1 * mean


class MeanForCausalLM(LlamaForCausalLM):
    config_class = MeanConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number in range(config.num_hidden_layers):
            self.model.layers[number] = MeanLayer(config, number)
        self.post_init()


AutoConfig.register(MeanConfig.model_type, MeanConfig)
AutoModelForCausalLM.register(MeanConfig, MeanForCausalLM)


def write(source: Path, folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(source)
    values = {key: value for key, value in model.config.to_dict().items() if key not in ("model_type", "architectures")}
    changed = MeanForCausalLM(MeanConfig(**values))
    changed.load_state_dict(model.state_dict(), strict=False)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in changed.model.layers:
            layer.decay.normal_()
    changed.generation_config = model.generation_config
    changed.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


if __name__ == "__main__":
    from tests.tiny import tiny_checkpoint

    write(tiny_checkpoint(), Path(sys.argv[1]))
'''

STAGES = '''"""As ``tests.drills.stages``, where the family is registered."""

import json
import sys
from pathlib import Path

import running_mean_llama
from tests.drills import stages

stages.main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
'''

OPERATOR = '''"""A running mean of each channel: ``s[t] = decay * s[t - 1] + (1 - decay) * x[t]``."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from tapeout.operators.hub_functions import functions_replaced
from tapeout.operators.operator import Operator, TracedState
from tapeout.state import Recurrent, StateTensor

BODY = """
<opset_import: ["" : 23], domain: "tapeout">
RunningMean (x, decay, attention_mask, past) => (output, present)
{
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    axis0 = Constant <value_ints: ints = [0]> ()
    axis1 = Constant <value_ints: ints = [1]> ()
    axis2 = Constant <value_ints: ints = [2]> ()
    axes02 = Constant <value_ints: ints = [0, 2]> ()
    none = Constant <value_ints: ints = [0]> ()
    minus_one = Constant <value_ints: ints = [-1]> ()
    last = Constant <value_ints: ints = [9223372036854775807]> ()
    one_float = Constant <value_float: float = 1.0> ()
    steps_1d = Shape <start: int = 1, end: int = 2> (x)
    steps = Squeeze (steps_1d, axis0)
    first = Sub (none, steps_1d)
    seen = Slice (attention_mask, first, last, axis1)
    seen_float = CastLike (seen, x)
    seen_channels = Unsqueeze (seen_float, axis2)
    visible = Mul (x, seen_channels)
    places = Range (zero, steps, one)
    rows = Unsqueeze (places, axis1)
    columns = Unsqueeze (places, axis0)
    distance = Sub (rows, columns)
    causal = GreaterOrEqual (distance, zero)
    age = Max (distance, zero)
    age_float = CastLike (age, x)
    age_channels = Unsqueeze (age_float, axis2)
    powers = Pow (decay, age_channels)
    rest = Sub (one_float, decay)
    causal_float = CastLike (causal, x)
    causal_channels = Unsqueeze (causal_float, axis2)
    weights_all = Mul (powers, rest)
    weights = Mul (weights_all, causal_channels)
    inputs = Unsqueeze (visible, axis1)
    terms = Mul (inputs, weights)
    own = ReduceSum <keepdims: int = 0> (terms, axis2)
    age_past = Add (places, one)
    age_past_float = CastLike (age_past, x)
    age_past_column = Unsqueeze (age_past_float, axis1)
    powers_past = Pow (decay, age_past_column)
    past_column = Unsqueeze (past, axis1)
    before = Mul (powers_past, past_column)
    output = Add (own, before)
    final = Slice (output, minus_one, last, axis1)
    present = Squeeze (final, axis1)
}
"""


class RunningMean(Operator):
    name = "RunningMean"
    functions = frozenset({"running_mean"})
    before, after = "mean_in", "mean_out"

    def function(self):
        return ir.serde.deserialize_function(onnx.parser.parse_function(BODY))

    def state(self, node, layer, dtype):
        tensor = StateTensor(name="mean", shape=(node.inputs[3].shape[1],), dtype="float32")
        return Recurrent(layer=layer, tensors=(tensor,))

    def scale(self, node, name, seen, tokens):
        return float(np.sqrt((seen**2).mean()))

    def traced(self, model, tracer):
        def mean(x, decay):
            kept = TracedState(tracer.unique("mean"), (int(x.shape[2]),))
            inputs = [x, decay, *([tracer.mask] if tracer.emits else [])]
            return tracer.node(self, inputs, {}, [kept], x.shape[1])

        return functions_replaced(model, {"running_mean": mean})

    def resumed(self, model, before):
        def mean(x, decay):
            state, means = before("mean"), []
            for column in x.unbind(1):
                state = decay * state + (1 - decay) * column
                means.append(state)
            return x.new_tensor([]) if not means else __import__("torch").stack(means, 1)

        return functions_replaced(model, {"running_mean": mean})

    def leaving(self, model, left):
        from running_mean_llama import running_mean

        def mean(x, decay):
            means = running_mean(x, decay)
            left("mean", means[:, -1])
            return means

        return functions_replaced(model, {"running_mean": mean})


OPERATOR = RunningMean()
'''

PASS = '''"""Running means become a native operator over a pool of state slots."""

from __future__ import annotations

import onnx_ir as ir

from engines.bundle import OFFSETS, SLOTS, STARTS
from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, new_value, remove_dead
from engines.passes.onnxruntime.step_inputs import drop_mask, step_inputs


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if n.op_type == "RunningMean"]
    for node in nodes:
        x, decay, _, past = node.inputs
        past.shape = ir.Shape(["slots", past.shape[1]])
        output = new_value(f"{past.name}.means", node.outputs[0])
        inputs = [x, decay, past, *step_inputs(model, OFFSETS, STARTS, SLOTS)]
        model.graph.insert_before(node, ir.node("RunningMean", inputs, domain=DOMAIN, outputs=[output]))
        node.outputs[0].replace_all_uses_with(output)
        model.graph.outputs.remove(node.outputs[1])
        remove_dead(model, [node])
    if nodes:
        drop_mask(model)
        del model.functions[("tapeout", "RunningMean", "")]
        model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes))
'''

KERNEL = """/* RunningMean: x [.., M, C], decay [C], state [slots, C]; offsets, starts, slots as of CausalConv. */
#include "ort.h"

typedef struct {
  Base base;
} Kernel;

static Status* compute(void* self, Context* context) {
  Api api = ((const Kernel*)self)->base.api;
  Tensor x, decay, state, offsets, starts, slots;
  TRY(input(api, context, 0, NULL, &x));
  TRY(input(api, context, 1, NULL, &decay));
  TRY(input(api, context, 2, NULL, &state));
  TRY(input(api, context, 3, NULL, &offsets));
  TRY(input(api, context, 4, NULL, &starts));
  TRY(input(api, context, 5, NULL, &slots));
  const int64_t C = x.rank ? x.dims[x.rank - 1] : 0, B = starts.elements;
  if (!C || x.type != FLOAT || !holds(&decay, FLOAT, C) || state.type != FLOAT || state.rank != 2 ||
      state.dims[1] != C || !holds(&offsets, INT32, B + 1) || !holds(&starts, INT32, B) || !holds(&slots, INT32, B))
    return failure(api, ERROR_ARGUMENT, "RunningMean: inputs of other shapes or types");
  const int32_t *from = offsets.data, *start = starts.data, *slot = slots.data;
  const float *in = x.data, *d = decay.data;
  float* y = NULL;
  TRY(output(api, context, 0, x.dims, x.rank, &y));
  for (int64_t b = 0; b < B; b++) {
    if (from[b] < 0 || from[b + 1] > x.elements / C || slot[b] < 0 || slot[b] >= state.dims[0])
      return failure(api, ERROR_ARGUMENT, "RunningMean: a sequence outside the tokens or the state");
    float* kept = (float*)state.data + slot[b] * C;
    for (int64_t c = 0; c < C; c++) {
      float mean = start[b] ? kept[c] : 0;
      for (int64_t t = from[b]; t < from[b + 1]; t++) y[t * C + c] = mean = d[c] * mean + (1 - d[c]) * in[t * C + c];
      if (from[b] < from[b + 1]) kept[c] = mean;
    }
  }
  return NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  (void)info;
  Kernel found = {{api, threads_of(op)}};
  return keep_kernel(&found, sizeof found, self);
}

const Implementation running_mean = {create, compute};
"""

DECLARED = """    KernelOperator(
        "RunningMean",
        (
            Argument("x"), Argument("decay"), Argument("state"),
            Argument("offsets", ("int32",)), Argument("starts", ("int32",)), Argument("slots", ("int32",)),
        ),
        (_Y,),
        "running_mean",
    ),
)
OPERATORS = {"""
MOST_EDITED = 3


def test_an_operator_with_a_vector_of_state(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "checkout")
    checkout.add("running_mean_llama.py", MODEL)
    checkout.add("running_mean_stages.py", STAGES)
    checkout.add("tapeout/operators/running_mean.py", OPERATOR)
    checkout.add("engines/passes/onnxruntime/running_mean.py", PASS)
    checkout.add("engines/kernels/cpu/source/running_mean.c", KERNEL)
    checkout.edit("engines/kernels/operators.py", ")\nOPERATORS = {", DECLARED)
    for old in (
        "            recurrent_conv,\n            routers,",
        "                native_experts,\n                routers,",
    ):
        new = old.replace(",\n", ", running_mean,\n", 1)
        checkout.edit("engines/targets/ort_cpu/__init__.py", old, new)
    row = "| `RunningMean` | a running mean of each channel | |"
    checkout.edit("docs/native-kernels.md", "| `BlockGather` |", f"{row}\n| `BlockGather` |")
    assert len(checkout.edited) <= MOST_EDITED
    checkout.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_operators.py")
    checkout.python("running_mean_llama.py", str(tmp_path / "model"))
    plan = {"schemes": "auto", "layers_per_group": 4}  # the sweep runs with the operator as well
    given = {"model": {"source": f"file:{tmp_path / 'model'}"}, "plan": plan}
    output = checkout.python("running_mean_stages.py", str(tmp_path / "project"), json.dumps(given))
    found = json.loads(output.splitlines()[-1])
    judged = {
        name: outcome for name, outcome in found["checks"].items() if name.startswith(("parity", "serving", "source"))
    }
    assert judged and set(judged.values()) == {"PASS"}, found
