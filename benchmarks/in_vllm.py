"""anybit inside vLLM, beside vLLM's own kernels: start, prompts, decode steps; one case a process.

    python benchmarks/in_vllm.py liquid@int8 --kv fp8 --out vllm.csv  # random weights, Llama-3-8B
    python benchmarks/in_vllm.py fp6 --check models/pico --ranks 2    # tokens, text: transformers'

A case is bf16, fp8 (vLLM's own), gptq (int4 in groups of 128, through Machete), marlin (the same
through Marlin), exl3-2 (EXL3's files of 2 bits, by anybit), or a scheme of anybit's. Every decoder
layer is a copy of the first. README.md says what the rows are.
"""

import argparse
import fcntl
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from csv_rows import add_rows
from engine import MODELS, RandomWeights, config_of
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from anybit.checkpoint.foreign.exl3 import MULTIPLIERS
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.core.packed import Packed
from anybit.nn.plan import quantization_config

GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
    "lm_head": False, "damp_percent": 0.01,
}  # fmt: skip
NOT_MARLIN = "MacheteLinearKernel,CutlassW4A8LinearKernel"
PROMPT, OUTPUT, ALONE = 1024, 128, 2048  # tokens; ALONE: of a prompt that is run by itself
BLOCK = 8  # steps that are timed together
CHECKED, WINDOW = 24, 200  # tokens written, and scored at once
PROMPTS = [[317, 952, 261, 8], [695, 1449, 321, 578, 221], [758, 396, 363, 297, 1129, 8]]
COLUMNS = (
    "gpu", "date", "commit", "quantization", "head", "kv", "ranks", "what", "batch", "context",
    "value", "unit", "vllm", "torch",
)  # fmt: skip


def main() -> None:
    args = arguments().parse_args()
    if args.case == "marlin":
        os.environ["VLLM_DISABLED_KERNELS"] = NOT_MARLIN
    with tempfile.TemporaryDirectory() as scratch:
        work = compare if args.check else reload if args.reload else measure
        work(args, args.folder or Path(scratch))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--head", help="a scheme of anybit's for the output head")
    parser.add_argument("--kv", default="auto", help="kv_cache_dtype: fp8, anybit_int4, ...")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batches", default="1,16,64,128,256")
    parser.add_argument("--context", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--eager", action="store_true", help="neither compiled nor in graphs")
    parser.add_argument("--graphs", default="", help="prompts of these tokens in graphs, as well")
    parser.add_argument("--unfused", action="store_true", help="without anybit's pass over graphs")
    parser.add_argument("--check", type=Path, metavar="MODEL", help="compare tokens and a text's")
    parser.add_argument("--reload", action="store_true", help="quantize dense weights, and anew")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept")
    parser.add_argument(
        "--turns", type=Path, metavar="FILE",
        help="cases that name one file start side by side, and are measured one at a time",
    )  # fmt: skip
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, help="a CSV file that rows are added to")
    return parser


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Write a row for each figure, as they are measured."""
    start = time.perf_counter()
    with taken(args.turns, fcntl.LOCK_SH):
        path = checkpoint(args, folder)
        making, batches = time.perf_counter() - start, numbers(args.batches)
        start = time.perf_counter()
        llm = engine(args, path, batches)
        write(args, "make", 0, making, "s")
        write(args, "startup", 0, time.perf_counter() - start, "s")
    with taken(args.turns, fcntl.LOCK_EX):
        measure_steps(llm, args, batches)


@contextmanager
def taken(turns: Path | None, how: int) -> Iterator[None]:
    """Hold a file: with those who start as well (LOCK_SH), or alone (LOCK_EX)."""
    if turns is None:
        yield
        return
    with turns.open("a") as file:
        fcntl.flock(file, how)
        yield
        fcntl.flock(file, fcntl.LOCK_UN)  # which processes that were started meanwhile hold too


def measure_steps(llm: Any, args: argparse.Namespace, batches: list[int]) -> None:
    """Prompts and decode steps of a running engine."""
    cache = llm.llm_engine.vllm_config.cache_config
    write(args, "room", 0, cache.num_gpu_blocks * cache.block_size, "tokens of KV")
    for batch in (1, min(8, max(batches))):
        run(llm, args, batch, 8)
    for batch in batches:
        repeats = 3 if batch <= 16 else 1
        first = min(run(llm, args, batch, 1)[0] for _ in range(repeats))
        blocks = [steps_of(run(llm, args, batch, OUTPUT)[1]) for _ in range(repeats)]
        write(args, "prefill", batch, batch * args.context / first, "tokens/s")
        write(args, "steady", batch, min(median(each) for each in blocks), "ms/step")
        print("BLOCKS", batch, *(f"{ms:.2f}" for each in blocks for ms in each), flush=True)
    alone = length(args) - OUTPUT
    if alone > args.context:
        first = min(run(llm, args, 1, 1, alone)[0] for _ in range(4))
        write(args, "prefill", 1, alone / first, "tokens/s", alone)


def steps_of(ends: list[float]) -> list[float]:
    """Milliseconds of a step in each block of the second half of a run's output.

    By then all prompts are read, and no text is over: each step is one of the whole batch.
    """
    ends = ends[OUTPUT // 2 - 1 : OUTPUT]
    pairs = zip(ends[:-1:BLOCK], ends[BLOCK::BLOCK], strict=True)
    return [(end - start) / BLOCK * 1e3 for start, end in pairs]


def run(
    llm: Any, args: argparse.Namespace, batch: int, tokens: int, prompt: int = 0
) -> tuple[float, list[float]]:
    """Seconds of a batch's prompts and this many tokens of each; when each step was over."""
    import vllm

    core, ends = llm.llm_engine.engine_core, list[float]()
    get_output = core.get_output

    def noted() -> Any:
        outputs = get_output()
        if outputs.outputs:
            ends.append(outputs.timestamp)  # of the process that steps
        return outputs

    words = MODELS[args.model].vocab_size
    prompt = min(prompt or args.context, length(args) - OUTPUT)
    ids = torch.randint(0, words, (batch, prompt)).tolist()
    params = vllm.SamplingParams(
        temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
    )
    core.get_output = noted
    start = time.perf_counter()
    out = llm.generate([{"prompt_token_ids": line} for line in ids], params, use_tqdm=False)
    took = time.perf_counter() - start
    core.get_output = get_output
    assert all(len(o.outputs[0].token_ids) == tokens for o in out)
    return took, ends


def write(
    args: argparse.Namespace, what: str, batch: int, value: float, unit: str, context: int = 0
) -> None:
    import vllm

    gpu = torch.cuda.get_device_name() if on_gpu() else "cpu"
    case = args.case + " unfused" * args.unfused + " eager" * args.eager
    case += f" graphs {args.graphs}" if args.graphs else ""
    case += f" {args.model}" * (args.model != "llama-3-8b")
    case += f" {args.layers} layers" if args.layers else ""
    row = (
        gpu, time.strftime("%Y-%m-%d", time.gmtime()), args.commit, case,
        args.head or "bf16", args.kv, args.ranks, what, batch, context or args.context,
        f"{value:.5g}", unit, vllm.__version__, torch.__version__,
    )  # fmt: skip
    print("ROW", *row[3:12], flush=True)
    if args.out:
        add_rows(args.out, [dict(zip(COLUMNS, row, strict=True))])


def reload(args: argparse.Namespace, folder: Path) -> None:
    """Seconds until a running engine has other dense weights, quantized as they are read."""
    path = checkpoint(args, folder)
    llm = engine(args, path, [1])
    for _ in range(2):
        start = time.perf_counter()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        write(args, "reload", 0, time.perf_counter() - start, "s")
    run(llm, args, 1, 8)


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Greedy tokens of a model, and perplexity, by vLLM and by transformers, from one checkpoint.

    In bf16 both may round a near tie apart. So each of vLLM's tokens is also judged by
    transformers' logits after the tokens before it: how far it is from the likeliest.
    """
    import vllm

    path = folder / name_of(args.case, args.check.name)
    if args.case == "bf16":
        path = args.check
    elif not path.exists():
        plan = {"*": args.case} | ({"lm_head": args.head} if args.head else {})
        quantize_checkpoint(args.check, path, plan)
    device = "cuda" if on_gpu() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval().to(device)
    wanted = []
    for ids in PROMPTS:
        given = torch.tensor([ids], device=device)
        text = model.generate(
            given, attention_mask=torch.ones_like(given), min_new_tokens=CHECKED,
            max_new_tokens=CHECKED, do_sample=False,
        )  # fmt: skip
        wanted.append(text[0, len(ids) :].tolist())
    windows = text_of(args.check)
    with torch.no_grad():
        logits = model(torch.tensor(windows, device=device)).logits[:, :-1].float()
    targets = torch.tensor(windows, device=device)[:, 1:]
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).exp().item()
    del logits
    llm = engine(args, path, [1, 2, 4])
    params = vllm.SamplingParams(temperature=0, max_tokens=CHECKED, ignore_eos=True,
                                 detokenize=False)  # fmt: skip
    given = [{"prompt_token_ids": ids} for ids in PROMPTS]
    got = [list(o.outputs[0].token_ids) for o in llm.generate(given, params, use_tqdm=False)]
    pairs = [[*zip(a, b, strict=True)] for a, b in zip(got, wanted, strict=True)]
    same = [next((i for i, (a, b) in enumerate(p) if a != b), CHECKED) for p in pairs]
    write(args, "tokens equal to transformers'", len(PROMPTS), min(same), f"of {CHECKED}")
    print("EQUAL" if min(same) == CHECKED else f"DIFFER from {same}", flush=True)
    gaps = []
    for ids, tokens in zip(PROMPTS, got, strict=True):
        with torch.no_grad():
            whole = torch.tensor([ids + tokens], device=device)
            logits = model(whole).logits[0, len(ids) - 1 : -1].float().cpu()
        gaps += [logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]]
    write(args, "gap to the likeliest token", len(PROMPTS), torch.cat(gaps).max().item(), "logits")
    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": w} for w in windows], params, use_tqdm=False)
    each = [
        place[token].logprob
        for out, window in zip(scored, windows, strict=True)
        for place, token in zip(out.prompt_logprobs[1:], window[1:], strict=True)
    ]
    write(args, "perplexity", len(windows), math.exp(-sum(each) / len(each)), "")
    write(args, "perplexity by transformers", len(windows), theirs, "")


def text_of(model: Path) -> list[list[int]]:
    """A text in windows: the page about this library's design."""
    text = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    return [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]


def engine(args: argparse.Namespace, path: Path, batches: list[int]) -> Any:
    """vLLM with a model."""
    import vllm

    sizes = sorted(batches)  # others run in the next larger one's graph
    sizes += numbers(args.graphs) if args.graphs else []
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": sizes}
    options: dict[str, Any] = {"compilation_config": compilation}
    if args.unfused:
        compilation["inductor_compile_config"] = {"post_grad_custom_post_pass": no_pass()}
    if args.eager:
        options = {"enforce_eager": True}
    if args.case in ("bf16", "fp8") and not args.check:
        options["load_format"] = "dummy"
    if args.case == "fp8":
        options["quantization"] = "fp8"
    if args.reload:
        overrides = {"anybit": {"formats": {"*": args.case, "lm_head": args.head}}}
        options |= {"quantization": "anybit", "hf_overrides": overrides}
    if args.case.startswith("exl3"):
        options["quantization"] = "anybit"
    if args.turns:  # others have the rest of the memory
        options["kv_cache_memory_bytes"] = cache_bytes(args, max(batches))
    if args.kv.startswith("anybit_"):
        options["attention_backend"] = "CUSTOM"
    if args.ranks > 1:
        options |= {"tensor_parallel_size": args.ranks, "disable_custom_all_reduce": True}
    return vllm.LLM(
        str(path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=length(args),
        max_num_seqs=max(batches), max_num_batched_tokens=max(8192, length(args)),
        kv_cache_dtype=args.kv, gpu_memory_utilization=0.2 if args.check or args.turns else 0.85,
        enable_prefix_caching=False, seed=0, **options,
    )  # fmt: skip


def cache_bytes(args: argparse.Namespace, batch: int) -> int:
    """Bytes of K and V, in bf16, of a batch in the middle of being written, and some more."""
    config = config_of(args.model, args.layers)
    heads = config.num_hidden_layers * config.num_key_value_heads
    tokens = batch * (min(args.context, length(args)) + OUTPUT) + length(args)
    return 2 * 2 * heads * config.head_dim * (tokens + 16 * (batch + 1))


def no_pass() -> Any:
    """A pass that changes nothing, in the place that anybit's would take."""
    from vllm.compilation.passes.inductor_pass import CallableInductorPass

    return CallableInductorPass(leave, uuid="nothing")


def leave(graph: Any) -> None:
    """Leave a graph as it is; not in `no_pass`, since vLLM's processes look it up by name."""


def numbers(given: str) -> list[int]:
    return [int(each) for each in given.split(",")]


def length(args: argparse.Namespace) -> int:
    return 256 if args.check else min(max(ALONE, args.context) + OUTPUT, positions(args))


def positions(args: argparse.Namespace) -> int:
    """Of the model, more than it was made for if prompts are to be longer."""
    return max(int(MODELS[args.model].max_position_embeddings), args.context + OUTPUT)


def checkpoint(args: argparse.Namespace, folder: Path) -> Path:
    """A model of random weights; only its configuration for what vLLM fills in by itself."""
    config = config_of(args.model, args.layers)
    case = "dense" if args.reload else args.case
    out = folder / name_of(case, args.model, f"{config.num_hidden_layers}", args.head or "")
    if (out / "config.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    config.max_position_embeddings = positions(args)
    settings = config.to_dict() | {"dtype": "bfloat16"}
    (out / "generation_config.json").write_text("{}")
    if case not in ("bf16", "fp8"):
        plan = {"*": case, "lm_head": args.head}
        if case in ("gptq", "marlin"):
            settings["quantization_config"] = GPTQ
        elif case.startswith("exl3"):
            settings["quantization_config"] = {"quant_method": "exl3", "bits": float(bits_of(case))}
        elif case != "dense":
            settings["quantization_config"] = quantization_config(plan)
        save(config, dict(layer(config, case)), dict(outside(config, args.head)), out)
    (out / "config.json").write_text(json.dumps(settings, indent=1))
    return out


def name_of(*words: str) -> str:
    """A name for a folder."""
    return "".join(c if c.isalnum() else "_" for c in "-".join(words))


def layer(config: LlamaConfig, case: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a decoder layer by the last parts of their names."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes = {
        "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
    }  # fmt: skip
    for name, (n, k) in shapes.items():
        if case == "dense":
            tensors = {"weight": random(n, k)}
        else:
            make = exl3 if case.startswith("exl3") else quantized
            tensors = gptq(n, k) if case in ("gptq", "marlin") else make(n, k, case)
        yield from ((f"{name}.{key}", tensor) for key, tensor in tensors.items())
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", torch.ones(h, dtype=torch.bfloat16)


def outside(config: LlamaConfig, head: str | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model that are no decoder layer's."""
    table = random(config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", table
    yield "model.norm.weight", torch.ones(config.hidden_size, dtype=torch.bfloat16)
    tensors = {"weight": table} if head is None else quantized(*table.shape, head)
    yield from ((f"lm_head.{key}", tensor) for key, tensor in tensors.items())


def random(n: int, k: int) -> Tensor:
    return torch.randn(n, k, device="cuda" if on_gpu() else "cpu", dtype=torch.bfloat16) * 0.02


def quantized(n: int, k: int, scheme: str) -> dict[str, Tensor]:
    weights = RandomWeights(torch.device("cuda" if on_gpu() else "cpu"), scheme)
    packed = weights.part("", (n, k), bias=False)[0]
    assert isinstance(packed, Packed)
    return packed.tensors()


def gptq(n: int, k: int) -> dict[str, Tensor]:
    """A layer as GPTQ's tools write it."""
    group = GPTQ["group_size"]
    return {
        "qweight": torch.randint(-(2**31), 2**31, (k // 8, n), dtype=torch.int64).int(),
        "qzeros": torch.full((k // group, n // 8), 0x77777777, dtype=torch.int32),
        "scales": (torch.rand(k // group, n) * 0.002 + 0.004).half(),
        "g_idx": (torch.arange(k) // group).int(),
    }


def exl3(n: int, k: int, case: str) -> dict[str, Tensor]:
    """A layer as EXL3 stores it."""
    words = torch.randint(-(2**31), 2**31, (k // 16, n // 16, 8 * bits_of(case)), dtype=torch.int64)
    signs = {"suh": k, "svh": n}
    return {
        "trellis": words.int().view(torch.int16),
        "mcg": torch.tensor(MULTIPLIERS["mcg"] - 2**32, dtype=torch.int32),
        **{key: (torch.randint(0, 2, (size,)) - 0.5).half() / 4 for key, size in signs.items()},
    }


def bits_of(case: str) -> int:
    """Of a weight: exl3-2 has 2."""
    return int(case.rpartition("-")[2])


def save(config: LlamaConfig, one: dict[str, Tensor], rest: dict[str, Tensor], out: Path) -> None:
    """Write a checkpoint whose decoder layers are all the same."""
    index = {}

    def put(tensors: dict[str, Tensor]) -> None:
        file = f"model-{len(set(index.values())):05d}.safetensors"
        whole = {name: t.clone().contiguous().cpu() for name, t in tensors.items()}
        save_file(whole, out / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    put(rest)
    one = {name: tensor.cpu() for name, tensor in one.items()}
    for i in range(config.num_hidden_layers):
        put({f"model.layers.{i}.{name}": tensor for name, tensor in one.items()})
    text = json.dumps({"metadata": {}, "weight_map": index})
    (out / "model.safetensors.index.json").write_text(text)


def on_gpu() -> bool:
    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
