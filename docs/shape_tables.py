"""Tables of the weights of many models, and of one process with other packages' kernels."""

import sys
from pathlib import Path
from statistics import geometric_mean

from results import CUBLAS, FOUR, HALVES, OURS, RESULTS, Column, Row, cells, fastest, find, markdown

from anybit.measure import bench

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import efficiency
import weights_of_models

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
INT8 = ("int8-given",)
# Title, ours, and the kernels of as many bits that the fastest is taken from.
KINDS: tuple[tuple[Column, tuple[Column, ...]], ...] = (
    (
        ("int4 g128", OURS, (FOUR,), HALVES, ""),
        (
            *(
                ("", peer, (FOUR,), HALVES, "")
                for peer in ("humming", "quack", "marlin", "machete")
            ),
            ("", "tinygemm", (f"{FOUR},zero",), HALVES, ""),
        ),
    ),
    (("fp6", OURS, ("fp6",), HALVES, ""), (("", "humming", ("fp6",), HALVES, ""),)),
    (
        ("liquid@int8", OURS, ("liquid",), INT8, ""),
        (("", "humming", ("int4:group=64",), INT8, ""),),
    ),
)


def made() -> dict[str, str]:
    path = RESULTS / "h200_shapes.csv"
    rows = bench.read_csv(path) if path.exists() else []
    found = efficiency.cells(rows)
    counted = sorted({cell.m for cell in found})
    some = [m for m in TOKENS if m in counted]
    return {
        "one_process": one_process(),
        "expert_peers": expert_peers(),
        "shapes_about": about(rows, found),
        "shapes": markdown(*efficiency.table(found, some)),
        "shapes_slower": markdown(*efficiency.slower_by_tokens(found, counted)),
        "shapes_worst": "\n".join(f"- {text}." for text in efficiency.worst(found)),
        "shapes_maps": "\n".join(
            f"![{scheme}: floor over time](img/{efficiency.picture(scheme)})"
            for scheme in sorted({cell.scheme for cell in found if not cell.quantizes})
        ),
    }


def about(rows: list[bench.Row], found: list[efficiency.Cell]) -> str:
    """What was measured, and how far times of a repeat differ."""
    if not rows:
        return ""
    shapes = {cell.shape for cell in found}
    models = [m for m, parts in weights_of_models.MODELS.items() if shapes & {*parts.values()}]
    text = (
        f"{len(shapes)} weights of {len(models)} models ({', '.join(models)}), {len(found)} "
        f"products of ours, {rows[0].gpu}, {max(row.date for row in rows)}. "
    )
    return (text + efficiency.spread(rows)).strip()


def one_process() -> str:
    """Ours and the fastest other kernel of as many bits, by weight and tokens."""
    lines, ratios = [], [[] for _ in KINDS]
    for (n, k, m), rows in sorted(cells("h200_peers").items()):
        line = [f"{n}x{k}", str(m), text(find(rows, CUBLAS))]
        for (ours, others), kept in zip(KINDS, ratios, strict=True):
            mine, other = find(rows, ours), fastest(rows, others)
            ratio = float(other["us"]) / float(mine["us"]) if mine and other else None
            if ratio:
                kept.append(ratio)
            named = f"{text(other)} {other['peer']}" if other else ""
            line += [text(mine), named, f"{ratio:.2f}x" if ratio else ""]
        lines.append(line)
    if not lines:
        return ""
    means = [["", "", f"**{geometric_mean(kept):.2f}x**" if kept else ""] for kept in ratios]
    lines.append(["geometric mean", "", "", *(cell for mean in means for cell in mean)])
    titles = ["weight", "M", "cuBLAS"]
    return markdown(
        [*titles, *(t for ours, _ in KINDS for t in (ours[0], "fastest other", ""))], lines
    )


# A format of ours, and humming's with activations: its experts.
EXPERTS = (
    ("liquid@int8", ("liquid", INT8), ("int4:group=64", INT8)),
    ("int4:group=64", ("int4:group=64", HALVES), ("int4:group=64", HALVES)),
    ("int4:group=128", (FOUR, HALVES), (FOUR, HALVES)),
)


def expert_peers() -> str:
    """Humming's experts, the faster of its two ways, over ours of the same process."""
    found = cells("h200_experts", "h200_expert_peers")
    counts = sorted({m for _, _, m in found})
    lines, ratios = [], []
    for n, k in dict.fromkeys((n, k) for n, k, _ in found):
        for name, ours, theirs in EXPERTS:
            line = []
            for m in counts:
                rows = found.get((n, k, m), [])
                mine = find(rows, ("", OURS, (ours[0],), ours[1], ""))
                other = find(rows, ("", "humming", (theirs[0],), theirs[1], ""))
                ratio = float(other["us"]) / float(mine["us"]) if mine and other else None
                ratios += [ratio] if ratio else []
                line.append(f"{ratio:.2f}x" if ratio else "")
            if any(line):
                lines.append([f"{n}x{k}", name, *line])
    if not ratios:
        return ""
    mean = [f"geometric mean {geometric_mean(ratios):.2f}x", "", *[""] * len(counts)]
    return markdown(["expert", "format", *map(str, counts)], [*lines, mean], words=2)


def text(row: Row | None) -> str:
    return f"{float(row['us']):.1f}" if row else ""
