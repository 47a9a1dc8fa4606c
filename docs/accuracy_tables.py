"""Tables of docs/accuracy.md."""

import re

from results import Row, loss, markdown, read

# Name in the page: CSV, model.
MODELS = {
    "study_105m": ("h200_accuracy", "study-105m"),
    "study_105m_earlier": ("h200_accuracy", "study-105m-earlier"),
    "pico": ("h200_accuracy", "pico"),
    "pico_cpu": ("cpu_accuracy", "pico"),
    "rotation_outliers": ("cpu_rotation", "pico-outliers"),
    "rotation_pico": ("cpu_rotation", "pico"),
}


def made() -> dict[str, str]:
    scores = {name: table(*source) for name, source in MODELS.items()}
    return scores | {"layer_time": layer_time()}


def table(file: str, model: str) -> str:
    """All rows of a model, by bits and then loss."""
    rows = [row for row in read(file) if row["model"] == model]
    order = sorted(rows, key=lambda r: (-float(r["bits"]), r["spec"], -float(r["loss"])))
    parsed = bool(rows and rows[0]["parse_rate"])
    out = []
    for row in order:
        dense = row["method"] == "dense"
        scores = [loss(row), f"{float(row['kl']):.4f}", f"{float(row['agreement']):.1%}"]
        line = [short(row["spec"]), "" if dense else label(row), f"{float(row['bits']):.2f}"]
        line += [f"{float(row['perplexity']):.3f}", *([""] * 3 if dense else scores)]
        out.append(line + ([f"{float(row['parse_rate']):.0%}"] if parsed else []))
    titles = ["format", "quantizer", "bits", "perplexity", "loss, nats", "KL", "top-1"]
    return markdown([*titles, *["parses"] * parsed], out, words=2)


def short(spec: str) -> str:
    spec = re.sub(r"codebook:m=(\d+),v=(\d+)(,b=8)?", r"m\1v\2", spec)
    spec = re.sub(r"^plan:", "planned ", spec)
    spec = re.sub(r"[:,]group=", " g", spec).replace(",zero", " zero")
    return re.sub(r"[:,]rotate=(\w+)", r" rotated \1", spec)


def label(row: Row) -> str:
    """The quantizer; its calibration data in brackets if it was not 128 windows of code."""
    default = row["text"] in ("", "code") and row["samples"] in ("0", "32", "128")
    return row["method"] + ("" if default else f" ({row['text']}, {row['samples']})")


def layer_time() -> str:
    rows = read("h200_layer_time")
    out = [[r["quantizer"], short(r["format"]), f"{float(r['seconds']):.3f}"] for r in rows]
    return markdown(["quantizer", "format", "seconds"], out, words=2)
