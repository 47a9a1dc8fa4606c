"""Tables of docs/accuracy.md."""

import re
from collections.abc import Iterable
from itertools import pairwise
from math import log

from results import Row, loss, markdown, read

# Name in the page: CSV, model; "": whatever was trained.
MODELS = {
    "study_105m": ("h200_accuracy", "study-105m"),
    "study_105m_earlier": ("h200_accuracy", "study-105m-earlier"),
    "pico": ("h200_accuracy", "pico"),
    "pico_cpu": ("cpu_accuracy", "pico"),
    "pico_trellis": ("cpu_trellis", "pico"),
    "families_study_105m_60s": ("h200_trellis", ""),
    "pico_large_columns": ("cpu_accuracy", "pico-large-columns"),
    "rotation_outliers": ("cpu_rotation", "pico-outliers"),
    "rotation_pico": ("cpu_rotation", "pico"),
}


def tables() -> dict[str, str]:
    scores = {name: by_bits(*source) for name, source in MODELS.items()}
    return scores | {
        "trellis_options": trellis_options(),
        "front_study_105m_60s": front("h200_trellis", ""),
        "layer_time": layer_time(),
        "kv_scales": kv_scales(),
        "heads": heads(),
        "trellis_codes": trellis_codes(),
        "trellis_time": trellis_time(),
        "trellis_products": trellis_products(),
        "sparse_trained": sparse_trained(),
        "generation": generation(),
    }


def by_bits(file: str, model: str) -> str:
    """All rows of a model, by bits and then loss."""
    rows = [row for row in read(file) if model in ("", row["model"])]
    order = sorted(rows, key=lambda r: (-float(r["bits"]), r["spec"], -float(r["loss"])))
    parsed = bool(rows and rows[0]["parse_rate"])
    out = []
    for row in order:
        dense = row["method"] == "dense"
        scores = [loss(row), f"{float(row['kl']):.4f}", f"{float(row['agreement']):.1%}"]
        line = [short(row["spec"]), "" if dense else label(row), f"{float(row['bits']):.2f}"]
        line += [f"{float(row['perplexity']):.3f}", *([""] * 3 if dense else scores)]
        rate = row["parse_rate"]
        out.append(line + ([f"{float(rate):.0%}" if rate else ""] if parsed else []))
    titles = ["format", "quantizer", "bits", "perplexity", "loss, nats", "KL", "top-1"]
    return markdown([*titles, *["parses"] * parsed], out, words=2)


def best_of_each(rows: Iterable[Row]) -> list[Row]:
    """Of each format the row of least KL, by bits; weights alone, calibrated on code if at all."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: float(r["kl"])):
        weights = row["method"] != "dense" and "@" not in row["spec"]
        if weights and row["text"] in ("", "code"):
            best.setdefault(row["spec"], row)
    return sorted(best.values(), key=lambda r: float(r["bits"]))


def is_trellis(row: Row) -> bool:
    return row["spec"].removeprefix("folded:").startswith("trellis")


def bits_at(kl: float, curve: Iterable[Row]) -> float | None:
    """Bits at which a curve has this KL, between its points linear in the KL's logarithm.

    Points of more bits and no less KL than another are not on the curve. None beyond its ends.
    """
    points: list[tuple[float, float]] = []
    for bits, error in sorted((float(r["bits"]), float(r["kl"])) for r in curve):
        if not points or error < points[-1][1]:
            points.append((bits, error))
    for (a, most), (b, least) in pairwise(points):
        if least <= kl <= most:
            return a + (b - a) * log(most / kl) / log(most / least)
    return None


def front(file: str, model: str) -> str:
    """Every format at its best, and the bits that trellis codes take for the same KL."""
    best = best_of_each(row for row in read(file) if model in ("", row["model"]))
    curve = [row for row in best if is_trellis(row)]
    out, more = [], {}
    for row in best:
        bits, name = float(row["bits"]), f"{short(row['spec'])}, {row['method']}"
        equal = None if is_trellis(row) else bits_at(float(row["kl"]), curve)
        cells = ["", ""] if equal is None else [f"{equal:.2f}", f"{bits - equal:+.2f}"]
        out.append([name, f"{bits:.2f}", f"{float(row['kl']):.5f}", *cells])
        if equal is not None:
            more[name] = bits - equal
    titles = ["format, quantizer", "bits", "KL", "trellis at this KL", "more bits"]
    if not more:
        return markdown(titles, out)
    closest = min(more, key=lambda name: more[name])
    return (
        f"{markdown(titles, out)}\n\nAt equal KL the closest to trellis codes is {closest}, which "
        f"takes {more[closest]:.2f} bits more. {sum(x >= 0.5 for x in more.values())} of "
        f"{len(more)} formats take at least half a bit more."
    )


def trellis_options() -> str:
    """KL and loss of trellis codes by what else is done, and of calibrated codebooks of 2 bits."""
    titles = {"gptq": "GPTQ", "gptq@int8": "`@int8`", "additive": "tuned"}
    titles |= {"gptq-gradients": "gradients", "additive-gradients": "gradients, tuned"}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in (*read("h200_trellis"), *read("h200_trellis_gradients")):
        spec, at, activation = row["spec"].partition("@")
        trellis = spec.startswith("trellis") and spec.endswith("rotate=kn") and "code" not in spec
        if trellis or spec.startswith("codebook"):
            name = f"`trellis`, {float(row['bits']):.0f} bits" if trellis else short(spec)
            cell = f"{float(row['kl']):.5f} ({float(row['loss']):.4f})"
            found.setdefault((row["model"], name), {})[row["method"] + at + activation] = cell
    out = [[*key, *(cells.get(way, "") for way in titles)] for key, cells in sorted(found.items())]
    return markdown(["model", "KL (loss), nats", *titles.values()], out, words=2)


def short(spec: str) -> str:
    """A spec in a table: "int4 g128", "m1v4"."""
    spec = re.sub(r"codebook:m=(\d+),v=(\d+)(,b=8)?", r"m\1v\2", spec)
    spec = re.sub(r"^plan:", "planned ", spec)
    spec = re.sub(r"^folded:(.*)", r"\1 folded", spec)
    spec = re.sub(r"[:,]group=", " g", spec).replace(",zero", " zero")
    return re.sub(r"[:,]rotate=(\w+)", r" rotated \1", spec)


def label(row: Row) -> str:
    """The quantizer; its calibration data in brackets if it was not 128 windows of code."""
    default = row["text"] in ("", "code") and row["samples"] in ("0", "32", "128")
    return row["method"] + ("" if default else f" ({row['text']}, {row['samples']})")


def trellis_codes() -> str:
    """Errors of codes on Gaussian numbers, one line for each code."""
    rows = {(r["code"], r["bits"]): r for r in read("cpu_trellis_codes")}
    names = dict.fromkeys(code for code, _ in rows)
    out = []
    for name in names:
        first = rows[name, "2"]
        errors = [rows[name, bits]["mse"] for bits in ("2", "3", "4")]
        whole = "yes" if first["int8"] == "1" else ""
        out.append([f"`{name}`", first["weights_a_step"], whole, *errors])
    return markdown(["code", "weights a step", "int8", "2 bits", "3 bits", "4 bits"], out)


def trellis_time() -> str:
    """Rates of the encoder and of blocks, on a GPU."""
    out = [
        [r["what"], short(r["format"]), f"{float(r['weights_per_s']) / 1e6:.1f}", r["seconds"],
         r["note"]]
        for r in read("h200_trellis_time")
    ]  # fmt: skip
    return markdown(["", "format", "million weights/s", "seconds", ""], out, words=2)


def trellis_products() -> str:
    """Microseconds of products as they are launched, one line for each weight and format."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in read("h200_trellis_products"):
        if row["how"] in ("cuBLAS", "as launched"):
            name = f"cuBLAS {row['format']}" if row["how"] == "cuBLAS" else f"`{row['format']}`"
            cell = found.setdefault((f"{row['N']}x{row['K']}", name), {})
            cell[int(row["M"])] = f"{float(row['us']):.1f}"
    counts = sorted({m for us in found.values() for m in us})
    out = [[*key, *(us.get(m, "") for m in counts)] for key, us in found.items()]
    return markdown(["weight", "us, M =", *map(str, counts)], out, words=2)


def changes(row: Row, column: str, digits: int) -> str:
    """A difference to bf16, with its standard error."""
    value, error = float(row[column]), float(row[f"{column}_error"])
    return f"{round(value, digits) + 0.0:.{digits}f} ± {error:.{digits}f}"


def kv_scales() -> str:
    rows: dict[tuple[str, str], Row] = {}
    for row in read("cpu_kv_scales"):
        rows.setdefault((row["weights"], row["cache"]), row)
    out = [
        [*key, f"{float(r['perplexity']):.4f}", "" if key[1] == "fp32" else changes(r, "loss", 5)]
        for key, r in rows.items()
    ]
    return markdown(["weights", "KV cache", "perplexity", "loss, nats"], out, words=2)


def heads() -> str:
    out = [
        [row["model"], f"`{row['head']}`", row["perplexity"], changes(row, "loss", 5), row["kl"],
         f"{float(row['agreement']):.2%}"]
        for row in (*read("h200_heads"), *read("cpu_heads"))
    ]  # fmt: skip
    return markdown(["model", "head", "perplexity", "loss, nats", "KL", "same token"], out, words=2)


TASKS = {
    "python_docstring": "docstring, ROUGE-L",
    "python_parses": "body parses",
    "python_next_line": "next line",
    "line_runs": "line runs",
    "line_pass@1": "pass@1",
    "line_pass@10": "pass@10",
}


def generation() -> str:
    """Scores of bf16, what each format changes on the same documents, and how much of it counts."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    measured = read("h200_generation") or read("cpu_generation")
    tasks = {task: title for task, title in TASKS.items() if task in {r["task"] for r in measured}}
    for row in measured:
        found.setdefault((short(row["spec"]), quantized(row)), {})[row["task"]] = row
    out = [
        [*key, *("" if t not in rows else task(rows[t]) for t in tasks)]
        for key, rows in found.items()
    ]
    text = markdown(["format", "quantizer", *tasks.values()], out, words=2)
    return f"{text}\n\n{counted(measured)}" if text else ""


def quantized(row: Row) -> str:
    """A row's quantizer, and what it was calibrated on."""
    name = "" if row["method"] == "dense" else row["method"]
    return name + f" ({row['text']})" * bool(row["text"])


def counted(measured: Iterable[Row]) -> str:
    """What was measured, and how many of its differences are larger than two standard errors."""
    rows = list(measured)
    changed = [r for r in rows if r["method"] != "dense"]
    clear = [r for r in changed if abs(float(r["change"])) > 2 * float(r["change_error"])]
    sizes = sorted({int(r["documents"]) for r in rows})
    names = " and ".join(dict.fromkeys(r["model"] for r in rows))
    samples = ", ".join(sorted({r["samples"] for r in changed if r["samples"] != "0"}, key=int))
    said = "; ".join(
        f"{short(r['spec'])} by {quantized(r)}, {TASKS[r['task']]}: {task(r)}" for r in clear
    )
    return (
        f"{names}; {' to '.join(dict.fromkeys(map(str, (sizes[0], sizes[-1]))))} documents a task; "
        f"GPTQ with {samples} windows. Larger than two standard errors: {len(clear)} of "
        f"{len(changed)} differences" + (f" ({said})." if said else ".")
    )


def task(row: Row) -> str:
    if row["method"] == "dense":
        return f"{float(row['score']):.3f} ± {float(row['score_error']):.3f}"
    return f"{float(row['change']):+.3f} ± {float(row['change_error']):.3f}"


def sparse_trained() -> str:
    names = {"fp32": "dense", "rtn": "rounded", "gptq": "GPTQ", "trained": "trained, then rounded"}
    out = [
        [names[r["method"]], r["steps"], f"{float(r['perplexity']):.3f}", changes(r, "loss", 4)]
        for r in read("cpu_sparse")
    ]
    return markdown(["weights", "steps", "perplexity", "loss, nats"], out)


def layer_time() -> str:
    rows = read("h200_layer_time")
    out = [[r["quantizer"], short(r["format"]), f"{float(r['seconds']):.3f}"] for r in rows]
    return markdown(["quantizer", "format", "seconds"], out, words=2)
