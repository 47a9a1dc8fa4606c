"""What an engine does before its first request, so that none waits for a compiler or a capture."""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybit.engine.draft_model import DraftModel
from anybit.engine.engine import Engine, Stats
from anybit.engine.model_runner import ModelRunner
from anybit.engine.sequence import SamplingParams
from anybit.engine.weights import Dense
from anybit.kernels import compilations
from anybit.kernels.backend import CODES, Activations
from anybit.kernels.cute.build import build_for
from anybit.kernels.registry import get_backend
from anybit.nn.multiplier import Multiplier

log = logging.getLogger("anybit.engine")
WORTH = 3  # kernels for which other processes, which take seconds to start, are worth it

# What samples in other ways, and what no graph takes: a prompt that is read for its own sake.
REHEARSED = (
    (3, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)),
    (3, SamplingParams(max_tokens=4, temperature=0.5, ignore_eos=True)),
    (20, SamplingParams(max_tokens=4, temperature=0.5, top_p=0.9, top_k=20, ignore_eos=True)),
    (20, SamplingParams(
        max_tokens=4, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5, logprobs=2,
        ignore_eos=True,
    )),
    (300, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)),
)  # fmt: skip


def make_ready(engine: Engine, max_itl: float) -> None:
    """Capture all graphs, compile all kernels, and choose how many tokens of prompts go in a step.

    Args:
        engine: Without requests. Elsewhere than on a GPU there is nothing to do.
        max_itl: Seconds that a step with a prompt may take while other sequences are being written.
    """
    runner, scheduler = engine.runner, engine.scheduler
    if not isinstance(runner, ModelRunner) or runner.graphs is None or not runner.overlaps:
        return
    compilations.watch()
    drafter = engine.speculation.drafter if engine.speculation else None
    with torch.inference_mode(), torch.accelerator.device_index(runner.device.index):
        compile_products(runner)
        seconds = runner.graphs.capture_all()
        if isinstance(drafter, DraftModel) and drafter.runner.graphs is not None:
            drafter.runner.graphs.capture_all()
    if seconds:
        scheduler.beside = max([n for n, s in seconds.items() if s <= max_itl] or [min(seconds)])
    token = engine.vocabulary - 1
    for at, (tokens, params) in enumerate(REHEARSED):
        if tokens + 4 < engine.length:
            engine.add(f"ready-{at}", [token] * tokens, params)
            while engine.busy:
                engine.step()
    scheduler.blocks.forget()
    scheduler.preemptions = scheduler.prefix_queries = scheduler.prefix_hits = 0
    engine.stats = Stats()
    engine.ready_at = (compilations.count(), runner.graphs.captures)


def compile_products(runner: ModelRunner) -> None:
    """Compile what products of all graphs' sizes launch, side by side instead of one by one."""
    graphs, words = runner.graphs, runner.model.embed_tokens
    assert graphs is not None
    steps = [rows for rows in (graphs.written, graphs.prompts) if rows]
    head = getattr(runner.model, "lm_head", None)  # it sees the ends of texts alone
    layers: dict[Any, Multiplier | Dense] = {}
    for layer in runner.model.modules():
        if isinstance(layer, Multiplier):
            layers[layer.scheme, layer.backend, layer.prepared.shape] = layer
        elif isinstance(layer, Dense):
            layers[layer.weight.shape] = layer
    # Of answers' tokens there may be a second row; see `between.Answers`.
    low = {kind: kind == "int8" and runner.model.exact_answers for kind in (None, *CODES)}
    todo = [
        (layer, size)
        for layer in layers.values()
        for size in sorted({
            size + low[getattr(layer, "activation", None)] * rows.single(size)
            for rows in steps[: 1 if layer is head else 2]
            for size in rows.sizes
        })
    ]  # fmt: skip

    def multiply(layer: Multiplier | Dense, size: int) -> None:
        if isinstance(layer, Dense):
            layer(layer.weight.new_zeros(size, layer.weight.shape[1]))
        else:
            x = placeholder(layer, size, words.dtype)
            get_backend(layer.backend).linear(x, layer.prepared, None)

    for error in build_for([partial(multiply, *each) for each in todo], WORTH):
        log.debug("left to its first use: %s", error)


def placeholder(layer: Multiplier, tokens: int, dtype: torch.dtype) -> Tensor | Activations:
    """Tokens (M, K) of zeros, as a layer multiplies them."""
    x = torch.zeros(tokens, layer.in_features, dtype=dtype, device=layer.device)
    if layer.activation is None:
        return x
    scale = torch.zeros(tokens, device=layer.device)
    sums = scale.int() if layer.activation == "int8" else scale.new_empty(0, dtype=torch.int32)
    return Activations(x.to(CODES[layer.activation]), scale, sums, dtype)


def after_ready(engine: Engine) -> tuple[int, int]:
    """Kernels that were compiled and graphs that were captured since then."""
    runner = engine.runner
    graphs = runner.graphs if isinstance(runner, ModelRunner) else None
    compiled, captured = engine.ready_at
    return compilations.count() - compiled, (graphs.captures if graphs else 0) - captured
