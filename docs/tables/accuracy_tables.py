"""Tables of docs/accuracy.md and of the bits that trellis codes save."""

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import log

from results import BIG, OUT, Row, loss, markdown, read

Keep = Callable[[Row], bool]


def tables() -> dict[str, str]:
    return {
        "studied": by_bits("study_qwen2.5-coder-1.5b", keep=chosen_from),
        "published": by_bits("h200_published", "SmolLM2-135M-Instruct", published),
        "study_105m": by_bits("h200_accuracy", "study-105m", spoken_of),
        "rotation_outliers": by_bits("cpu_rotation", "pico-outliers", rotation),
        "front_study_105m_60s": front("h200_trellis", ""),
        "trellis_products": trellis_products(),
        "heads": heads(),
    }


def spoken_of(row: Row) -> bool:
    """Not what other quantizers of the same format beat, nor activations in int8 over rounding.

    Nor models that are lost.
    """
    kept = row["method"] not in ("clip", "smooth") and float(row["loss"]) < 1
    return kept and row["spec"] != "int4:group=128@int8"


def rotation(row: Row) -> bool:
    """What decides whether to rotate: int4 and liquid, calibrated or not."""
    spec = row["spec"].removeprefix("folded:").replace(",rotate=k", "").replace(":rotate=k", "")
    return "kn" not in spec and spec in ("bf16", "int4:group=128", "liquid@int8", "int8@int8")


def chosen_from(row: Row) -> bool:
    """What formats are chosen by, on the whole text; others are in the file."""
    return row["gpu"] != "CPU" and row["method"] != "hqq"


def published(row: Row) -> bool:
    """What the other model's rows do not show, of the newest text alone: gradients and refining."""
    more = "gradients" in row["method"] or (row["spec"] == "int8@int8" and row["method"] != "rtn")
    return row["tokens"] == "59957" and more and float(row["loss"]) < 1


def bits(row: Row) -> float:
    return float(row["bits"])


def by_bits(file: str, model: str = "", keep: Keep = lambda row: True) -> str:
    """Rows of a model, or of all, by bits and then loss."""
    rows = [row for row in read(file) if model in ("", row["model"]) and keep(row)]
    out = []
    for row in sorted(rows, key=lambda r: (-bits(r), r["spec"], -float(r["loss"]))):
        if row["method"] != "dense":
            scores = loss(row, rows), f"{float(row['kl']):.4f}", f"{float(row['agreement']):.1%}"
            cache = " KV cache" if row["method"] == "kv" else ""
            out.append([short(row["spec"]) + cache, label(row), f"{bits(row):.2f}", *scores])
    return markdown(["format", "quantizer", "bits", "loss, nats", "KL", "top-1"], out, words=2)


def best_of_each(rows: Iterable[Row]) -> list[Row]:
    """Of each format the row of least KL, by bits; weights alone, calibrated on code if at all."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: float(r["kl"])):
        weights = row["method"] != "dense" and "@" not in row["spec"]
        if weights and row["text"] in ("", "code"):
            best.setdefault(row["spec"], row)
    return sorted(best.values(), key=bits)


def is_trellis(row: Row) -> bool:
    return row["spec"].removeprefix("folded:").startswith("trellis")


def bits_at(kl: float, curve: Iterable[Row]) -> float | None:
    """Bits at which a curve has this KL, between its points linear in the KL's logarithm.

    Points of more bits and no less KL than another are not on the curve. None beyond its ends.
    """
    points: list[tuple[float, float]] = []
    for width, error in sorted((bits(r), float(r["kl"])) for r in curve):
        if not points or error < points[-1][1]:
            points.append((width, error))
    for (a, most), (b, least) in pairwise(points):
        if least <= kl <= most:
            return a + (b - a) * log(most / kl) / log(most / least)
    return None


def front(file: str, model: str) -> str:
    """Every format with GPTQ (codebooks: additive), and the bits of trellis codes at its KL."""
    rows = (row for row in read(file) if model in ("", row["model"]))
    best = best_of_each(row for row in rows if row["method"] == calibrated(row["spec"]))
    curve = [row for row in best if is_trellis(row)]
    out = []
    for row in best:
        equal = None if is_trellis(row) else bits_at(float(row["kl"]), curve)
        cells = ["", ""] if equal is None else [f"{equal:.2f}", f"{bits(row) - equal:+.2f}"]
        name = f"{short(row['spec'])}, {row['method']}"
        out.append([name, f"{bits(row):.2f}", f"{float(row['kl']):.5f}", loss(row), *cells])
    titles = ["format, quantizer", "bits", "KL", "loss, nats", "trellis bits at this KL", "saved"]
    return markdown(titles, out)


def calibrated(spec: str) -> str:
    """The quantizer by which formats are compared at equal calibration."""
    return "additive" if spec.startswith("codebook") else "gptq"


def short(spec: str) -> str:
    """A spec in a table: "int4 g128", "m1v4"."""
    spec = re.sub(r"codebook:m=(\d+),v=(\d+)(,b=8)?", r"m\1v\2", spec)
    spec = re.sub(r"^plan:", "planned ", spec)
    spec = re.sub(r"^folded:(.*)", r"\1 folded", spec)
    spec = re.sub(r"[:,]group=", " g", spec).replace(",zero", " zero")
    return re.sub(r"[:,]rotate=(\w+)", r" rotated \1", spec)


def label(row: Row) -> str:
    """The quantizer; its calibration data in brackets if it was not windows of code."""
    if row["method"] == "kv":
        return ""
    default = row["text"] in ("", "code", "mixed") and row["samples"] in ("0", "16", "32", "128")
    return row["method"].replace("-", "+") + ("" if default else f" ({row['text']})")


def trellis_products() -> str:
    """Microseconds of GEMMs as they are launched, one line for each weight and format."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in read("h200_trellis_products"):
        shown = (int(row["N"]), int(row["K"])) in (BIG, OUT) and "pair8" not in row["format"]
        if shown and row["how"] in ("cuBLAS", "as launched"):
            name = f"cuBLAS {row['format']}" if row["how"] == "cuBLAS" else f"`{row['format']}`"
            cell = found.setdefault((f"{row['N']}x{row['K']}", name), {})
            cell[int(row["M"])] = f"{float(row['us']):.1f}"
    counts = sorted({m for us in found.values() for m in us})
    out = [[*key, *(us.get(m, "") for m in counts)] for key, us in found.items()]
    return markdown(["weight", "us, M =", *map(str, counts)], out, words=2)


def changes(row: Row) -> str:
    """A loss of five digits, with its standard error."""
    return f"{round(float(row['loss']), 5) + 0.0:.5f} ± {float(row['loss_error']):.5f}"


def heads() -> str:
    out = [
        [
            row["model"],
            f"`{row['head']}`",
            changes(row),
            row["kl"],
            f"{float(row['agreement']):.2%}",
        ]
        for row in read("h200_heads")
    ]
    return markdown(["model", "head", "loss, nats", "KL", "top-1"], out, words=2)
