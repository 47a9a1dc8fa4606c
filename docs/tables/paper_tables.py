"""Tables of docs/papers that belong to one paper each: whole models, layers, ablations."""

from collections import defaultdict
from collections.abc import Iterable

from results import Missing, Row, markdown, number, read, us

ENGINE, LAYERS, ABLATION = "h200_papers_engine", "h200_layers", "h200_ablation"
HALF = "llama-3-70b-half"
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
Key = tuple[str, ...]


def tables() -> dict[str, str]:
    tables = {
        "llama70b": llama70b(),
        "dense_models": dense_models(),
        "peaks": peaks(),
        "layers_liquid": layers(
            "liquid@int8", ("cublas fp8", "int8@int8", "liquid@int8"), (4, 16, 64, 256)
        ),
        "layers_fp6": layers("fp6", ("bf16", "int8", "fp6", "int4:group=128"), (8, 16, 32)),
        "squares": squares(),
        "pipelines": pipelines(),
    }
    return {name: table for name, table in tables.items() if table}


def grouped(rows: Iterable[Row], *columns: str) -> dict[Key, Row]:
    """Rows by what stands in some columns; the last of equal ones."""
    return {tuple(row[c] for c in columns): row for row in rows}


def steps(run: str = ENGINE) -> dict[Key, Row]:
    """Decode steps by model, format, cache, batch and context; not those without our kernels."""
    rows = (row for row in read(run) if row["backends"] != "triton")
    return grouped(rows, "model", "format", "kv", "batch", "context")


def llama70b() -> str:
    """Tokens a second and GPU: fp6 on one, against the best that bf16 can do on two."""
    found, out = steps(), []
    for (model, spec, kv, batch, context), row in sorted(found.items(), key=by_size):
        half = found.get((HALF, "bf16", kv, batch, context))
        if (model, spec) != ("llama-3-70b", "fp6") or half is None:
            continue
        ours = float(row["tokens_per_s"])
        theirs = float(half["tokens_per_s"]) / 2
        cells = [float(row["step_us"]) / 1e3, float(half["step_us"]) / 1e3]
        out.append(
            [f"{int(context):,}", batch, *(f"{ms:.1f}" for ms in cells), f"{ours:,.0f}",
             f"{theirs:,.0f}", f"{gains_at(batch)[context]:.2f}x"]
        )  # fmt: skip
    titles = ["context", "batch", "fp6, ms a step", "half of bf16, ms"]
    return markdown([*titles, "fp6, tokens/s and GPU", "bf16 on two, at most", ""], out)


def gains_at(batch: str, part: str = "tokens") -> dict[str, float]:
    """Of one batch, by context: tokens a second and GPU, or what a part of a step takes."""
    found, out = steps(), {}
    for context in sorted({key[4] for key in found}, key=int):
        keys = (
            (*m, batch, context) for m in (("llama-3-70b", "fp6", "model"), (HALF, "bf16", "model"))
        )
        ours, half = (found.get(key) for key in keys)
        if ours and half:
            column, gpus = ("step_us", 2) if part == "tokens" else (part, 1)
            out[context] = gpus * float(half[column]) / float(ours[column])
    if not out:
        raise Missing(f"70B, batch {batch}")
    return out


def ratios_of(model: str, other: str, spec: str, m: int) -> float:
    """Time of all products of a layer over that of another format."""
    formats = sums().get(model, {})
    return formats[other][m] / formats[spec][m]


def by_size(item: tuple[Key, Row]) -> tuple[int, int]:
    row = item[1]
    return int(row["context"]), int(row["batch"])


def dense_models() -> str:
    """Steps of fp6 and bf16 where both fit one GPU."""
    found, out = steps(), []
    for model in ("llama-2-13b", "opt-30b"):
        rows = {
            b: r for (m, f, kv, b, _), r in found.items() if (m, f, kv) == (model, "fp6", "model")
        }
        for batch in sorted(rows, key=int):
            dense = found.get((model, "bf16", "model", batch, rows[batch]["context"]))
            if dense is None:
                continue
            a, b = (float(r["step_us"]) / 1e3 for r in (rows[batch], dense))
            out.append([NAMES[model], batch, f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}x"])
    return markdown(["model", "batch", "fp6, ms a step", "bf16, ms", ""], out)


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
            return max(fits, key=lambda row: float(row["tokens_per_s"]), default=None)
    return None


PEAKS = ("bf16", "fp8@fp8", "int8@int8", "liquid@int8")


def peaks() -> str:
    """LiquidServe's table 1: decoded tokens a second at 1,280 tokens of context, within 80 GB."""
    out = []
    for model, name in NAMES.items():
        best = {spec: peak(model, spec) for spec in PEAKS}
        if best["liquid@int8"] is None:
            continue
        cells = [
            f"{float(r['tokens_per_s']):,.0f} ({r['batch']})" if r else "" for r in best.values()
        ]
        ratio = over_best(model)
        out.append([name, *cells, f"{ratio:.2f}x" if ratio else ""])
    titles = [f"`{spec}`" if "@" in spec else spec for spec in PEAKS]
    return markdown(["model", *titles, "liquid / best other"], out)


def over_best(model: str) -> float:
    """liquid's peak over the best other one; 0 where nothing else was run."""
    best = {spec: peak(model, spec) for spec in PEAKS}
    ours = best.pop("liquid@int8")
    others = [float(row["tokens_per_s"]) for row in best.values() if row]
    return float(ours["tokens_per_s"]) / max(others) if ours and others else 0.0


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
    models = square_models()
    specs = [spec for spec in sums()[models[0]] if spec != "bf16"] if models else []
    out = [[f"`{spec}`", *(f"{x:.2f}x" for x in squares_of(spec))] for spec in specs]
    sizes = (int(model.removeprefix("square-")) for model in models)
    return markdown(["format", *(f"{size:,}" for size in sizes)], out)


def square_models() -> list[str]:
    """By size."""
    found = (model for model in sums() if model.startswith("square-"))
    return sorted(found, key=lambda model: int(model.removeprefix("square-")))


def squares_of(spec: str) -> list[float]:
    """Of one format, by size."""
    if not (found := square_models()):
        raise Missing("no squares")
    return [ratios_of(model, "bf16", spec, 1) for model in found]


def pipelines() -> str:
    """LiquidGEMM's figure 13 and FP6-LLM's decoding: times by how weights are decoded and when."""
    rows = [row for row in read(ABLATION) if row["experts"] == "0"]
    tokens = sorted({int(r["M"]) for r in rows} & {16, 64, 128, 512})
    found: dict[Key, dict[int, str]] = defaultdict(dict)
    for r in rows:
        found[r["scheme"], WAYS[r["decoder"], r["pipeline"]]][int(r["M"])] = us(r)
    out = [[*key, *(times[m] for m in tokens)] for key, times in found.items()]
    return markdown(["scheme", "kernel", *(f"M={m}" for m in tokens)], out, words=2)
