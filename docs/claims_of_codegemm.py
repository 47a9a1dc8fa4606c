"""What CodeGEMM claims."""

from claims import BIG, OUT, Claim, best, found, layers, lost, one, span
from results import M1V4, M2V8

from anybit import get_format

CSV = "h200_codebook.csv: "
TABLE1 = {(4, 1, 8, 0), (16, 3, 8, 32)}
SHARE = "h200_codebook_share.csv: CTAs=one; format="
POWER = "h200_codebook_power.csv: "
LOSS = "h200_accuracy.csv: samples=0/128; text=/code; model="
AS_STORED = "codebook:m=2,v=8,b=8,group=128"
STUDY = f"{LOSS}study-105m; method=additive; spec={AS_STORED}"


def over(model: str, name: str) -> str:
    """Speed of m1v4 over another kernel, for the layers of a block."""
    return f"{layers(model, name) / layers(model, 'm1v4 g128'):.2f}x"


def watts(row: dict[str, str]) -> str:
    """GFLOPS per watt, and their deviation where it was measured."""
    spread = row.get("spread")
    deviation = f" ± {float(spread):.1f}" if spread else " (one run)"
    return f"{float(row['gflops_per_watt']):.1f}{deviation}"


def us(spec: str, shape: tuple[int, int], m: int = 1) -> float:
    return best(spec, m, shape, csv="h200_codebook")


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
    engine = "h200_engine.csv: model=llama-3-8b; kv=model; batch=1; format="
    step = one(engine + "bf16", "step_us") / one(
        engine + "codebook:m=1,v=4,b=8,group=128", "step_us"
    )
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
        Claim(
            "... over LUT-GEMM, QuIP# and QTIP",
            "QuIP# and QTIP are competitive",
            "",
            "not run: needs their kernels built on a GPU",
        ),
        Claim(
            "CodeGEMM's own kernel beside ours",
            "",
            "",
            "not run: needs its CUDA sources built on a GPU",
        ),
        Claim(
            "GFLOPS per watt, 28672x8192 (table 3)",
            "far above kernels that decode",
            ", ".join(f"{name} {watts(row)}" for name, row in powered.items()),
            POWER + f"format={M1V4}/codebook/fp16",
        ),
        Claim(
            "Latency over g rises steeply at g = v (figure 4a)",
            "figure",
            f"4096x4096, rows and groups of 128: {us('codebook:m=1,v=4', OUT):.1f} and "
            f"{us(M1V4, OUT):.1f} us; finer groups were not timed",
            CSV + f"M=1; N=4096; K=4096; format=codebook:m=1,v=4/{M1V4}",
        ),
        Claim(
            "Perplexity over m, v and g (figure 4b)",
            "Llama-3.1-8B",
            f"m2v8 in groups of 128 alone: loss {lost(STUDY)} on study-105m",
            STUDY,
        ),
        Claim(
            "Tokens a second, 8B and 70B, over AQLM (tables 4, 5)",
            "1.83x over 2x8, 8.93x over 1x16",
            f"8B shapes, m1v4 over our own bf16, one sequence: {step:.2f}x; AQLM was not run in "
            "the engine",
            engine + "bf16/codebook:m=1,v=4,b=8,group=128",
        ),
        Claim(
            "MMLU, WinoGrande, HellaSwag, ARC",
            "tables 4 and 5",
            "",
            "not run: needs Llama-3.1 and the data sets; lm-eval runs them by name",
        ),
        Claim(
            "m1v4 is faster and better than m2v8",
            "Llama-3.1-8B",
            f"faster: {layers('8B', 'm1v4 g128'):.1f} and {layers('8B', 'm2v8 g128'):.1f} us a "
            "block at one token, and more so for more; better was not measured with calibration, "
            "and without it both lose [about the same](../accuracy.md#without-calibration)",
            CSV + f"M=1; format={M1V4}/{M2V8}",
        ),
        Claim(
            "PV-tuning helps",
            "yes",
            f"m2v8 on pico: {lost(LOSS + f'pico; method=additive; spec={AS_STORED}')} before, "
            f"{lost(LOSS + f'pico; method=additive+pv; spec={AS_STORED}')} after",
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
            f"over cuBLAS alone, whose weights are dense already: {span(many)}",
            CSV + f"M=8/16; format={M1V4}/fp16",
        ),
        Claim(
            "Other M, N and K (table 10)",
            "to 32 tokens",
            f"ten shapes up to 16 tokens; 28672x4096 with 16: {us(M1V4, BIG, 16):.1f} us",
            CSV + f"M=16; format={M1V4}",
        ),
        Claim(
            "Slower than cuBLAS beyond 32 tokens",
            "yes",
            "m1v4 from 512 tokens on, in an earlier run",
            "notes/codebooks.md",
        ),
        Claim(
            "Codes of 16 bits do not fit",
            "yes",
            "Triton looks them up in memory; never timed",
            "anybit/kernels/triton/gemm.py",
        ),
    ]
