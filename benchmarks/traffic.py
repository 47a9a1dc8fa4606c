"""Poisson arrivals of mixed prompts on the engine, or on vLLM with or without our kernels.

    python benchmarks/traffic.py liquid@int8 --kv int8 --rates 4,16,32
    python benchmarks/traffic.py fp8 --vllm

Llama-3-8B shapes, random weights, in one process: prompts lognormal(5.6, 1.0) within 16 to 3,000
tokens, answers lognormal(5.2, 0.7) within 8 to 800, greedy. A row for each rate; times in ms.
"""

import argparse
import importlib.metadata
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from csv_rows import add_rows

from anybit.measure.bench import current_commit
from anybit.serve.bench import Lengths, Load, Seen, summary

MODEL = "llama-3-8b"


class Server(Protocol):
    """An engine in this process."""

    def add(self, name: str, prompt: list[int], tokens: int) -> None: ...

    def step(self) -> Iterator[tuple[str, int]]:
        """Run a step: requests, and how many new tokens each has."""

    def busy(self) -> bool: ...

    def stop(self) -> None:
        """End all requests."""


class Ours:
    """anybit's engine."""

    def __init__(self, args: argparse.Namespace):
        import engine as shapes

        from anybit.engine.llm import LLM
        from anybit.engine.loader import Loaded, build, model_class

        device, config = torch.device("cuda"), shapes.config_of(MODEL, None)
        case, plus, _ = args.case.partition("+exact")  # liquid@int8+exact: exact answers
        scheme = None if case == "bf16" else case
        weights = shapes.RandomWeights(device, scheme, None)
        model = build(model_class(config), config, weights, 4096)
        begun = time.perf_counter()
        loaded = Loaded(model, None, config, frozenset(), torch.bfloat16)
        more = {"max_itl": args.max_itl} if args.max_itl else {}
        more["exact_answers"] = bool(plus)
        llm = LLM(loaded, kv_cache=args.kv, max_running=256, prefix_caching=False, **more)
        self.engine = llm.engine
        pace = self.engine.scheduler.pace
        beside = pace.room(1, 0).tokens if pace else self.engine.scheduler.max_tokens
        print(f"ready in {time.perf_counter() - begun:.1f} s; {beside} tokens a step", flush=True)

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        from anybit.engine.sequence import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.engine.add(name, prompt, params)

    def step(self) -> Iterator[tuple[str, int]]:
        for delta in self.engine.step():
            if delta.error:
                raise SystemExit(f"error: {delta.error}")
            yield delta.request, len(delta.tokens)

    def busy(self) -> bool:
        return self.engine.busy

    def stop(self) -> None:
        for name in list(self.engine.requests):
            self.engine.abort(name)
        while self.engine.busy:
            self.engine.step()

    def after(self) -> dict[str, Any]:
        from anybit.engine.ready import after_ready

        compiled, captured = after_ready(self.engine)
        return {"compiled": compiled, "captured": captured}


class Vllm:
    """vLLM, its engine in this process."""

    def __init__(self, args: argparse.Namespace):
        import in_vllm
        import vllm

        path = in_vllm.checkpoint(
            in_vllm.arguments().parse_args([args.case, "--model", MODEL]), Path(tempfile.mkdtemp())
        )
        more: dict[str, Any] = {"load_format": "dummy"} if args.case in ("bf16", "fp8") else {}
        more |= {"quantization": "fp8"} if args.case == "fp8" else {}
        self.vllm = vllm
        self.engine = vllm.LLM(
            model=str(path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=4096,
            max_num_seqs=256, gpu_memory_utilization=0.85, enable_prefix_caching=False,
            disable_log_stats=True, seed=0, **more,
        ).llm_engine  # fmt: skip
        self.written: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        params = self.vllm.SamplingParams(
            temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> Iterator[tuple[str, int]]:
        for out in self.engine.step():
            count = len(out.outputs[0].token_ids)
            yield out.request_id, count - self.written.get(out.request_id, 0)
            self.written[out.request_id] = count

    def busy(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def stop(self) -> None:
        self.engine.abort_request(list(self.written))
        while self.busy():
            self.engine.step()

    def after(self) -> dict[str, Any]:
        return {"compiled": "", "captured": ""}


def run(server: Server, rate: float, seconds: float, seed: int = 0) -> dict[str, float]:
    """Put a load on a server; times in ms."""
    lengths = Lengths(270, 1.0, 16, 3000), Lengths(181, 0.7, 8, 800)
    draw, todo = random.Random(seed + 1), Load(*lengths, rate, seconds).plan(random.Random(seed))
    times: dict[str, list[float]] = {}
    start, at = time.perf_counter(), 0
    while at < len(todo) or server.busy():
        now = time.perf_counter() - start
        if now > 2.2 * seconds:
            break
        while at < len(todo) and todo[at][0] <= now:
            name = f"{rate}-{seed}-{at}"
            times[name] = []
            prompt = [draw.randrange(1, 100_000) for _ in range(todo[at][1])]
            server.add(name, prompt, todo[at][2])
            at += 1
        if not server.busy():
            time.sleep(0.0005)
            continue
        for name, tokens in server.step():
            times[name] += [time.perf_counter() - start] * tokens
    wall = time.perf_counter() - start
    server.stop()
    seen = [Seen(todo[i][0], found, len(found)) for i, found in enumerate(times.values())]
    row = {"rate_per_s": int(rate) if rate.is_integer() else rate} | summary(seen, wall)
    row["requests"] = len(todo)
    del row["failed"]
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("case", help="bf16 or a scheme; with --vllm also fp8")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--max-itl", type=float)
    parser.add_argument("--rates", default="4,16,32")
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--out", type=Path, default=Path("out/traffic.csv"))
    args = parser.parse_args(arguments)
    build: Callable[[argparse.Namespace], Any] = Vllm if args.vllm else Ours
    server = build(args)
    run(server, 16.0, 2, 9)
    facts = {
        "engine": f"vLLM {importlib.metadata.version('vllm')}" if args.vllm else "anybit",
        "case": args.case, "kv": args.kv, "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "commit": current_commit(),
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for rate in map(float, args.rates.split(",")):
        figures = {k: round(v, 2) for k, v in run(server, rate, args.seconds).items()}
        row = facts | figures | server.after()
        add_rows(args.out, [row])
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
