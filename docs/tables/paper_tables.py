"""Tables of docs/papers that belong to one paper each: whole models, layers, ablations."""

import re
from collections import defaultdict
from pathlib import Path

from results import Row, markdown, number, read, us

PAGES = Path(__file__).parents[1] / "papers"
ENGINE, LAYERS, ABLATION = "h200_papers_engine", "h200_layers", "h200_ablation"
HALF = "llama-3-70b-half"
PARTS = ("gemm_us", "attention_us", "rest_us")
NAMES = {
    "llama-2-7b": "Llama-2-7B", "llama-2-13b": "Llama-2-13B", "llama-2-70b": "Llama-2-70B",
    "llama-3-8b": "Llama-3-8B", "llama-65b": "Llama-65B", "yi-34b": "Yi-34B",
    "mixtral-8x7b": "Mixtral-8x7B", "opt-30b": "OPT-30B",
}  # fmt: skip
FORMATS = {"cublas fp8": "cuBLAS fp8", "bf16": "cuBLAS bf16"}
WAYS = {  # decoder and pipeline of ablation.py, at commit 0d72981
    ("lanes", "turns"): "QServe's decoding, alternating",
    ("ours", "turns"): "alternating",
    ("ours", "explicit"): "explicit",
    ("ours", "implicit"): "implicit (shipped)",
    ("lanes", "implicit"): "QServe's decoding, implicit",
    ("unshifted", "implicit"): "implicit, without bias shift",
    ("four", "implicit"): "implicit, four codes at once",
}


def tables() -> dict[str, str]:
    tables = {
        "llama70b": llama70b(),
        "peaks": peaks(),
        "layers_liquid": layers(
            "liquid@int8", ("cublas fp8", "int8@int8", "liquid@int8"), (4, 16, 64, 256)
        ),
        "layers_fp6": layers("fp6", ("bf16", "int8", "fp6", "int4:group=128"), (8, 16, 32)),
        "squares": squares(),
        "pipelines": pipelines(),
    }
    tables |= {f"runs_{path.stem}": runs(path.read_text()) for path in sorted(PAGES.glob("*.md"))}
    return {name: table for name, table in tables.items() if table}


def runs(page: str) -> str:
    """GPU, commits and dates of the files that a page names; "" where there are none."""
    files, gpus, days = [], set(), set()
    for name in sorted(set(re.findall(r"`(h200_\w+)(?:\.csv)?`", page))):
        rows = [row for row in read(name) if row.get("date")]
        gpus |= {row["gpu"] for row in rows if row.get("gpu")}
        days |= {row["date"] for row in rows}
        commits = {row["commit"]: None for row in rows if row.get("commit")}
        dates = sorted({row["date"][5:] for row in rows})
        if rows:
            said = ", ".join([*commits, " to ".join(dict.fromkeys([dates[0], dates[-1]]))])
            files.append(f"{name.removeprefix('h200_')} {said}")
    years = sorted({day[:4] for day in days})
    return f"Runs, {', '.join([*sorted(gpus), *years])}: {'; '.join(files)}." if files else ""


def llama70b() -> str:
    """Tokens a second and GPU: fp6 on one, against the best that bf16 can do on two."""
    rows = [row for row in read(ENGINE) if row["kv"] == "model"]
    found = {(row["model"], row["format"], row["context"], row["batch"]): row for row in rows}
    out = []
    for (model, spec, context, batch), row in sorted(found.items(), key=by_size):
        half = found.get((HALF, "bf16", context, batch))
        if (model, spec) != ("llama-3-70b", "fp6") or half is None:
            continue
        times = [
            f"{float(row[part]) / 1e3:.1f} / {float(half[part]) / 1e3:.1f}"
            for part in ("step_us", *PARTS)
        ]
        gain = 2 * float(half["step_us"]) / float(row["step_us"])
        out.append([f"{int(context):,}", batch, *times, f"{rate(row):,.0f}", f"{gain:.2f}x"])
    titles = ["context", "batch", "step", "GEMMs", "attention", "other", "fp6, tokens/s"]
    return markdown([*titles, "per GPU"], out)


def by_size(item: tuple[tuple[str, ...], Row]) -> tuple[int, int]:
    row = item[1]
    return int(row["context"]), int(row["batch"])


def peak(model: str, spec: str) -> Row | None:
    """The row with the most decoded tokens a second of the batches that fit into 80 GB.

    All have INT8 caches, and are of the papers' own runs if these have liquid's, else of the first.
    """
    for run in (ENGINE, "h200_engine"):
        rows = [r for r in read(run) if (r["model"], r["kv"]) == (model, "int8")]
        rows = [r for r in rows if r["context"] == "1280" and r["backends"] != "triton"]
        if any(r["format"] == "liquid@int8" for r in rows):
            fits = [
                r
                for r in rows
                if r["format"] == spec and int(r["batch"]) <= int(r["batch_in_80gb"])
            ]
            return max(fits, key=rate, default=None)
    return None


PEAKS = ("bf16", "fp8@fp8", "int8@int8", "liquid@int8")


def peaks() -> str:
    """LiquidServe's table 1: decoded tokens a second at 1,280 tokens of context, within 80 GB."""
    out = []
    for model, name in NAMES.items():
        best = {spec: peak(model, spec) for spec in PEAKS}
        ours, others = best[PEAKS[-1]], [row for spec in PEAKS[:-1] if (row := best[spec])]
        if not ours or not others:
            continue
        cells = [f"{rate(row):,.0f} ({row['batch']})" if row else "" for row in best.values()]
        gain = rate(ours) / max(map(rate, others))
        out.append([name, *cells, f"{gain:.2f}x", ours["commit"]])
    titles = [f"`{spec}`" if "@" in spec else spec for spec in PEAKS]
    return markdown(["model", *titles, "liquid / best other", "commit"], out)


def rate(row: Row) -> float:
    return float(row["tokens_per_s"])


def sums() -> dict[str, dict[str, dict[int, float]]]:
    """Microseconds of all products of a layer: model, format, tokens."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in read(LAYERS):
        times = found.setdefault(row["model"], {}).setdefault(row["format"], {})
        times[int(row["M"])] = times.get(int(row["M"]), 0.0) + float(row["us"])
    return found


def layers(of: str, shown: tuple[str, ...], counts: tuple[int, ...]) -> str:
    """Microseconds of all GEMMs of a layer, of models in which a format was timed; no squares."""
    order = list(NAMES)
    models = [m for m, formats in sums().items() if of in formats and not m.startswith("square")]
    out = []
    for model in sorted(models, key=lambda m: order.index(m.removesuffix("-fp6"))):
        for spec in shown:
            times = sums()[model].get(spec, {})
            cells = [number(times[m]) if m in times else "" for m in counts]
            out.append([NAMES[model.removesuffix("-fp6")], FORMATS.get(spec, f"`{spec}`"), *cells])
    return markdown(["model", "weights", *(f"M={m}" for m in counts)], out, words=2)


def squares() -> str:
    """Speed over cuBLAS bf16 with one token on square weights."""
    found = {
        int(model.removeprefix("square-")): {spec: times[1] for spec, times in formats.items()}
        for model, formats in sums().items()
        if model.startswith("square-")
    }
    sizes = sorted(found)
    out = [
        [f"`{spec}`", *(f"{found[size]['bf16'] / found[size][spec]:.2f}x" for size in sizes)]
        for spec in (found[sizes[0]] if sizes else ())
        if spec != "bf16"
    ]
    return markdown(["format", *(f"{size:,}" for size in sizes)], out)


def pipelines() -> str:
    """LiquidGEMM's figure 13 and FP6-LLM's decoding: times by how weights are decoded and when."""
    rows = [row for row in read(ABLATION) if row["experts"] == "0"]
    tokens = sorted({int(r["M"]) for r in rows} & {16, 64, 128, 512})
    found: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for r in rows:
        found[r["scheme"], WAYS[r["decoder"], r["pipeline"]]][int(r["M"])] = us(r)
    out = [[*key, *(times[m] for m in tokens)] for key, times in found.items()]
    return markdown(["scheme", "kernel", *(f"M={m}" for m in tokens)], out, words=2)
