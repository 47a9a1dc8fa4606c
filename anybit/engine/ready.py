"""What an engine does before its first request, so that none waits for a compiler or a capture."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from anybit.engine.draft_model import DraftModel
from anybit.engine.engine import Engine, Stats
from anybit.engine.graphs import StepGraphs, Zeros
from anybit.engine.model_runner import ModelRunner
from anybit.engine.pace import Pace
from anybit.engine.sequence import SamplingParams
from anybit.engine.spare import learned, record
from anybit.kernels import compilations
from anybit.kernels.ahead import Missing, build_for, collected
from anybit.kernels.processes import standing_by
from anybit.progress import START

log = logging.getLogger("anybit.engine")
GPU_ITL = 0.02  # seconds of a step with a prompt beside texts
WORTH = 3  # kernels for which other processes, which take seconds to start, are worth it

# What samples in other ways, and what no graph takes: a prompt that is read for its own sake.
REHEARSED = (
    (3, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)),
    (3, SamplingParams(max_tokens=4, temperature=0.5, ignore_eos=True)),
    (20, SamplingParams(max_tokens=4, temperature=0.5, top_p=0.9, top_k=20, ignore_eos=True)),
    (
        20,
        SamplingParams(
            max_tokens=4,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            logprobs=2,
            ignore_eos=True,
        ),
    ),
    (300, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)),
)
ALONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def make_ready(engine: Engine, max_itl: float | None) -> None:
    """Capture all graphs, compile all kernels, and choose how many tokens of prompts go in a step.

    On a CPU a step of one token runs. Steps are recorded by requests and between them, and their
    times are those that requests take.

    Args:
        engine: Without requests.
        max_itl: Seconds that a step with a prompt may take while other sequences are being written;
            None: on a GPU GPU_ITL, on a CPU `pace.FACTOR` times a step without prompts.
    """
    runner, scheduler = engine.runner, engine.scheduler
    if not isinstance(runner, ModelRunner) or runner.graphs is None:
        return
    drafter = engine.speculation.drafter if engine.speculation else None
    every = [runner.graphs]
    if isinstance(drafter, DraftModel) and drafter.runner.graphs is not None:
        every.append(drafter.runner.graphs)
    if not runner.overlaps:
        with torch.inference_mode():
            runner.graphs.warm()
        START.done("a step")
        if runner.graphs.prompts is not None:
            runner.graphs.reads = True
            scheduler.pace = learned(runner.graphs, max_itl, scheduler.each)
        engine.spare = partial(record, every)
        return
    compilations.watch()
    with standing_by():
        with torch.inference_mode(), torch.accelerator.device_index(runner.device.index):
            seconds, *_ = map(captured, every)
            if seconds:
                least = scheduler.blocks.block_size
                scheduler.pace = Pace(seconds, max_itl or GPU_ITL, least=least, each=scheduler.each)
        START.done("graphs")
        build([partial(rehearse, engine, runner.graphs)], 1)
        START.done("sampling")
    engine.ready_at = (compilations.count(), runner.graphs.captures)


def rehearse(engine: Engine, graphs: StepGraphs) -> None:
    """Run what samples in other ways, or in no graph, for what that compiles.

    Where a kernel is missing, what it would write is zeros, which are tokens, too.
    """
    scheduler, token = engine.scheduler, engine.vocabulary - 1
    largest = graphs.prompts.sizes[-1] if graphs.prompts else 0
    alone = [(n, ALONE) for n in beyond(largest, min(scheduler.max_tokens, engine.length - 1))]
    for at, (tokens, params) in enumerate([*REHEARSED, *alone]):
        if tokens + (params.max_tokens or 0) <= engine.length:
            engine.add(f"ready-{at}", [token] * tokens, params)
            with Zeros():  # type: ignore[no-untyped-call]
                while engine.busy:
                    engine.step()
            scheduler.blocks.forget()  # the next one's beginning is the same
    scheduler.preemptions = scheduler.prefix_queries = scheduler.prefix_hits = 0
    engine.stats = Stats()


def beyond(largest: int, most: int) -> list[int]:
    """Tokens of prompts, of up to `most`, that no graph takes: kernels differ by powers of two.

    largest: tokens of the largest graph; 0: none reads prompts.
    """
    powers = [1 << i for i in range(9, most.bit_length())]
    found = {most, *powers, *(power + 1 for power in powers)}
    return [n for n in sorted(found) if largest < n <= most]


def captured(graphs: StepGraphs) -> dict[int, float]:
    """`StepGraphs.capture_all`, for which all kernels are compiled side by side if any is not."""
    try:
        with collected(strict=True):
            return graphs.capture_all()
    except Missing:
        build(graphs.launches(), WORTH)
        START.done("kernels")
        return graphs.capture_all()


def build(launches: Sequence[Callable[[], object]], least: int) -> None:
    """As `build_for`; a kernel that fails does so again where it is needed."""
    for error in build_for(launches, least):
        log.debug("left to its first use: %s", error)


def after_ready(engine: Engine) -> tuple[int, int]:
    """Kernels that were compiled and graphs that were captured since then."""
    runner = engine.runner
    graphs = runner.graphs if isinstance(runner, ModelRunner) else None
    compiled, captured = engine.ready_at
    return compilations.count() - compiled, (graphs.captures if graphs else 0) - captured
