"""Tables of ours beside other packages' kernels, of one process for each weight."""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from results import FOUR, HALVES, OURS, Column, Row, cells, fastest, find, markdown, us

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import efficiency

INT8, FP8 = ("int8-given",), ("fp8-given",)
LEVEL = 0.97  # of another's speed; below it a cell counts as slower
FEW = 64  # tokens, up to which reading the weight counts most
OTHERS = {  # and their names in words
    "humming": "humming",
    "quack": "quack",
    "marlin": "Marlin",
    "machete": "Machete",
    "tinygemm": "tinygemm",
}


class Kind(NamedTuple):
    """What is compared: rows of ours, and the rows of others of which the fastest counts.

    beside: the others in words; "": the names of those that were measured.
    """

    name: str
    beside: str
    ours: Column
    others: tuple[Column, ...]


class Match(NamedTuple):
    """Ours and the fastest other in one cell.

    all: names of all others that were measured. ratio: the time of the fastest over ours. share:
    the larger floor, of reading and of multiplying, over our time.
    """

    kind: Kind
    shape: tuple[int, int]
    m: int
    other: str
    all: frozenset[str]
    ratio: float
    share: float


def kind(
    name: str,
    beside: str,
    ours: tuple[str, tuple[str, ...]],
    *others: tuple[str, str, tuple[str, ...]],
) -> Kind:
    """ours: a format and activations; others: a peer, a format and activations."""
    columns = tuple(("", peer, (fmt,), activations, "") for peer, fmt, activations in others)
    return Kind(name, beside, ("", OURS, (ours[0],), ours[1], ""), columns)


G64, FOLDED = "int4:group=64", f"{FOUR} folded"
W4A8 = ("humming", G64, INT8)
DENSE = (
    kind(
        "`int4:group=128`",
        "",
        (FOUR, HALVES),
        *((peer, FOUR, HALVES) for peer in OTHERS),
        ("tinygemm", f"{FOUR},zero", HALVES),
    ),
    kind("`fp6`", "", ("fp6", HALVES), ("humming", "fp6", HALVES)),
    kind("`liquid@int8`", "humming, int8, groups of 64", ("liquid", INT8), W4A8),
    kind(
        "`liquid@int8`",
        "any 4 bits with 8-bit activations",
        ("liquid", INT8),
        W4A8,
        *(("humming", FOUR, INT8), ("humming", FOUR, FP8)),
        *(("quack", FOUR, FP8), ("quack", FOLDED, FP8)),
    ),
    kind(
        "`liquid@int8`, tokens quantized too",
        "humming, the same",
        ("liquid", ("int8",)),
        ("humming", G64, ("int8",)),
    ),
)
MICRO = (
    kind("`mxfp4`", "", ("mxfp4", HALVES),
         *((peer, "mxfp4", HALVES) for peer in ("humming", "marlin"))),
    kind("`mxfp4@fp8`", "", ("mxfp4", FP8),
         *((peer, "mxfp4", FP8) for peer in ("humming", "marlin"))),
    kind("`nvfp4`", "", ("nvfp4", HALVES),
         *((peer, "nvfp4", HALVES) for peer in ("humming", "marlin"))),
    kind("`fp8:group=128@fp8`", "", ("fp8:group=128", FP8),
         ("humming", "fp8:group=128", FP8)),
    kind("`int4:group=128@int8`", "", (FOUR, INT8), ("humming", FOUR, INT8)),
)  # fmt: skip
EXPERTS = (
    kind("`liquid@int8`", "humming, int8, groups of 64", ("liquid", INT8), W4A8),
    kind("`int4:group=64`", "", (G64, HALVES), ("humming", G64, HALVES)),
    kind("`fp6`", "", ("fp6", HALVES), ("humming", "fp6", HALVES)),
    *(
        each._replace(others=tuple(c for c in each.others if c[1] == "humming"))
        for each in MICRO[:-1]
    ),
)
MODELS = {  # of an expert: gate and up together, and down
    "Mixtral-8x7B": ((28672, 4096), (4096, 14336)),
    "Qwen3-30B-A3B": ((1536, 2048), (2048, 768)),
    "DeepSeek-V3": ((4096, 7168), (7168, 2048)),
    "GPT-OSS-20B": ((5760, 2880), (2880, 2880)),
}


def tables() -> dict[str, str]:
    dense = [*matches(DENSE, "h200_peers"), *matches(MICRO, "h200_micro")]
    experts = matches(EXPERTS, "h200_expert_peers")
    return {
        "peers_short": few_and_many(dense),
        "peers": means(dense),
        "peers_worst": worst(dense),
        "peers_ratios": ratios(dense),
        "expert_models": expert_models(),
        "expert_peers": means(experts),
        "expert_floors": floors(experts),
        "expert_worst": worst(experts, expert),
        "expert_ratios": ratios(experts, expert),
    }


def matches(kinds: Sequence[Kind], *files: str) -> list[Match]:
    """Every cell in which both were measured, by kind, weight and tokens."""
    out = []
    for each in kinds:
        for (n, k, m), rows in sorted(cells(*files).items()):
            mine, other = find(rows, each.ours), fastest(rows, each.others)
            if mine and other:
                every = frozenset(column[1] for column in each.others if find(rows, column))
                ratio = float(other["us"]) / float(mine["us"])
                share = floor_share(mine)
                out.append(Match(each, (n, k), m, other["peer"], every, ratio, share))
    return out


def floor_share(row: Row) -> float:
    """The larger floor over the time of a row; 0 where reading was not timed."""
    peak = efficiency.PEAK.get(row["activation"].removesuffix("-given"), efficiency.PEAK["fp16"])
    reading = 1 / float(row["vs_floor"]) if row["vs_floor"] else 0.0
    return max(reading, float(row["tflops"]) / peak)


def by_kind(found: Sequence[Match]) -> dict[Kind, list[Match]]:
    out: dict[Kind, list[Match]] = defaultdict(list)
    for match in found:
        out[match.kind].append(match)
    return out


def beside(found: Sequence[Match]) -> str:
    """The others of a kind in words."""
    every = {name for match in found for name in match.all}
    return found[0].kind.beside or ", ".join(OTHERS[name] for name in OTHERS if name in every)


def mean(found: Sequence[Match]) -> str:
    return f"{geometric_mean(match.ratio for match in found):.2f}x" if found else ""


def behind(found: Sequence[Match]) -> str:
    return f"{sum(match.ratio < LEVEL for match in found)} of {len(found)}"


def few_and_many(found: Sequence[Match]) -> str:
    """Geometric means of few tokens, many and all."""
    lines = []
    for each, mine in by_kind(found).items():
        few = [match for match in mine if match.m <= FEW]
        many = [match for match in mine if match.m > FEW]
        lines.append([each.name, beside(mine), mean(few), mean(many), mean(mine), behind(mine)])
    titles = ["", "beside", f"up to {FEW} tokens", "more", "all", "slower cells"]
    return markdown(titles, lines, words=2)


def means(found: Sequence[Match]) -> str:
    """Geometric means over all weights, by tokens."""
    counts = sorted({match.m for match in found})
    lines = []
    for each, mine in by_kind(found).items():
        cells = [mean([match for match in mine if match.m == m]) for m in counts]
        lines.append([each.name, beside(mine), *cells, f"**{mean(mine)}**", behind(mine)])
    titles = ["", "beside", *(f"M={m}" for m in counts), "all", "slower"]
    return markdown(titles, lines, words=2)


def floors(found: Sequence[Match]) -> str:
    """How near both come to the larger floor, and how far apart they could be at it, by tokens."""
    counts = sorted({match.m for match in found})
    lines = []
    for each, mine in by_kind(found).items():
        parts: dict[str, Callable[[Match], float]] = {
            "ours": lambda match: match.share,
            "the other": lambda match: match.share / match.ratio,
            "at the floor": lambda match: match.ratio / match.share,
        }
        title = each.name
        for name, value in parts.items():
            line = []
            for some in (*([x for x in mine if x.m == m] for m in counts), mine):
                mean_ = geometric_mean(map(value, some)) if some else 0.0
                shown = f"{mean_:.2f}x" if name == "at the floor" else f"{mean_:.0%}"
                line.append(shown if some else "")
            lines.append([title, name, *line])
            title = ""
    return markdown(["", "", *(f"M={m}" for m in counts), "all"], lines, words=2)


def weight(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def expert(shape: tuple[int, int]) -> str:
    """An expert's weight, with the model."""
    return next((f"{m} " for m, parts in MODELS.items() if shape in parts), "") + weight(shape)


def worst(found: Sequence[Match], name: Callable[[tuple[int, int]], str] = weight) -> str:
    """Cells in which the other is faster by more than 3 %: its time over ours, by weight."""
    lines = []
    for each, mine in by_kind(found).items():
        slower = [match for match in mine if match.ratio < LEVEL]
        if not slower:
            continue
        low = min(slower, key=lambda match: match.ratio)
        lines.append(
            f"- {each.name} beside {beside(mine)}: the worst is {low.ratio:.2f} "
            f"({name(low.shape)}, M={low.m}, {low.other})."
        )
        for shape in dict.fromkeys(match.shape for match in slower):
            here = [match for match in slower if match.shape == shape]
            parts = ", ".join(f"M={x.m} {x.ratio:.2f} ({x.other})" for x in here)
            lines.append(f"    - {name(shape)}: {parts}")
    if found and not lines:
        return "None."
    return "\n".join(lines)


def ratios(found: Sequence[Match], name: Callable[[tuple[int, int]], str] = weight) -> str:
    """Every cell: the fastest other's time over ours, and its name where there is a choice."""
    counts = sorted({match.m for match in found})
    lines = []
    for each, mine in by_kind(found).items():
        named = len({name for match in mine for name in match.all}) > 1
        title = f"{each.name}, {beside(mine)}"
        for shape in dict.fromkeys(match.shape for match in mine):
            here = {match.m: match for match in mine if match.shape == shape}
            line = [cell(here.get(m), named) for m in counts]
            lines.append([title, name(shape), *line])
            title = ""
    return markdown(["", "weight", *(f"M={m}" for m in counts)], lines, words=2)


def cell(match: Match | None, named: bool) -> str:
    if match is None:
        return ""
    return f"{match.ratio:.2f}" + (f" {match.other}" if named else "")


def expert_models() -> str:
    """Experts of models, all at once: times, and how many times those of reading."""
    found = cells("h200_expert_peers")
    counts = sorted({m for _, _, m in found})
    out = []
    for model, shapes in MODELS.items():
        for n, k in shapes:
            for fmt in ("liquid", "int4:group=64", "fp6"):
                row = [model, f"{n}x{k}", "liquid@int8" if fmt == "liquid" else fmt]
                for m in counts:
                    here = [r for r in found[n, k, m] if r["format"] == fmt and r["peer"] == OURS]
                    floor = f" ({float(here[0]['vs_floor']):.1f}x)" if here else ""
                    row.append(us(here[0] if here else None) + floor)
                out.append(row)
    return markdown(["model", "expert", "format", *map(str, counts)], out, words=3)
