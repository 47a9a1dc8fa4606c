"""Tables of the weights of many models."""

import sys
from pathlib import Path

from results import file_of, markdown

from anybit.measure import bench

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import efficiency
import weights_of_models

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


def tables() -> dict[str, str]:
    path = file_of("h200_shapes")
    rows = bench.read_csv(path) if path.exists() else []
    found = efficiency.cells(rows)
    counted = sorted({cell.m for cell in found})
    return {
        "shapes_about": about(rows, found),
        "shapes": means(found, [m for m in TOKENS if m in counted]),
    }


def means(found: list[efficiency.Cell], tokens: list[int]) -> str:
    """Geometric means of the speed over cuBLAS, and the cells that are slower than it."""
    titles, rows = efficiency.table(found, tokens)
    return markdown(titles, rows)


def about(rows: list[bench.Row], found: list[efficiency.Cell]) -> str:
    """What was measured, and how far times of a repeat differ."""
    if not rows:
        return ""
    shapes, tokens = {cell.shape for cell in found}, {cell.m for cell in found}
    every = weights_of_models.weights()
    left = ", ".join(f"{n}x{k}" for n, k in every if (n, k) not in shapes)
    models = [m for m, parts in weights_of_models.MODELS.items() if shapes & {*parts.values()}]
    text = (
        f"{len(shapes)} of {len(every)} weights of {len(models)} models ({', '.join(models)}), "
        f"with {len(tokens)} token counts each, {len(found)} GEMMs of ours, "
        f"{rows[0].gpu}, {max(row.date for row in rows)}. "
    )
    text += f"Not measured: {left}. " if left else ""
    return (text + efficiency.spread(rows)).strip()
