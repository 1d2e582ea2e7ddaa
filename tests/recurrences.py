"""Recurrences of one sequence in float64, as their definitions read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.native import Array

Double = NDArray[np.float64]


def gated_delta(
    value: Array, query: Array, key: Array, decay: Array, beta: Array, state: Array | None = None
) -> tuple[Double, Double]:
    """``value [S, Hv, Dv]``, ``query`` and ``key [S, Hk, Dk]``, ``decay [S, Hv]`` or ``[S, Hv, Dk]``, ``beta [S, Hv]``;
    and the last state.
    """
    tokens, heads, value_size = value.shape
    repeat = heads // key.shape[1]
    query, key = (np.repeat(each.astype(np.float64), repeat, 1) for each in (query, key))
    query, key = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (query, key))
    query /= np.sqrt(query.shape[2])
    kept = np.zeros((heads, key.shape[2], value_size)) if state is None else state.astype(np.float64)
    outputs = np.empty((tokens, heads, value_size))
    for t in range(tokens):
        kept = kept * np.exp(decay[t].astype(np.float64)).reshape(heads, -1, 1)
        answer = np.einsum("hk,hkv->hv", key[t], kept)
        kept = kept + np.einsum("hk,hv->hkv", key[t], beta[t][:, None] * (value[t] - answer))
        outputs[t] = np.einsum("hk,hkv->hv", query[t], kept)
    return outputs, kept


def selective_scan(
    value: Array, query: Array, key: Array, decay: Array, state: Array | None = None
) -> tuple[Double, Double]:
    """``value [S, H, P]``, ``query`` and ``key [S, G, N]``, ``decay [S, H]``; and the last state ``[H, N, P]``."""
    tokens, heads, value_size = value.shape
    repeat = heads // key.shape[1]
    query, key = (np.repeat(each.astype(np.float64), repeat, 1) for each in (query, key))
    kept = np.zeros((heads, key.shape[2], value_size)) if state is None else state.astype(np.float64)
    outputs = np.empty((tokens, heads, value_size))
    for t in range(tokens):
        kept = kept * np.exp(decay[t].astype(np.float64))[:, None, None]
        kept = kept + np.einsum("hk,hv->hkv", key[t], value[t])
        outputs[t] = np.einsum("hk,hkv->hv", query[t], kept)
    return outputs, kept
