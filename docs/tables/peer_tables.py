"""Tables of ours beside other packages' kernels, of one process for each weight."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from results import BIG, CUBLAS, FOUR, HALVES, OURS, Column, cells, fastest, find, markdown, us

INT8, FP8 = ("int8-given",), ("fp8-given",)
LEVEL = 0.97  # of another's speed; below it a cell counts as slower
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

    all: names of all others that were measured. ratio: the time of the fastest over ours.
    """

    kind: Kind
    shape: tuple[int, int]
    m: int
    other: str
    all: frozenset[str]
    ratio: float


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
        "peer_times": times(),
        "peers": means(dense),
        "peers_worst": worst(dense),
        "expert_peers": means(experts),
        "expert_worst": worst(experts, expert),
    }


def times() -> str:
    """Microseconds of ours, the fastest other and cuBLAS for the largest weight of Llama-3-8B."""
    found = cells("h200_peers")
    counts = sorted({m for n, k, m in found if (n, k) == BIG})
    out = []
    for each in (DENSE[0], DENSE[1], DENSE[3]):
        rows = [
            (find(found[*BIG, m], each.ours), fastest(found[*BIG, m], each.others)) for m in counts
        ]
        if not all(mine for mine, _ in rows):
            continue
        out.append([each.name, *(us(mine) for mine, _ in rows)])
        others = [f"{us(row)} {OTHERS[row['peer']]}" if row else "" for _, row in rows]
        out.append(["its fastest other", *others])
    dense = [find(found[*BIG, m], CUBLAS) for m in counts]
    out.append(["cuBLAS, 16 bits", *map(us, dense)])
    return markdown(["", *(f"M={m}" for m in counts)], out if any(dense) else [])


def matches(kinds: Sequence[Kind], *files: str) -> list[Match]:
    """Every cell in which both were measured, by kind, weight and tokens."""
    out = []
    for each in kinds:
        for (n, k, m), rows in sorted(cells(*files).items()):
            mine, other = find(rows, each.ours), fastest(rows, each.others)
            if mine and other:
                every = frozenset(column[1] for column in each.others if find(rows, column))
                ratio = float(other["us"]) / float(mine["us"])
                out.append(Match(each, (n, k), m, other["peer"], every, ratio))
    return out


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


def means(found: Sequence[Match]) -> str:
    """Geometric means over all weights, by tokens."""
    counts = sorted({match.m for match in found})
    lines = []
    for each, mine in by_kind(found).items():
        cells = [mean([match for match in mine if match.m == m]) for m in counts]
        lines.append([each.name, beside(mine), *cells, f"**{mean(mine)}**", behind(mine)])
    titles = ["", "beside", *(f"M={m}" for m in counts), "all", "slower"]
    return markdown(titles, lines, words=2)


def weight(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def expert(shape: tuple[int, int]) -> str:
    """An expert's weight, with the model."""
    return next((f"{m} " for m, parts in MODELS.items() if shape in parts), "") + weight(shape)


def worst(found: Sequence[Match], name: Callable[[tuple[int, int]], str] = weight) -> str:
    """Cells in which the other is faster by more than 3 %: how many, and the worst of each kind."""
    lines = []
    for mine in by_kind(found).values():
        if slower := [match for match in mine if match.ratio < LEVEL]:
            low = min(slower, key=lambda match: match.ratio)
            lines.append(
                f"- {low.kind.name} beside {beside(mine)}: slower in {len(slower)} of {len(mine)} "
                f"results, at worst {low.ratio:.2f} times as fast ({name(low.shape)}, M={low.m}, "
                f"{OTHERS[low.other]})."
            )
    if found and not lines:
        return "None."
    return "\n".join(lines)
