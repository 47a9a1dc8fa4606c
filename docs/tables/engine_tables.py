"""Tables of whole models: README.md, docs/serving.md and docs/vllm.md."""

from collections import defaultdict

import paper_tables
from accuracy_tables import short
from kernel_tables import CHOICES
from results import (
    BIG,
    FOUR,
    HALVES,
    M1V4,
    OURS,
    Column,
    Row,
    cells,
    find,
    loss,
    markdown,
    read,
    score,
)

BATCHES = (1, 16, 64, 128, 256)
LLAMA = "llama-3-8b"


def tables() -> dict[str, str]:
    return {
        "headline": headline(),
        "prompts": prompts(),
        "speeds": speeds(),
        "accuracy": accuracy(),
        "engine_llama3": engine(LLAMA),
        "engine_llama2": engine("llama-2-7b"),
        "engine_parts": parts(),
        "engine_steps": engine_steps(),
        "rotated_steps": rotated_steps(),
        "vllm": vllm(),
        "vllm_speeds": vllm_speeds(),
        "vllm_checks": vllm_checks(),
        "kv_cache": kv_cache(),
        "kv_cache_gpu": kv_cache_gpu(),
        "cpu_model": cpu_model(),
        "drafts": drafts("cpu_speculative"),
        "drafts_gpu": drafts("h200_speculative"),
        "drafted_steps": drafted_steps("cpu_speculative", 0),
        "drafted_steps_gpu": drafted_steps("h200_speculative", 2),
        "deterministic": deterministic(),
        "cpu_speeds": cpu_speeds(),
    }


def steps(model: str) -> dict[tuple[str, str], dict[int, Row]]:
    """Rows of an engine's run: weights and KV cache, then batch size."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in read("h200_engine"):
        if row["model"] == model:
            found.setdefault((row["format"], row["kv"]), {})[int(row["batch"])] = row
    return found


def cache(kv: str) -> str:
    return "bf16" if kv == "model" else kv


def engine_steps() -> str:
    """Decode steps with an int8 cache, by format and the head's format, and bf16's over them."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in read("h200_engine_steps"):
        found[row["format"]][int(row["batch"])] = float(row["step_us"]) / 1e3
    counts, dense = sorted(found["bf16"]), found["bf16"]
    lines = []
    for name, steps in found.items():
        spec, _, head = name.partition("+")
        cells = [f"{steps[m]:.2f} ({dense[m] / steps[m]:.2f}x)" for m in counts]
        lines.append([f"`{spec}`" if spec != "bf16" else spec, head or "bf16", *cells])
    return markdown(["layers", "head", *(f"batch {m}, ms" for m in counts)], lines, 2)


def rotated_steps() -> str:
    """A decode step by what a layer does about rotations, with the engine's parts of it."""
    titles = {
        "trellis": "not rotated",
        "trellis@int8": "not rotated, int8 tokens",
        "trellis:rotate=kn": "`rotate=kn`, by each layer",
        "folded:trellis": "folded into the weights",
    }
    lines = []
    for row in read("h200_rotated_steps"):
        scheme, parts = row["format"], ("gemm_us", "attention_us", "rest_us")
        times = [f"{float(row[key]) / 1e3:.2f}" for key in ("step_us", *parts)]
        lines.append([f"`{scheme.removeprefix('folded:')}`", titles.get(scheme, ""), *times])
    lines.sort(key=lambda line: float(line[2]))
    heads = ["format", "rotations", "step, ms", "products", "attention", "the rest"]
    return markdown(heads, lines, 2)


def kv_cache() -> str:
    """What a KV cache of each kind saves and costs."""
    times = read("cpu_kv_cache")
    counts = sorted({int(row["sequences"]) for row in times})
    longest = max((int(row["context"]) for row in times), default=0)
    found = {
        (row["kv"], int(row["sequences"])): row for row in times if int(row["context"]) == longest
    }
    lines = []
    for row in read("kv_accuracy"):
        own = [found[row["kv"], count] for count in counts]
        dense = float(found["model", counts[0]]["bytes_a_token"])
        memory = f"{float(own[0]['bytes_a_token']) / dense:.2f}"
        kl, same = float(row["kl"]), float(row["agreement"])
        speed = [f"{float(r['us']) / 1e3:,.1f} ms" for r in own]
        lines.append([cache(row["kv"]), memory, f"{kl:.6f}", f"{same:.2%}", *speed])
    titles = ["cache", "memory", "KL divergence", "same token"]
    return markdown([*titles, *(f"{n} x {longest:,} tokens" for n in counts)], lines)


def kv_cache_gpu() -> str:
    """Microseconds of a layer's attention on a GPU, by sequences and context."""
    found: dict[tuple[int, int], dict[str, Row]] = defaultdict(dict)
    for row in read("h200_kv_cache"):
        found[int(row["sequences"]), int(row["context"])][row["kv"]] = row
    out = []
    for (count, context), rows in found.items():
        few = [f"{float(r['us']):.0f} ({float(r['vs_bf16']):.2f})" for r in rows.values()][1:]
        out.append([f"{count} x {context:,}", f"{float(rows['model']['us']):.0f}", *few])
    return markdown(["sequences x tokens", "bf16", "int8", "int4"], out)


# README.md.


def headline() -> str:
    latest, prompts = paper_tables.steps(), vllm_rows("prefill")
    dense = score("bf16", "dense", "study-105m")
    fp6 = score("fp6", "gptq", "study-105m")
    specs = "bf16", "liquid@int8"
    found = [latest.get((LLAMA, spec, "model", "1", "1280")) for spec in specs]
    read_by = [prompts[spec, "bf16"].get(("auto", 64)) for spec in specs]
    if not all(found) or not all(read_by) or not dense or not fp6:
        return ""
    step = [float(row["step_us"]) / 1e3 for row in found if row]
    prompt = [figure for figure in read_by if figure]
    spoken, mixed = [f"{n:,.0f} tokens/s" for n, _ in prompt], prompt[0][1] != prompt[1][1]
    scores = [f"{float(row['perplexity']):.3f}" for row in (dense, fp6)]
    out = [
        ["Decode step, Llama-3-8B shapes, batch 1, `liquid@int8`",
         *(f"{ms:.2f} ms" for ms in step), f"**{step[0] / step[1]:.1f}x as fast**"],
        ["Prompts, 64 of 1,024 tokens at once inside vLLM, the same model and format",
         *spoken, f"**{prompt[1][0] / prompt[0][0]:.1f}x as fast**{', of two runs' * mixed}"],
        *on_one_gpu(),
        ["Perplexity, a 105M-parameter model of Python code, `fp6` with GPTQ",
         *scores, f"**+{loss(fp6)} nats**"],
    ]  # fmt: skip
    gpu = next(row["gpu"] for row in found if row)
    return markdown([f"measured on one {gpu}", "bf16", "anybit", ""], out)


def prompts() -> str:
    """Milliseconds to a prompt's first token, by length, and tokens a second of several at once."""
    found: dict[tuple[str, str], dict[tuple[int, int], Row]] = defaultdict(dict)
    for row in read("h200_prompts"):
        size = int(row["prompts"]), int(row["tokens"])
        found[row["format"], row["graphs"]][size] = row
    sizes = sorted({size for rows in found.values() for size in rows})
    out = []
    for (spec, graphs), rows in found.items():
        cells = [
            "" if size not in rows
            else f"{float(rows[size]['ms']):.1f}" if size[0] == 1
            else f"{float(rows[size]['tokens_per_s']):,.0f}"
            for size in sizes
        ]  # fmt: skip
        out.append([f"`{spec}`", graphs, *cells])
    titles = [f"{t:,}" if n == 1 else f"{n} of {t:,}, tokens/s" for n, t in sizes]
    return markdown(["weights", "graphs", *titles], out, words=2)


def on_one_gpu(batch: str = "16", context: str = "640") -> list[list[str]]:
    """What a model of 70 billion parameters gains by fitting into one GPU."""
    pair = (("llama-3-70b-half", "bf16", "model"), ("llama-3-70b", "fp6", "model"))
    rows = [paper_tables.steps().get((*key, batch, context)) for key in pair]
    if not all(rows):
        return []
    half, fp6 = (float(row["tokens_per_s"]) for row in rows if row)
    return [
        [f"Decoded tokens/s a GPU, Llama-3-70B shapes, batch {batch}: `fp6` on one, bf16 on two",
         f"{half / 2:,.0f} at most", f"{fp6:,.0f}", f"**{2 * fp6 / half:.1f}x as many**"],
    ]  # fmt: skip


SPEEDS = [  # name, format of the engine's run, of the product's, its activations
    ("`liquid@int8`", "liquid@int8", "liquid", ("int8-given",)),
    ("`int4:group=128`", FOUR, FOUR, HALVES),
    ("`fp6`", "fp6", "fp6", HALVES),
    ("`codebook:m=1,v=4,group=128`", "codebook:m=1,v=4,b=8,group=128", M1V4, HALVES),
]


def speeds() -> str:
    """Products against cuBLAS fp16, decode steps against the engine's own in bf16."""
    rows, out = steps(LLAMA), []
    for name, weights, fmt, activation in SPEEDS:
        column: Column = ("", OURS, (fmt,), activation, "")
        found = [find(cells()[*BIG, m], column) for m in (1, 16, 64, 256)]
        row = [f"{float(f['vs_cublas_fp16']):.2f}x" if f else "" for f in found]
        for kv, batch in (("model", 1), ("int8", 64), ("int8", 128), ("int8", 256)):
            ours = rows.get((weights, kv), {}).get(batch)
            bf16 = rows.get(("bf16", "model"), {}).get(batch)
            both = ours and bf16
            row.append(f"{float(bf16['step_us']) / float(ours['step_us']):.2f}x" if both else "")
        out += [[name, *row]] * any(row)
    titles = ["", "GEMM, M=1", "M=16", "M=64", "M=256"]
    titles += ["step, batch 1", "batch 64, INT8 KV", "128, INT8 KV", "256, INT8 KV"]
    return markdown(titles, out)


def cpu_rows() -> list[tuple[Row, Row, list[list[str]]]]:
    """anybit's and llama.cpp's rows, measured in turns; speeds and ratio of decode and prompt."""
    rows, out = read("cpu_model"), []
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert (ours["engine"], theirs["engine"]) == ("anybit", "llama.cpp")
        speeds = []
        for what, digits in (("decode", 1), ("prompt", 0)):
            a, b = (float(row[f"{what}_tokens_per_s"]) for row in (ours, theirs))
            speeds.append([f"{a:.{digits}f}", f"{b:.{digits}f}", f"{a / b:.2f}x"])
        out.append((ours, theirs, speeds))
    return sorted(out, key=lambda row: -float(row[0]["weights_gb"]))


def cpu_model() -> str:
    out = [
        [f"`{ours['format']}`", theirs["format"], *decode, *prompt,
         f"{float(ours['vs_floor']):.2f}"]
        for ours, theirs, (decode, prompt) in cpu_rows()
    ]  # fmt: skip
    titles = ["anybit", "llama.cpp", "decode: anybit", "llama.cpp", "", "prompt of 512: anybit"]
    return markdown([*titles, "llama.cpp", "", "anybit's step / read floor"], out, 2)


def drafts(name: str) -> str:
    """Tokens a second without drafts and with those of the text itself."""
    found: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in read(name):
        if row["what"] == "texts":
            found[row["text"], row["temperature"], row["batch"]][row["draft"]] = row
    out = []
    for (text, temperature, batch), rows in found.items():
        none, ngram = rows["none"], rows["ngram"]
        a, b = float(none["tokens_per_s"]), float(ngram["tokens_per_s"])
        out.append(
            [text, f"{float(temperature):g}", batch, f"{a:.0f}", f"{b:.0f}", f"{b / a:.2f}x",
             ngram["tokens_per_step"], f"{float(ngram['taken'] or 0):.2f}" * bool(ngram["taken"])]
        )  # fmt: skip
    titles = ["text", "temperature", "texts", "none", "`ngram`", "", "tokens in a step"]
    return markdown([*titles, "guesses taken"], out)


def drafted_steps(name: str, digits: int) -> str:
    """Milliseconds of a step by the tokens of a text in it."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in read(name):
        if row["what"] == "steps":
            texts = "" if row["batch"] == "1" else f", {row['batch']} texts"
            title = f"`{row['format']}`{texts}"
            found[title].append(f"{float(row['step_us']) / 1e3:.{digits}f}")
    counts = [str(1 + i) for i in range(max(map(len, found.values()), default=0))]
    return markdown(["", *counts], [[title, *times] for title, times in found.items()])


def deterministic() -> str:
    """Tokens a second with steps of one shape and without, by texts at once."""
    found: dict[str, list[str]] = {"0": [], "1": []}
    counts = []
    for row in read("cpu_deterministic"):
        if row["what"] == "speed" and row["model"] == "pico":
            found[row["deterministic"]].append(f"{float(row['tokens_per_s']):.0f}")
            counts += [row["batch"]] if row["deterministic"] == "0" else []
    names = {"0": "as it is", "1": "`--deterministic`"}
    return markdown(["texts at once", *counts], [[names[k], *v] for k, v in found.items()])


def cpu_speeds() -> str:
    """README.md."""
    out = [
        [f"`{ours['format']}`", decode[0], f"{decode[2]} {theirs['format']}",
         prompt[0], f"{prompt[2]} {theirs['format']}"]
        for ours, theirs, (decode, prompt) in cpu_rows()
    ]  # fmt: skip
    titles = ["", "decode", "to llama.cpp", "prompt of 512", "to llama.cpp"]
    return markdown(titles, out)


def accuracy() -> str:
    out = []
    for _, name, spec, method in CHOICES:
        if row := score(spec, method, "study-105m"):
            name = name if "," in name.split("`")[-1] else f"{name}, rounded to nearest"
            scores = f"{float(row['bits']):.2f}", f"{float(row['perplexity']):.3f}", loss(row)
            out.append([name, *scores])
    return markdown(["format, quantizer", "bits", "perplexity", "loss, nats"], out)


# docs/serving.md.


def engine(model: str) -> str:
    """Microseconds of a decode step by weights and cache, and what else a run measured."""
    titles = ["weights", "KV", *(f"batch {b}" for b in BATCHES)]
    titles += ["/ read floor at 1", "at 64", "at 256"]
    titles += ["prompt tokens/s", "first token, ms", "sequences in 80 GB"]
    out = []
    for (name, kv), rows in steps(model).items():
        first, other = rows[min(rows)], name.startswith("transformers")
        row = ["transformers `generate`, bf16" if other else short(name), cache(kv)]
        row += [f"{int(rows[b]['step_us']):,}" if b in rows else "" for b in BATCHES]
        row += [rows[b]["vs_floor"] if b in rows else "" for b in (1, 64, 256)]
        speed = "" if other or kv != "model" else f"{int(first['prefill_tokens_per_s']):,}"
        row += [speed, first["ttft_ms"] if speed else "", first["batch_in_80gb"]]
        out.append(row)
    return markdown(titles, out, words=2)


def parts() -> str:
    """Where a step of Llama-3-8B's shapes spends its time, batch 1 and 256."""
    titles = ["weights", "KV"]
    titles += [f"{part}, batch {b}" for b in (1, 256) for part in ("GEMMs", "attention", "rest")]
    out = []
    for (name, kv), rows in steps(LLAMA).items():
        found = [rows[b] for b in (1, 256) if b in rows and rows[b]["gemm_us"]]
        if len(found) == 2:
            values = [row[f"{p}_us"] for row in found for p in ("gemm", "attention", "rest")]
            out.append([short(name), cache(kv), *(f"{float(v):,.0f}" for v in values)])
    return markdown(titles, out, words=2)


# docs/vllm.md.

ENGINES = {  # quantization and head in the CSV: name
    ("bf16", "bf16"): "vLLM, bf16",
    ("fp8", "bf16"): "vLLM, fp8 (CUTLASS)",
    ("gptq", "bf16"): "vLLM, GPTQ int4 g128 (Machete)",
    ("marlin", "bf16"): "vLLM, GPTQ int4 g128 (Marlin)",
    ("int4:group=128", "bf16"): "vLLM, anybit int4 g128",
    ("liquid@int8", "bf16"): "vLLM, anybit liquid@int8",
    ("liquid@int8 unfused", "bf16"): "the same, launches not fused",
    ("liquid@int8", "int8@int8"): "vLLM, anybit liquid@int8, int8 head",
    ("codebook:m=1,v=4,group=128", "bf16"): "vLLM, anybit m1v4 g128",
}
RIVALS = {  # ours: what vLLM has beside it
    "liquid@int8": ("fp8", "gptq", "marlin"),
    "int4:group=128": ("gptq", "marlin"),
}
NAMES = {"fp8": "fp8", "gptq": "Machete", "marlin": "Marlin"}
VLLM_COLUMNS = [("auto", 1), ("auto", 16), ("auto", 64), ("fp8", 64), ("fp8", 256)]
Figures = dict[tuple[str, int], tuple[float, bool]]  # of a KV cache and batch; in the last run


def vllm_rows(what: str) -> dict[tuple[str, str], Figures]:
    """A figure of cases on one GPU, by quantization and head: the last run's, its best if twice."""
    same = {("decode", "1"): "steady"}  # of one text, all steps but the first
    rows = [
        r for r in read("h200_vllm")
        if r["ranks"] == "1" and same.get((r["what"], r["batch"]), r["what"]) == what
    ]  # fmt: skip
    found: dict[tuple[str, str], Figures] = defaultdict(dict)
    for r in rows:
        case, at = found[r["quantization"], r["head"]], (r["kv"], int(r["batch"]))
        value, last = float(r["value"]), r["commit"] == rows[-1]["commit"]
        if last and at in case and case[at][1]:
            value = (min if what == "steady" else max)(value, case[at][0])
        case[at] = value, last
    return found


def vllm() -> str:
    """Milliseconds of a decode step and prompt speed inside vLLM, and of our own engine."""
    found, prompts = vllm_rows("steady"), vllm_rows("prefill")
    out = []
    for key, name in ENGINES.items():
        values = [found[key].get(column) for column in VLLM_COLUMNS]
        if any(values):
            row = [milliseconds(v[0]) + "*" * (not v[1]) if v else "" for v in values]
            prompt = prompts[key].get(("auto", 64))
            tokens = f"{prompt[0]:,.0f}" + "*" * (not prompt[1]) if prompt else ""
            out.append([name, *row, tokens])
    row = []
    for kv, batch in VLLM_COLUMNS:
        kind = "model" if kv == "auto" else "int8"
        own = paper_tables.steps().get((LLAMA, "liquid@int8", kind, str(batch), "1280"))
        row.append(milliseconds(float(own["step_us"]) / 1e3) if own else "")
    out.append(["anybit's engine, liquid@int8, INT8 for FP8 KV", *row, ""])
    titles = ["", *(f"{batch}{', FP8 KV' * (kv != 'auto')}" for kv, batch in VLLM_COLUMNS)]
    return markdown([*titles, "prompt tokens/s"], out if found else [])


def vllm_speeds() -> str:
    """How many times as fast as the fastest of vLLM's own; a star where that is of another run."""
    found = vllm_rows("steady")
    out = []
    for case, rivals in RIVALS.items():
        row = []
        for column in VLLM_COLUMNS:
            times = [found[own, "bf16"].get(column) for own in rivals]
            ours, best = found[case, "bf16"].get(column), min(filter(None, times), default=None)
            mixed = "*" if ours and best and ours[1] != best[1] else ""
            row.append(f"{best[0] / ours[0]:.2f}x{mixed}" if best and ours else "")
        out.append([f"`{case}` to the fastest of {', '.join(NAMES[r] for r in rivals)}", *row])
    titles = ["", *(f"batch {batch}{', FP8 KV' * (kv != 'auto')}" for kv, batch in VLLM_COLUMNS)]
    return markdown(titles, out if found else [])


SAME = "tokens equal to transformers'"  # of 24, the fewest of three texts


def vllm_checks() -> str:
    """Greedy tokens and perplexity of pico inside vLLM, beside transformers'."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for r in read("h200_vllm"):
        found[r["quantization"], r["ranks"]][r["what"]] = r["value"]
    out = [
        [f"`{name}`", ranks, f"{row[SAME]} of 24",
         f"{float(row['perplexity']):.2f}", f"{float(row['perplexity by transformers']):.2f}"]
        for (name, ranks), row in found.items() if "perplexity" in row
    ]  # fmt: skip
    titles = ["", "GPUs", "equal tokens", "perplexity", "by transformers"]
    return markdown(titles, out)


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
