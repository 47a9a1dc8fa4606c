"""Tables of single matrix products: docs/benchmarks.md and the papers' pages."""

from collections.abc import Iterable

from results import (
    BIG,
    CUBLAS,
    DOWN,
    FOUR,
    HALVES,
    M1V4,
    M2V8,
    OURS,
    OUT,
    QKV,
    Cell,
    Column,
    cells,
    fastest,
    find,
    loss,
    markdown,
    number,
    read,
    score,
    us,
)

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
LEVEL = 0.03  # a smaller difference counts as equal
INT8, FP8 = ("int8-given",), ("fp8-given",)


def ours(title: str, spec: str, activation: tuple[str, ...] = HALVES) -> Column:
    return (title, OURS, (spec,), activation, "")


def other(peer: str, spec: str, activation: tuple[str, ...] = HALVES, title: str = "") -> Column:
    return (title or peer, peer, (spec,), activation, "")


def triton(spec: str, title: str = "Triton", activation: tuple[str, ...] = HALVES) -> Column:
    return other("anybit-triton", spec, activation, title)


def weight_only(spec: str, *peers: Column) -> list[Column]:
    return [ours("Hopper", spec), triton(spec), *peers, CUBLAS]


CUBLAS_FP8 = other("cublas", "fp8 tensorwise", FP8, "cuBLAS fp8")
FOUR_BITS = [
    other("humming", "int4:group=64", INT8, "humming int4 g64 int8"),
    other("humming", FOUR, FP8, "humming int4 g128 fp8"),
    other("quack", FOUR, FP8, "quack int4 g128 fp8"),
    other("quack", f"{FOUR} folded", FP8, "quack folded fp8"),
]
TABLES: list[tuple[str, list[Column]]] = [
    (
        "int4, groups of 128",
        weight_only(
            FOUR,
            other("humming", FOUR),
            other("quack", FOUR),
            other("gemlite", FOUR),
            other("tinygemm", f"{FOUR},zero"),
        ),
    ),
    ("fp6", weight_only("fp6", other("humming", "fp6"))),
    ("fp5", weight_only("fp5", other("humming", "fp5"))),
    ("int8, 16-bit activations", weight_only("int8", other("humming", "int8"))),
    ("int3, groups of 128", weight_only("int3:group=128", other("humming", "int3:group=128"))),
    ("int2, groups of 128", weight_only("int2:group=128", other("humming", "int2:group=128"))),
    (
        "4-bit weights, 8-bit activations",
        [ours("Hopper liquid", "liquid", INT8), *FOUR_BITS,
         CUBLAS_FP8, CUBLAS],
    ),
    (
        "4-bit weights, activations quantized in the timed region",
        [ours("Hopper liquid", "liquid", ("int8",)), triton("liquid", "Triton liquid", ("int8",)),
         other("humming", "int4:group=64", ("int8",), "humming int4 g64"), CUBLAS],
    ),
    (
        "8-bit weights, 8-bit activations",
        [ours("Hopper int8", "int8", INT8), other("humming", "int8", INT8),
         ("cuBLAS int8", "cublas", ("int8", "int8(_int_mm)"), INT8, ""), CUBLAS_FP8, CUBLAS],
    ),
]  # fmt: skip
ALONE: list[tuple[str, list[Column]]] = [  # no other package has the same bits
    (
        "sparse, and nf4",
        [ours("Hopper sparse", "sparse"), triton("sparse", "Triton sparse"),
         other("bitsandbytes", "nf4:group=64", title="bitsandbytes nf4 g64"), CUBLAS],
    ),
    (
        "Other formats, 8-bit activations",
        [ours("sparse@int8", "sparse", INT8), ours("int4@fp8", "int4", FP8),
         ours("fp6@fp8", "fp6", FP8), CUBLAS_FP8, CUBLAS],
    ),
    (
        "2-bit codebooks, groups of 128",
        [ours("Hopper m1v4", M1V4), ours("Hopper m2v8", M2V8), triton(M1V4, "Triton m1v4"),
         triton(M2V8, "Triton m2v8"), CUBLAS],
    ),
]  # fmt: skip


def tables() -> dict[str, str]:
    one, many = (1, 64, 256, 1024), (1, 16, 64)
    return {
        "gemm_about": about(),
        "summary": summary(),
        "losses": losses(),
        "kernels": "\n\n".join(kernel(*table) for table in (*TABLES, *ALONE)),
        "formats": formats(),
        "liquid": liquid(),
        "experts": experts(),
        "fp6": times(
            [ours("anybit", "fp6"), other("humming", "fp6"), CUBLAS],
            [(*shape, m) for shape in (BIG, DOWN, OUT) for m in one],
            ratio=True,
        ),
        "gemlite": times(
            [ours("Hopper", FOUR), triton(FOUR), other("gemlite", FOUR), CUBLAS],
            [*((*BIG, m) for m in many), (*OUT, 1)],
        ),
        "sparse": times(
            [ours("sparse", "sparse"), ours("sparse@int8", "sparse", INT8),
             triton("sparse", "Triton sparse"), CUBLAS],
            [*((*BIG, m) for m in (*many, 256)), (*OUT, 1)],
        ),
    }  # fmt: skip


def times(
    columns: list[Column],
    wanted: Iterable[Cell],
    *files: str,
    ratio: bool = False,
    floor: bool = False,
) -> str:
    """Microseconds; with the first column's speed over cuBLAS, or its time over the read floor."""
    titles = ["weight", "M", *(column[0] for column in columns)]
    titles += [f"{columns[0][0]} / cuBLAS fp16 of its process"] * ratio
    titles += [f"{columns[0][0]} / read floor"] * floor
    out = []
    for n, k, m in wanted:
        found = [find(cells(*files)[n, k, m], column) for column in columns]
        if found[0] is not None:
            row = [f"{n}x{k}", str(m), *map(us, found)]
            row += [f"{float(found[0]['vs_cublas_fp16']):.2f}x"] * ratio
            row += [f"{float(found[0]['vs_floor'] or 'nan'):.2f}"] * floor
            out.append(row)
    return markdown(titles, out)


# docs/benchmarks.md.


def about() -> str:
    """Where and when h200_gemm was measured; a warning if that was in several processes."""
    rows = [row for row in read("h200_gemm") if row["N"]]
    if not rows:
        return ""
    weights = {(row["N"], row["K"]) for row in rows}
    text = f"{len(weights)} weights, {rows[0]['gpu']}, {max(row['date'] for row in rows)}"
    commits = {row["peer"]: row["commit"] for row in rows}
    if len(set(commits.values())) == 1:
        return f"{text}: all kernels of a weight in one process."
    ours, dense = ([r for r in rows if r["peer"] == peer] for peer in (OURS, "cublas"))
    times = {(r["N"], r["K"], r["M"]): float(r["us"]) for r in dense if r["format"] == "fp16"}
    other = [
        float(r["us"]) * float(r["vs_cublas_fp16"]) / time
        for r in ours
        if r["vs_cublas_fp16"] and (time := times.get((r["N"], r["K"], r["M"])))
    ]
    return (
        f"{text}. The Hopper rows come from another process and another chip of the same type than "
        f"all others: its dense layer took {min(other):.2f} to {max(other):.2f} times as long. "
        f"Both have their commit in the CSV."
    )


def kernel(title: str, columns: list[Column]) -> str:
    """All shapes and batch sizes of one table."""
    out = []
    for n, k in (BIG, DOWN, QKV, OUT):
        for m in TOKENS:
            name = f"{n}x{k}" if m == TOKENS[0] else ""
            out.append([name, str(m), *(us(find(cells()[n, k, m], c)) for c in columns)])
    return f"### {title}\n\n" + markdown(["weight", "M", *(c[0] for c in columns)], out)


def summary() -> str:
    """The largest weight: us, and the fastest other package with the same bits."""
    chosen = [
        ("int4 g128", *TABLES[0]),
        ("fp6", *TABLES[1]),
        ("4-bit weights, 8-bit activations", *TABLES[6]),
        ("8-bit weights, 8-bit activations", *TABLES[8]),
    ]
    out = []
    for name, _, columns in chosen:
        mine = columns[0]
        peers = [c for c in columns if not c[1].startswith(("anybit", "cublas"))]
        for who, options in ((mine[0], [mine]), ("best other package", peers)):
            found = [fastest(cells()[*BIG, m], options) for m in TOKENS]
            words = [us(row) + (f" {row['peer']}" if row and options is peers else "")
                     for row in found]  # fmt: skip
            out.append([name if options is not peers else "", who, *words])
    for name, column in (("fp8", CUBLAS_FP8), ("16 bits", CUBLAS)):
        out.append([name, "cuBLAS", *(us(find(cells()[*BIG, m], column)) for m in TOKENS)])
    return markdown(["", "kernel", *(f"M={m}" for m in TOKENS)], out, words=2)


def losses() -> str:
    """For every table with peers: cells won, level and lost; then what was lost to whom.

    Ours is the kernel that a layer runs: Hopper's if it was timed, else Triton's.
    """
    counts, lost = [], []
    for title, columns in TABLES:
        mine = [c for c in columns if c[1].startswith("anybit")]
        theirs = [c for c in columns if not c[1].startswith("anybit")]
        won = level = 0
        where: list[str] = []
        for n, k in (BIG, DOWN, QKV, OUT):
            here = []
            for m in TOKENS:
                rows = cells()[n, k, m]
                own = find(rows, mine[0]) or find(rows, mine[-1])
                best = fastest(rows, theirs)
                if own is None or best is None:
                    continue
                ratio = float(own["us"]) / float(best["us"])
                won += ratio < 1 - LEVEL
                level += 1 - LEVEL <= ratio <= 1 + LEVEL
                if ratio > 1 + LEVEL:
                    here.append(f"M={m} {ratio:.2f} ({best['peer']})")
            where += [f"    - {n}x{k}: {', '.join(here)}"] * bool(here)
        slower = sum(line.count("M=") for line in where)
        counts.append([title, *map(str, (won + level + slower, won, level, slower))])
        lost += [f"- {title}", *where] * bool(where)
    table = markdown(["", "cells", "anybit faster", "level", "anybit slower"], counts)
    return "\n".join([table, "", "Where anybit is slower: our time over theirs.", "", *lost])


# docs/formats.md.

CHOICES = [  # goal, what to use, spec, quantizer
    ("no measurable loss", "`fp6`, GPTQ", "fp6", "gptq"),
    ("little loss without calibration data", "`fp6`", "fp6", "rtn"),
    ("4 bits", f"`{FOUR}`, GPTQ", FOUR, "gptq"),
    ("4 bits, large batches", "`liquid@int8`, smooth+gptq", "liquid@int8", "smooth+gptq"),
    ("3 bits", "`int3:group=128`, GPTQ", "int3:group=128", "gptq"),
    ("2 bits", "`codebook:m=2,v=8,group=128`, additive", M2V8, "additive"),
]


def formats() -> str:
    titles = ["goal", "use", "bits", "loss, study-105m", "loss, pico", "M=1, us", "M=64, us"]
    out = [["bf16", "", "16", "0", "0", *(us(find(cells()[*BIG, m], CUBLAS)) for m in (1, 64))]]
    for goal, name, spec, method in CHOICES:
        fmt, _, activation = spec.partition("@")
        column = ours("", fmt, (f"{activation}-given",) if activation else HALVES)
        found = [
            find(cells()[*BIG, m], column) or find(cells("h200_codebook")[*BIG, m], column)
            for m in (1, 64)
        ]
        rows = [score(spec, method, model) for model in ("study-105m", "pico")]
        bits = f"{float(rows[0]['bits']):.1f}" if rows[0] else ""
        out.append([goal, name, bits, *map(loss, rows), *map(us, found)])
    return markdown(titles, out, words=2)


# The papers' pages.


def liquid() -> str:
    columns = [ours("liquid@int8", "liquid", INT8), ours("int8@int8", "int8", INT8), CUBLAS_FP8]
    titles = ["weight", "M", *(c[0] for c in columns), "best other with 4 bits", "cuBLAS 16 bits"]
    out = []
    for n, k, m in [*((*BIG, m) for m in (1, 64, 256, 1024)), (*QKV, 256)]:
        here = cells()[n, k, m]
        best, name = fastest(here, FOUR_BITS), ""
        if best:
            name = f" {best['peer']}" + (", folded" if "folded" in best["format"] else "")
        row = [us(find(here, column)) for column in columns]
        out.append([f"{n}x{k}", str(m), *row, us(best) + name, us(find(here, CUBLAS))])
    return markdown(titles, out)


def experts() -> str:
    """8 experts, 2 a token: ours and the faster of humming's two ways."""
    columns: list[Column] = [
        ("liquid@int8", OURS, ("liquid",), INT8, ""),
        other("humming", "int4:group=64", INT8, "humming int4 g64, int8 activations"),
        ("int8@int8", OURS, ("int8",), INT8, ""),
        ("int4 g128", OURS, (FOUR,), HALVES, ""),
        other("humming", FOUR, title="humming int4 g128"),
        ("fp6", OURS, ("fp6",), HALVES, ""),
        other("torch", "bf16", title="torch bf16"),
    ]
    out = []
    for (_, _, m), rows in sorted(cells("h200_experts").items()):
        found = [find(rows, column) for column in columns]
        speed = ""
        if found[0] and found[1]:
            speed = f"{float(found[1]['us']) / float(found[0]['us']):.2f}x"
        out.append([number(m).removesuffix(".0"), *map(us, found), speed])
    titles = ["tokens", *(column[0] for column in columns), "liquid@int8 / humming"]
    return markdown(titles, out, words=0)
