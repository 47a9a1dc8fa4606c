"""Tables of products on CPUs: docs/benchmarks.md."""

from collections import defaultdict

from results import Row, markdown, read

MEASURED = "cpu_kernels"  # the CSV
TOKENS = ("1", "4", "16", "128", "512")
SHAPE = ("4096", "4096")
SHOWN = ("bf16", "int8", "int4", "int4:group=128", "fp8", "fp6", "int8@int8", "int4@int8")
SHOWN += ("liquid@int8",)


def tables() -> dict[str, str]:
    return {"cpu": speeds("avx512_bf16"), "cpu_about": about()}


def about() -> str:
    """What was measured on, and when."""
    rows = read(MEASURED)
    if not rows:
        return ""
    row = rows[0]
    return f"{row['cpu']}, {row['threads']} threads, {row['date']}, {row['versions']}."


def speeds(isa: str) -> str:
    """How many times as fast as bf16, by shape, format and tokens; and the share of the floor."""
    found: dict[tuple[str, str, str], dict[str, Row]] = defaultdict(dict)
    for row in read(MEASURED):
        if row["isa"] == isa and (row["N"], row["K"]) == SHAPE and row["format"] in SHOWN:
            found[row["N"], row["K"], row["format"]][row["M"]] = row
    shown = [m for m in TOKENS if any(m in rows for rows in found.values())]
    lines = []
    for (*_, name), rows in found.items():
        one = rows.get("1")
        cells = [f"{float(one['vs_floor']):.2f}" if one else ""]
        for m in shown:
            row = rows.get(m)
            ratio = f"{float(row['us']):,.0f} us" if row and name == "bf16" else ""
            cells.append(ratio or (f"{float(row['vs_bf16']):.2f}" if row else ""))
        lines.append([f"`{name}`", *cells])
    return markdown(["format", "of the bandwidth, M=1", *(f"M={m}" for m in shown)], lines)
