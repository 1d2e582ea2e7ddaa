"""A kernel for one operator: the rows of an embedding in float, gathered by a native kernel instead of Gather."""

from __future__ import annotations

from pathlib import Path

from tests.drills.checkout import Checkout

DECLARED = """    KernelOperator(
        "FloatGather", (Argument("ids", ("int64",)), Argument("table")), (_Y,), "float_gather"
    ),  # [..] to [.., K]
)
OPERATORS = {"""

KERNEL = """/* FloatGather: rows of an embedding in float.

     ids [..] int64   table [N, K] float
     y [.., K] float */
#include "ort.h"

#include <string.h>

enum { MAX_RANK = 8 };

typedef struct {
  Base base;
} Kernel;

static Status* compute(void* self, Context* context) {
  Api api = ((const Kernel*)self)->base.api;
  Tensor ids, table;
  TRY(input(api, context, 0, NULL, &ids));
  TRY(input(api, context, 1, NULL, &table));
  if (!ids.present || ids.type != INT64 || ids.rank >= MAX_RANK || !table.present || table.type != FLOAT ||
      table.rank != 2)
    return failure(api, ERROR_ARGUMENT, "FloatGather: ids are not int64 or the table is not [N, K] float");
  const int64_t N = table.dims[0], K = table.dims[1], *id = ids.data;
  int64_t dims[MAX_RANK];
  for (size_t i = 0; i < ids.rank; i++) dims[i] = ids.dims[i];
  dims[ids.rank] = K;
  float* y = NULL;
  TRY(output(api, context, 0, dims, ids.rank + 1, &y));
  for (int64_t i = 0; i < ids.elements; i++) {
    if (id[i] < 0 || id[i] >= N) return failure(api, ERROR_ARGUMENT, "FloatGather: an id is outside the embedding");
    memcpy(y + i * K, (const float*)table.data + id[i] * K, K * sizeof(float));
  }
  return NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  (void)info;
  Kernel found = {{api, threads_of(op)}};
  return keep_kernel(&found, sizeof found, self);
}

const Implementation float_gather = {create, compute};
"""

PASS = '''"""A token embedding in float is gathered by a native kernel."""

from __future__ import annotations

import onnx_ir as ir

from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, new_value, replace


def run(lowering: Lowering) -> PassResult:
    model, name = lowering.model, lowering.graph.embedding
    nodes = [n for n in model.graph if n.op_type == "Gather" and n.inputs[0] is not None and n.inputs[0].name == name]
    reason = lowering.kernels.unsupported("FloatGather") if nodes else f"{name}: no Gather reads it"
    if reason:
        return PassResult(0, (reason,))
    for node in nodes:
        table, ids = node.inputs
        rows = new_value("embedding.rows", node.outputs[0])
        replace(model, [node], [ir.node("FloatGather", [ids, table], domain=DOMAIN, outputs=[rows])],
                {node.outputs[0]: rows})  # fmt: skip
    model.opset_imports[DOMAIN] = 1
    lowering.plan["embedding"] = "FloatGather"
    return PassResult(len(nodes))
'''
MOST_EDITED = 3


def test_a_kernel_for_one_operator(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "checkout")
    checkout.add("engines/kernels/cpu/source/float_gather.c", KERNEL)
    checkout.add("engines/passes/onnxruntime/float_embedding.py", PASS)
    checkout.edit("engines/kernels/operators.py", ")\nOPERATORS = {", DECLARED)
    for old in ("            embedding,\n            gated_norms,", "                embedding,\n            ),"):
        new = old.replace("embedding,\n", "embedding,\n            float_embedding,\n")
        checkout.edit("engines/targets/ort_cpu/__init__.py", old, new)
    row = "| `FloatGather` | rows of an embedding in float | Gather |"
    checkout.edit("docs/native-kernels.md", "| `BlockGather` |", f"{row}\n| `BlockGather` |")
    assert len(checkout.edited) <= MOST_EDITED
    checkout.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_operators.py")
    embeddings = {"bits": 32}
    found = checkout.stages(tmp_path / "project", {"plan": {"embeddings": embeddings}})
    assert found["plan"]["embedding"] == "FloatGather"
    assert {found["checks"][name] for name in ("parity_kl", "parity_error")} == {"PASS"}, found
