"""Tables of whole models: docs/serving.md, docs/vllm.md and docs/benchmarks.md."""

from collections import defaultdict
from itertools import product

from accuracy_tables import short
from results import Row, markdown, read

LLAMA = "llama-3-8b"
BATCHES = (1, 16, 64, 128, 256, 512)


def tables() -> dict[str, str]:
    return {
        "traffic": traffic(),
        "engine_steps": engine_steps(),
        "system": system(),
        "prompts": prompts(),
        "vllm": vllm(),
        "kv_cache": kv_cache(),
        "kv_cache_gpu": kv_cache_gpu(),
        "cpu_model": cpu_model(),
        "cpu_files": cpu_files(),
        "drafts": drafts(),
    }


def traffic() -> str:
    """Requests over HTTP that arrive at random, with new prompts: the newest run, by rate."""
    times = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms")
    rows = [r for r in read("h200_http") if r["load"] == "poisson" and r["known_share"] == "0"]
    newest = max((r["date"] for r in rows), default="")
    out = [
        [r["rate_per_s"], r["server"], r["weights"], *(r[time] for time in times)]
        for r in sorted(rows, key=lambda r: float(r["rate_per_s"]))
        if r["date"] == newest
    ]
    titles = ["requests/s", "server", "weights", "TTFT p50", "p99", "TPOT p50", "ITL p99"]
    return markdown(titles, out, words=3)


def engine_steps() -> str:
    """Decode steps by format and the head's format, tokens a second, and speed over bf16."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in read("h200_engine_steps"):
        found[row["format"]][int(row["batch"])] = float(row["step_us"]) / 1e3
    counts, dense = sorted(found["bf16"]), found["bf16"]
    lines = []
    for name, steps in found.items():
        spec, _, head = name.partition("+")
        cells: list[str] = []
        for m in counts:
            speed = dense[m] / steps[m]
            cells += [f"{steps[m]:.2f}", f"{1e3 * m / steps[m]:,.0f}", f"{speed:.2f}x"]
        lines.append([f"`{spec}`" if spec != "bf16" else spec, head or "bf16", *cells])
    titles = [t for m in counts for t in (f"batch {m}, ms", "tokens/s", "/ bf16")]
    return markdown(["layers", "head", *titles], lines, 2)


def system_steps() -> dict[str, dict[int, float]]:
    """Milliseconds of a decode step with an INT8 cache, by weights and batch; all of one run."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in read("h200_papers_engine"):
        key = row["model"], row["kv"], row["context"]
        if key == (LLAMA, "int8", "1280") and row["backends"] != "triton":
            found[row["format"]][int(row["batch"])] = float(row["step_us"]) / 1e3
    return found


def system() -> str:
    found = system_steps()
    order = [
        s for s in ("bf16", "fp8@fp8", "int8@int8", "int4:group=128", "liquid@int8") if s in found
    ]
    out = [
        [f"`{spec}`", *(f"{found[spec][b]:.2f}" if b in found[spec] else "" for b in BATCHES)]
        for spec in order
    ]
    return markdown(["weights", *(f"batch {b}" for b in BATCHES)], out)


def prompts() -> str:
    """Milliseconds to a prompt's first token, by length."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for row in read("h200_prompts"):
        found[row["format"]][int(row["tokens"])] = f"{float(row['ms']):.1f}"
    sizes = sorted({size for rows in found.values() for size in rows})
    out = [[f"`{spec}`", *(rows[n] for n in sizes)] for spec, rows in found.items()]
    return markdown(["weights", *(f"{n:,} tokens" for n in sizes)], out)


SCORED = {  # models by which KV caches are shown
    "pico": "pico",
    "SmolLM2-135M-Instruct-Q4_1": "SmolLM2-135M",
    "gemma-3-270m-Q4_K_M": "Gemma 3 270M",
}


def kv_cache() -> str:
    """What a KV cache of each kind saves, and what it costs each model."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in read("kv_accuracy"):
        found[row["kv"]][row["model"]] = row
    out = []
    for kv, rows in list(found.items())[1:]:
        size = f"{float(rows['pico']['vs_bf16']):.2f}"
        out.append([cache(kv), size, *(f"{float(rows[m]['loss']) + 0:.4f}" for m in SCORED)])
    return markdown(["cache", "memory", *SCORED.values()], out)


def cache(kv: str) -> str:
    return "bf16" if kv == "model" else kv


def kv_cache_gpu() -> str:
    """Microseconds of a layer's attention on a GPU, by sequences and context."""
    found: dict[tuple[int, int], dict[str, Row]] = defaultdict(dict)
    for row in read("h200_kv_cache"):
        found[int(row["sequences"]), int(row["context"])][row["kv"]] = row
    out, kinds = [], dict.fromkeys(kind for rows in found.values() for kind in rows)
    for (count, context), rows in found.items():
        few = [f"{float(r['us']):.0f} ({float(r['vs_bf16']):.2f})" for r in rows.values()][1:]
        out.append([f"{count} x {context:,}", f"{float(rows['model']['us']):.0f}", *few])
    return markdown(["sequences x tokens", "bf16", *map(cache, list(kinds)[1:])], out)


def cpu_model() -> str:
    """anybit's and llama.cpp's rows, interleaved; decode, prompt, and the bandwidth bound."""
    rows, lines = [r for r in read("cpu_model") if r["model"] == RANDOM], []
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert (ours["engine"], theirs["engine"]) == ("anybit", "llama.cpp")
        cells = []
        for what, digits in (("decode", 1), ("prompt", 0)):
            a, b = (float(row[f"{what}_tokens_per_s"]) for row in (ours, theirs))
            cells += [f"{a:.{digits}f}", f"{b:.{digits}f}", f"{a / b:.2f}x"]
        line = [f"`{ours['format']}`", theirs["format"], *cells, f"{float(ours['vs_floor']):.2f}"]
        lines.append((float(ours["weights_gb"]), line))
    out = [line for _, line in sorted(lines, key=lambda x: -x[0])]
    titles = ["anybit", "llama.cpp", "decode: anybit", "llama.cpp", "", "prompt of 512: anybit"]
    return markdown([*titles, "llama.cpp", "", "step / bandwidth bound"], out, 2)


def cpu_files() -> str:
    """GGUF files, converted and in llama.cpp."""
    rows = [r for r in read("cpu_model") if r["model"] != RANDOM]
    found: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert (ours["engine"], theirs["engine"]) == ("anybit", "llama.cpp")
        for what in ("decode", "prompt"):
            a, b = (float(row[f"{what}_tokens_per_s"]) for row in (ours, theirs))
            found[ours["model"]][what, ours["threads"]] = f"{a:,.0f} ({a / b:.2f}x)"
    kinds = list(product(("decode", "prompt"), "12"))
    lines = [[model, *(of[kind] for kind in kinds)] for model, of in found.items()]
    titles = [f"{what}, {threads} thread{'s' * (threads == '2')}" for what, threads in kinds]
    return markdown(["file", *titles], lines, 1)


def drafts() -> str:
    """Tokens a second without drafts and with those that the sequence itself gives."""
    found: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for name, where in (("h200_speculative", "H200"), ("cpu_speculative", "2 CPU cores")):
        for row in read(name):
            if row["what"] == "texts":
                key = where, row["text"], row["temperature"], row["batch"]
                found[key][row["draft"]] = row
    out = []
    for (where, text, temperature, batch), rows in found.items():
        a, b = (float(rows[d]["tokens_per_s"]) for d in ("none", "ngram"))
        line = [where, text, f"{float(temperature):g}", batch, f"{a:,.0f}", f"{b:,.0f}"]
        out.append([*line, f"{b / a:.2f}x"])
    titles = ["on", "sequence", "temperature", "sequences", "no drafts", "`ngram`", ""]
    return markdown(titles, out, words=2)


RANDOM = "random Llama, 1.1B"
ENGINES = {  # quantization and head in the CSV: name
    ("bf16", "bf16"): "vLLM, bf16",
    ("fp8", "bf16"): "vLLM, fp8",
    ("gptq", "bf16"): "vLLM, GPTQ (Machete)",
    ("marlin", "bf16"): "vLLM, GPTQ (Marlin)",
    ("int4:group=128", "bf16"): "anybit int4 g128",
    ("liquid@int8", "bf16"): "anybit liquid@int8",
    ("liquid@int8", "int8@int8"): "anybit liquid@int8, int8 head",
    **{
        (scheme, "bf16"): f"anybit {short(scheme)}"
        for scheme in (
            "q4_k", "mxfp4", "codebook:m=1,v=4,group=128", "trellis", "trellis:code=look@int8",
            "trellis:code=look,rotate=kn@int8",
        )
    },
    ("exl3-2", "bf16"): "anybit, EXL3's files, 2 bits",
    ("exl3-4", "bf16"): "anybit, EXL3's files, 4 bits",
}  # fmt: skip
VLLM_COLUMNS = [("auto", 1), ("auto", 16), ("auto", 64)]
Figures = dict[tuple[str, int], tuple[float, bool]]  # of a KV cache and batch; in the last run


def vllm_rows(what: str, context: str = "1024") -> dict[tuple[str, str], Figures]:
    """A figure of cases on one GPU, by quantization and head: the last run's, its best if twice."""
    same = {("decode", "1"): "steady"}  # of one sequence, all steps but the first
    rows = [
        r for r in read("h200_vllm")
        if r["ranks"] == "1" and r["context"] == context
        and same.get((r["what"], r["batch"]), r["what"]) == what
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
    """Milliseconds of a decode step and prefill speed inside vLLM; a star: of an earlier run."""
    found, prefill, alone = vllm_rows("steady"), vllm_rows("prefill"), vllm_rows("prefill", "2048")
    out = []
    for key, name in ENGINES.items():
        values = [found[key].get(column) for column in VLLM_COLUMNS]
        if any(values):
            row = [milliseconds(v[0]) + "*" * (not v[1]) if v else "" for v in values]
            one, many = alone[key].get(("auto", 1)), prefill[key].get(("auto", 64))
            row.append(milliseconds(2048e3 / one[0]) + "*" * (not one[1]) if one else "")
            row.append(f"{many[0]:,.0f}" + "*" * (not many[1]) if many else "")
            out.append([name, *row])
    titles = ["", *(str(batch) for _, batch in VLLM_COLUMNS)]
    return markdown([*titles, "one prompt", "prefill, tokens/s"], out if found else [])


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
