"""What CodeGEMM claims."""

from claims import BIG, OUT, Claim, best, found, layers, lost, measured, one, span
from codebook_tables import CONTESTANTS, DECODED, NAMED, Column, block, chosen
from results import M1V4, M2V8, Missing

from anybit import get_format

CSV = "h200_codebook.csv: "
TABLE1 = {(4, 1, 8, 0), (16, 3, 8, 32)}
QTIP = "h200_trellis_products.csv: N=28672; K=4096; M=1; format=trellis"
SHARE = "h200_codebook_share.csv: CTAs=one; format="
POWER = "h200_codebook_power.csv: "
LOSS = "h200_accuracy.csv: samples=0/128; text=/code; model="
ENGINE = "h200_codebook_engine.csv: batch=1; "
AS_STORED, M1V4_STORED = "codebook:m=2,v=8,b=8,group=128", "codebook:m=1,v=4,b=8,group=128"
FINE = [f"codebook:m=1,v=4{g}" for g in (",group=4", ",group=8", ",group=16", ",group=128", "")]
SQUARE = 8192, 8192
CALIBRATED = [  # formats of figure 4b
    ("m1v4 g16", "codebook:m=1,v=4,b=8,group=16"),
    ("g128", M1V4_STORED),
    ("a row", "codebook:m=1,v=4,b=8"),
    ("m2v8 g16", "codebook:m=2,v=8,b=8,group=16"),
    ("g128", AS_STORED),
    ("a row", "codebook:m=2,v=8,b=8"),
    ("m3v16 g32", "codebook:m=3,v=16,b=8,group=32"),
]


def over(model: str, name: str) -> str:
    """Speed of m1v4 over another kernel, for the layers of a block."""
    return f"{layers(model, name) / layers(model, 'm1v4 g128'):.2f}x"


def watts(row: dict[str, str]) -> str:
    """GFLOPS per watt, and their deviation where it was measured."""
    spread = row.get("spread")
    deviation = f" ± {float(spread):.1f}" if spread else " (one run)"
    return f"{float(row['gflops_per_watt']):.1f}{deviation}"


def theirs(spec: str) -> float:
    """The time of CodeGEMM's own kernel, one token."""
    return best(spec, 1, peer="codegemm", csv="h200_codebook")


def scored(method: str, spec: str, model: str = "pico") -> str:
    return lost(f"{LOSS}{model}; method={method}; spec={spec}")


def rate(model: str, spec: str, backend: str) -> float:
    """Tokens a second of one sequence, by the kernels of a backend."""
    rows = found(f"{ENGINE}model={model}; format={spec}")
    return max(float(row["tokens_per_s"]) for row in rows if backend in row["backends"])


def rates(model: str) -> str:
    """m1v4 over AQLM's kernels, end to end."""
    ours = rate(model, M1V4_STORED, "hopper")
    others = {"2x8": "codebook:m=2,v=8,b=8", "1x16": "codebook:m=1,v=8,b=16"}
    times = []
    for name, spec in others.items():
        if found(ENGINE + f"model={model}; format={spec}"):
            times.append(f"{ours / rate(model, spec, 'aqlm_backend'):.2f}x over {name}")
    return ", ".join(times)


def decoding(name: str) -> str:
    """Speed over decoding into a dense weight for cuBLAS, 16 tokens, 8B."""
    columns: list[Column] = [*(column for _, column in CONTESTANTS), *DECODED]
    times = {column[0]: block("8B", 16, column) for column in columns}
    decoded, ours = times[f"{name} decoded"], times[f"{name} g128"]
    if decoded is None or ours is None:
        raise Missing(f"no rows of {name} with 16 tokens")
    return f"{decoded / ours:.1f}x"


def us(spec: str, shape: tuple[int, int], m: int = 1) -> float:
    return best(spec, m, shape, csv="h200_codebook")


def speeds(spec: str, least: int, most: int) -> str:
    """Over cuBLAS, with `least` to `most` tokens."""
    times = {cell: time for cell, time in chosen(spec).items() if least <= cell[2] <= most}
    return span([dense / us for us, dense in times.values()])


def codegemm() -> list[Claim]:
    bits = [get_format(f"codebook:m={m},v={v},b={b},group={g}") for v, m, b, g in sorted(TABLE1)]
    sizes = ", ".join(f"{fmt.bits_per_weight(OUT):.3f}" for fmt in bits)
    powered = {
        name: found(f"{POWER}peer={peer}; format={spec}")[0]
        for name, peer, spec in (
            ("m1v4", "anybit-hopper", M1V4),
            ("AQLM 2x8", "aqlm", "codebook"),
            ("cuBLAS", "cublas", "fp16"),
        )
    }
    built = [float(row["building"]) for row in found(f"{SHARE}{M1V4}/{M2V8}")]
    many = [layers("8B", "cuBLAS", m) / layers("8B", "m1v4 g128", m) for m in (8, 16)]
    return [
        Claim(
            "Bits of (4, 1, 8, -1) and (16, 3, 8, 32), table 1",
            "about 2",
            f"{sizes} at 4096x4096",
            "anybit/core/format.py, tests/test_formats.py",
        ),
        Claim(
            "m v b g are parameters of one kernel",
            "all",
            "of a family on Hopper, for b up to 8, v of 4, 8 and 16, and any g; others run on "
            "Triton ([which](#which-kernel-runs))",
            "anybit/kernels/cute/cells.py",
        ),
        Claim(
            "Products shrink by m / v",
            "yes",
            "for one and two tokens; more tokens multiply centroids on tensor cores",
            "anybit/kernels/hopper/psumbook.py, anybit/kernels/hopper/codebook.py",
        ),
        Claim(
            "A Psumbook of t_w columns against the codebook it replaces",
            "t_w / v^2: twice its size for v = 4 and half for v = 8, with t_w = 32",
            "32 and 8 times its size: 512 columns a CTA leave fewer partial sums to add",
            "anybit/kernels/hopper/codebook_tiles.py",
        ),
        Claim(
            "Layers of an 8B block, one token, over cuBLAS and AQLM 2x8 (table 2)",
            "2.18x, 1.64x",
            f"m1v4 {over('8B', 'cuBLAS')}, {over('8B', 'AQLM 2x8')}",
            CSV + f"M=1; format={M1V4}/fp16/codebook",
        ),
        Claim(
            "... of 70B",
            "table 2",
            f"{over('70B', 'cuBLAS')}, {over('70B', 'AQLM 2x8')}",
            CSV + f"M=1; K=8192/28672; format={M1V4}/fp16/codebook",
        ),
        measured(
            "... over QTIP",
            "competitive",
            lambda: (
                "by our own kernel of its code, 28672x4096: "
                f"{one(QTIP, 'us'):.1f} us, m1v4 {us(M1V4, BIG):.1f}"
            ),
            QTIP,
        ),
        Claim(
            "... over LUT-GEMM and QuIP#",
            "QuIP# is competitive",
            "",
            "not run: their kernels read sums of binary weights and a lattice, which are no format "
            "here, so no weight would be the same in both",
        ),
        measured(
            "CodeGEMM's own kernel beside ours, 28672x4096, one token",
            "1x",
            lambda: (
                f"m1v4 {theirs(M1V4):.1f} and {us(M1V4, BIG):.1f} us, "
                f"m2v8 {theirs(NAMED):.1f} and {us(M2V8, BIG):.1f} us"
            ),
            CSV + f"M=1; N=28672; K=4096; format={M1V4}/{M2V8}/{NAMED}",
        ),
        Claim(
            "GFLOPS per watt, 28672x8192 (table 3)",
            "far above kernels that decode",
            ", ".join(f"{name} {watts(row)}" for name, row in powered.items()),
            POWER + f"format={M1V4}/codebook/fp16",
        ),
        measured(
            "Latency over g rises steeply at g = v (figure 4a)",
            "figure",
            lambda: (
                "m1v4, 8192x8192, g = 4, 8, 16, 128 and rows: "
                f"{', '.join(f'{us(spec, SQUARE):.1f}' for spec in FINE)} us"
            ),
            CSV + f"M=1; N=8192; K=8192; format={'/'.join(FINE)}",
        ),
        measured(
            "Perplexity over m, v and g (figure 4b)",
            "Llama-3.1-8B",
            lambda: (
                "loss on pico: "
                + "; ".join(f"{name} {scored('additive', spec)}" for name, spec in CALIBRATED)
            ),
            f"{LOSS}pico; method=additive; spec={'/'.join(spec for _, spec in CALIBRATED)}",
        ),
        measured(
            "Tokens a second, 8B shapes, over AQLM's kernels in the same engine (table 4)",
            "1.83x over 2x8",
            lambda: f"m1v4: {rates('llama-3-8b')}",
            f"{ENGINE}model=llama-3-8b",
        ),
        measured(
            "... 70B shapes (table 5)",
            "8.93x over 1x16",
            lambda: (
                f"m1v4 {rate('llama-3-70b', M1V4_STORED, 'hopper'):.0f} tokens a second; AQLM's "
                "were not run there, its products of a block take "
                f"{over('70B', 'AQLM 2x8')} (2x8) and {over('70B', 'AQLM 1x16')} (1x16) as long"
            ),
            f"{ENGINE}model=llama-3-70b, {CSV}M=1; K=8192/28672; format={M1V4}/codebook",
        ),
        Claim(
            "MMLU, WinoGrande, HellaSwag, ARC",
            "tables 4 and 5",
            "",
            "not run: needs Llama-3.1 and the data sets; lm-eval runs them by name",
        ),
        Claim(
            "m1v4 is faster than m2v8",
            "Llama-3.1-8B",
            f"{layers('8B', 'm1v4 g128'):.1f} and {layers('8B', 'm2v8 g128'):.1f} us a block at "
            "one token, and more so for more",
            CSV + f"M=1; format={M1V4}/{M2V8}",
        ),
        measured(
            "... and better",
            "Llama-3.1-8B",
            lambda: (
                f"loss on pico, both calibrated: {scored('additive', M1V4_STORED)} and "
                f"{scored('additive', AS_STORED)}"
            ),
            f"{LOSS}pico; method=additive; spec={M1V4_STORED}/{AS_STORED}",
        ),
        Claim(
            "PV-tuning helps",
            "AQLM's 2x8 of Llama-2-7B: perplexity 6.69 to 5.90",
            f"m2v8 on pico: {scored('additive', AS_STORED)} before, "
            f"{scored('additive+pv', AS_STORED)} after",
            LOSS + f"pico; method=additive/additive+pv; spec={AS_STORED}",
        ),
        Claim(
            "Uniform and binary weights are codebooks (section 5)",
            "{0, 1}^v, {-1, 1}^v",
            "int1 to int8 become vectors of a codebook, exactly; the kernel's time is the same",
            "anybit/formats/codebook.py, tests/test_formats.py, "
            + CSV
            + "format=codebook:m=1,group=128 binary",
        ),
        Claim(
            "Building takes a part of building and reading (table 6)",
            "20 to 46 %, stable over tokens",
            f"{span((100 * b for b in built), ' %', 0)} in one CTA, more for two tokens than for "
            "one, since reading costs no more: a word of the table holds both tokens",
            f"{SHARE}{M1V4}/{M2V8}",
        ),
        Claim(
            "Tiles t_w and t_h (table 7)",
            "32 x 2048",
            "512 columns a CTA; clusters share out the rows, so there is no t_h to choose",
            "anybit/kernels/hopper/codebook_tiles.py",
        ),
        Claim(
            "Higher bits cost time (table 8)",
            "figure",
            f"4096x4096, 1 to 4 bits: {us('codebook:m=1,group=128', OUT):.1f}, "
            f"{us(M2V8, OUT):.1f}, {us('codebook:m=3,group=128', OUT):.1f}, "
            f"{us('codebook:m=4,group=128', OUT):.1f} us",
            CSV + "M=1; N=4096; K=4096; format=codebook:m=1,group=128/codebook:group=128",
        ),
        Claim(
            "8 and 16 tokens, over decoding and then cuBLAS (table 9)",
            "level",
            f"layers of an 8B block, 16 tokens: m1v4 {decoding('m1v4')}, m2v8 {decoding('m2v8')}; "
            f"over cuBLAS alone, whose weights are dense already, m1v4 {span(many)}",
            CSV + f"M=8/16; format={M1V4}/{M2V8}/fp16",
        ),
        Claim(
            "Other M, N and K (table 10)",
            "to 32 tokens",
            f"ten shapes up to 16 tokens; 28672x4096 with 16: {us(M1V4, BIG, 16):.1f} us",
            CSV + f"M=16; format={M1V4}",
        ),
        measured(
            "Slower than cuBLAS beyond 32 tokens",
            "yes",
            lambda: (
                f"m1v4 {speeds(M1V4, 32, 64)} of its speed with 32 and 64 tokens, "
                f"{speeds(M1V4, 192, 4096)} with 192 to 4,096; m2v8 {speeds(M2V8, 32, 64)} and "
                f"{speeds(M2V8, 192, 4096)}"
            ),
            f"h200_codebook_tiles.csv: format={M1V4}/{M2V8}",
        ),
        Claim(
            "Codes of 16 bits do not fit",
            "yes",
            "Triton looks them up in memory; never timed",
            "anybit/kernels/triton/gemm.py",
        ),
    ]
