"""What ZeroQuant(4+2) and FP6-LLM claim."""

from claims import WEIGHTS, Claim, best, found, layers, lost, one, span, speeds

from anybit.planning.cost_model import instructions

CPU = "cpu_accuracy.csv: model=pico; method=rtn; spec="
WILD = "cpu_accuracy.csv: model=pico-large-columns; method=rtn; spec="
H200 = "h200_accuracy.csv: samples=0/128; model="
TASK = "cpu_generation.csv: method=rtn; task="
GEMM = "h200_gemm.csv: peer=anybit-hopper; activation=fp16; format="
STEP = "h200_engine.csv: kv=model; "


def ratios(spec: str, m: int, peer: str = "anybit-hopper") -> list[float]:
    """The time of another format over that of fp6, for the four weights."""
    return [best(spec, m, s, peer=peer) / best("fp6", m, s) for s in WEIGHTS]


def step(model: str, spec: str, batch: int = 1) -> float:
    """Speed of a decode step over bf16."""
    dense, ours = (
        one(f"{STEP}model={model}; format={f}; batch={batch}", "step_us") for f in ("bf16", spec)
    )
    return dense / ours


def times(values: list[float]) -> str:
    return f"{sum(values) / len(values):.2f}x, {span(values)}"


def zeroquant() -> list[Claim]:
    def kl(place: str) -> str:
        return f"{one(place, 'kl'):.4f}"

    def text(kind: str, spec: str) -> float:
        return one(f"{H200}study-105m; spec={spec}; method=gptq; text={kind}", "loss")

    def overfit(spec: str) -> str:
        return f"{text('prose', spec) / text('code', spec):.1f}x"

    reach = "; ".join(f"M = {m} {times(speeds('fp6', m))}" for m in (1, 16, 64))
    return [
        Claim(
            "FP6 (e3m2), rounded to nearest, one scale a row, equals FP16",
            "StarCoder-15B and BART-406M match FP16",
            f"nearly: it loses {lost(H200 + 'study-105m; spec=fp6; method=rtn')} nats on "
            f"study-105m and {lost(H200 + 'pico; spec=fp6; method=rtn')} on pico: little, not zero",
            H200 + "study-105m/pico; spec=fp6; method=rtn",
        ),
        Claim(
            "FP6 is clearly better than FP5",
            "on code and summaries",
            f"not on pico, whose rows have no outliers: KL {kl(CPU + 'fp5')} and "
            f"{kl(CPU + 'fp6')}; with outliers {kl(WILD + 'fp5')} and {kl(WILD + 'fp6')}",
            CPU + "fp5/fp6, " + WILD + "fp5/fp6",
        ),
        Claim(
            "INT6 is as accurate",
            "no difference seen",
            f"it depends on outliers: KL of int6 and fp6 {kl(CPU + 'int6')} and "
            f"{kl(CPU + 'fp6')} on pico, {kl(WILD + 'int6')} and {kl(WILD + 'fp6')} with outliers",
            CPU + "int6/fp6, " + WILD + "int6/fp6",
        ),
        Claim(
            "... but dearer to convert to FP16",
            "yes",
            f"yes: {instructions('int6'):.1f} instructions a weight, fp6 {instructions('fp6'):.1f} "
            "(counted in the decoders)",
            "anybit/kernels/cute/decode.py",
        ),
        Claim(
            "GPTQ overfits its calibration text",
            "seen in most models",
            f"yes: loss on code after prose over loss after code, int4 rows {overfit('int4')}, "
            f"groups {overfit('int4:group=128')}",
            H200 + "study-105m; spec=int4/int4:group=128; method=gptq",
        ),
        Claim(
            "... fine groups (FGQ) more than rows (CGQ)",
            "yes",
            "by loss perhaps, by KL not; see [Accuracy](../accuracy.md#the-papers-claims)",
            H200 + "study-105m; spec=int4/int4:group=128; method=gptq",
        ),
        Claim(
            "... and large models less",
            "1B to 65B",
            "",
            "not run: needs models of several sizes, trained alike",
        ),
        Claim(
            "INT4 loses code generation",
            "CodeLLaMA-34B, JavaScript pass@1: 45.05 to 43.45 (CGQ), 43.22 (FGQ)",
            "perhaps: bodies of functions that parse, int4 in groups of 128 minus bf16, "
            f"{lost(TASK + 'python_parses; spec=int4:group=128', 'change', 3)}",
            TASK + "python_parses; spec=int4:group=128",
        ),
        Claim(
            "... measured by tests that run the code (pass@k)",
            "HumanEval-X, MultiPL-E",
            "",
            "not run: pico writes no functions that pass a test, and no larger model was at hand",
        ),
        Claim(
            "INT4 loses summaries, FP6 does not",
            "BART-406M, ROUGE on CNN and XSum",
            "not seen: docstrings, ROUGE-L minus bf16's: fp6 "
            f"{lost(TASK + 'python_docstring; spec=fp6', 'change', 3)}, int4 in groups of 128 "
            f"{lost(TASK + 'python_docstring; spec=int4:group=128', 'change', 3)}; BART not run",
            TASK + "python_docstring; spec=fp6/int4:group=128",
        ),
        Claim("4+2 storage", "4 and 2 bits", "planes of 4, 2 and 1 bits", "anybit/core/planes.py"),
        Claim(
            "Bias shift, exact for subnormals too",
            "2^12 in the scale",
            "exact for every code",
            "anybit/formats/minifloat.py, tests/test_formats.py",
        ),
        Claim(
            "... makes the kernel faster",
            "1.36x",
            "",
            "not run: needs a kernel without it on a GPU",
        ),
        Claim(
            "FP6 kernel over cuBLAS, mean and highest",
            "1.92x, up to 2.37x",
            f"mean and range of four weights: {reach}",
            GEMM + "fp6; M=1/16/64",
        ),
        Claim(
            "... over fine-grained INT4 (TensorRT-LLM)",
            "1.06x (FFN1), 2.05x (FFN2)",
            f"slower: {span(ratios('int4:group=128', 1) + ratios('int4:group=128', 16))} of our "
            "own int4's speed up to 16 tokens",
            GEMM + "fp6/int4:group=128; M=1/16",
        ),
    ]


def fp6_llm() -> list[Claim]:
    nf4 = "h200_gemm.csv: peer=bitsandbytes; format=nf4:group=64; M=16"
    w8 = [ratios("int8", m) for m in (1, 16)]
    eight = layers("8B", "cuBLAS", 8) / layers("8B", "fp6", 8)
    return [
        Claim(
            "Kernel over cuBLAS, 8, 16, 32 tokens",
            "2.2x, 2.2x, 2.0x",
            f"mean and range: 16 tokens {times(speeds('fp6', 16))}; layers of an 8B block with 8: "
            f"{eight:.2f}x; 32 were not timed",
            GEMM + "fp6; M=16, h200_codebook.csv: peer=anybit-hopper/cublas; format=fp6/fp16; M=8",
        ),
        Claim(
            "... over W8A16 (TensorRT-LLM)",
            "1.3x, 1.3x, 1.2x",
            f"over our own int8: {span([w8[0][0], w8[1][0]])} on the largest weight, "
            f"{span(w8[0][1:] + w8[1][1:])} on the other three",
            GEMM + "fp6/int8; M=1/16",
        ),
        Claim(
            "... over bitsandbytes (FP4)",
            "7.6x, 7.5x, 6.6x",
            f"over its NF4: {span(ratios('nf4:group=64', 16, 'bitsandbytes'), digits=1)} "
            "at 16 tokens (another process)",
            nf4 + ", " + GEMM + "fp6; M=16",
        ),
        Claim(
            "... level with fine-grained W4A16",
            "level",
            f"{span(ratios('int4:group=128', 16))} of its speed at 16 tokens",
            GEMM + "fp6/int4:group=128; M=16",
        ),
        Claim(
            "... like cuBLAS beyond 128 tokens",
            "the same",
            f"{span(speeds('fp6', 256))} at 256 tokens",
            GEMM + "fp6; M=256",
        ),
        Claim(
            "Four codes decoded in a register at once",
            "a quarter of the instructions",
            "two in fp16 and bf16, four in fp8: 120 instructions for 64 weights",
            "anybit/kernels/cute/decode.py, docs/kernels.md",
        ),
        Claim(
            "Packing ahead of time, free of bank conflicts",
            "words of 4 bytes, in turns",
            "16 bytes a thread",
            "anybit/kernels/cute/pack.py",
        ),
        Claim("Splitting and stitching planes", "yes", "yes", "anybit/kernels/cute/lang.py"),
        Claim(
            "Slices decoded while others multiply",
            "yes",
            "overlapped over in turns: "
            + span(
                one(f"h200_ablation.csv: scheme=fp6; pipeline=turns; M={m}", "us")
                / one(f"h200_ablation.csv: scheme=fp6; pipeline=implicit; M={m}", "us")
                for m in sorted({int(r["M"]) for r in found("h200_ablation.csv: scheme=fp6")})
            ),
            "h200_ablation.csv: scheme=fp6, anybit/kernels/hopper/gemm.py",
        ),
        Claim(
            "Tensor cores beat CUDA cores at every batch",
            "figure",
            "also at one token",
            "notes/triton.md",
        ),
        Claim("Any width", "FP6, FP5, FP3", "3 to 8 bits", "h200_gemm.csv: format=fp5"),
        Claim(
            "LLaMA-70B on one GPU instead of two, tokens a second and GPU",
            "1.69x to 2.65x",
            "",
            "not run: needs the shapes of 70B in the engine on a GPU",
        ),
        Claim(
            "LLaMA-13B on one GPU",
            "1.23x",
            f"7B shapes, steps over our own bf16: {step('llama-2-7b', 'fp6'):.2f}x with one "
            f"sequence, {step('llama-2-7b', 'fp6', 16):.2f}x with 16; 13B was not run",
            STEP + "model=llama-2-7b; format=fp6/bf16; batch=1/16",
        ),
        Claim(
            "OPT-30B, batch 1, 2, 4",
            "1.91x, 1.84x, 1.72x",
            "",
            "not run: needs a GPU; the engine has no layers of its own for OPT",
        ),
        Claim(
            "The gain grows with the generated length",
            "figure",
            "",
            "not run: steps were timed at one context",
        ),
        Claim(
            "One line with a model's name",
            "`mii.pipeline(...)`",
            "one line with its directory",
            "examples/one_line_fp6.py",
        ),
        Claim(
            "Limits: FP16, dense models, Ampere",
            "said",
            "also bf16, experts, and kernels for sm_80 to sm_120, of which sm_90 was run",
            "h200_experts.csv: format=fp6, h200_mma.csv: format=fp6",
        ),
        Claim(
            "FP6-LLM's own kernel beside ours",
            "",
            "",
            "not run: needs its CUDA sources built on a GPU; it was made for Ampere",
        ),
    ]
