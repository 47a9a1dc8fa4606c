"""What ZeroQuant(4+2) and FP6-LLM claim."""

from collections.abc import Callable
from contextlib import suppress
from statistics import geometric_mean as mean

from claims import WEIGHTS, Claim, best, by_batch, lost, measured, one, over_paper, span, speeds
from paper_tables import (
    cores,
    faster,
    gains,
    gains_at,
    gains_of,
    named,
    over_layers,
    over_shapes,
    slower,
    timed,
)
from results import OURS, Missing, cells, find, read

from anybit.planning.cost_model import instructions

CPU = "cpu_accuracy.csv: model=pico; method=rtn; spec="
WILD = "cpu_accuracy.csv: model=pico-large-columns; method=rtn; spec="
H200 = "h200_accuracy.csv: samples=0/128; model="
STUDY = "h200_trellis.csv: model=study-105m-60s; method=rtn; spec="
SCORED = ("int4", "int4:group=128", "fp6")
MS = (1, 16, 64, 256)
OWN = "h200_gemm.csv: peer=anybit-hopper; format=fp6; activation=fp16; M=1/16/64/256"
GEMM = "h200_gemm.csv: peer=anybit-hopper; activation=fp16; format="
TALL = (57344, 8192)
LARGER = "h200_layers.csv: model=llama-2-70b-fp6/llama-65b/opt-30b; M=8/16/32; format="
SIMT = "CUDA cores fp32"
LORC = "cpu_lorc.csv: model=pico; spec="
LEFT = {"rtn": "", "rtn+lorc": "", "gptq": "code", "gptq+lorc": "code"}  # method: its text
SHAPES = "h200_shapes.csv: peer=anybit-hopper; activation=fp16; format="


def ratios(spec: str, m: int, peer: str = "anybit-hopper") -> list[float]:
    """The time of another format over that of fp6, for the four weights."""
    return [best(spec, m, s, peer=peer) / best("fp6", m, s) for s in WEIGHTS]


def grows(batch: str) -> str:
    """fp6's gain by context."""
    return ", ".join(f"{x:.2f}x at {int(c):,} tokens" for c, x in gains_at(batch).items())


def after_gptq(model: str, spec: str, text: str) -> float:
    return one(f"{H200}{model}; spec={spec}; method=gptq; text={text}", "kl")


def by_model(figure: Callable[[str], float], unit: str = "x") -> str:
    """A figure of the two models that GPTQ was calibrated on with two kinds of text."""
    sizes = {"pico": "7M", "study-105m": "105M"}
    return ", ".join(f"{name} {figure(model):.2f}{unit}" for model, name in sizes.items())


def overfit_of(spec: str) -> str:
    """What calibration on prose costs on code, over calibration on code."""
    return by_model(lambda m: after_gptq(m, spec, "prose") / after_gptq(m, spec, "code"))


def left_by_gptq(model: str) -> float:
    """What it leaves of the KL of rounding."""
    return after_gptq(model, "int4", "code") / one(f"{H200}{model}; spec=int4; method=rtn", "kl")


def left_on_pico(method: str) -> str:
    """What a method leaves of the KL of rounding, measured on a CPU."""
    kl = {m: one(f"{LORC}int4; method={m}; text={t}", "kl") for m, t in LEFT.items()}
    return f"{kl[method] / kl['rtn']:.2f}"


def linear() -> list[str]:
    """What fp6 gains in the products of decode steps, by model and batch."""
    found = []
    for model in ("opt-30b", "llama-2-13b"):
        with suppress(Missing):
            found.append(f"{named(model)} {by_batch(gains_of(model, 'gemm_us'))}")
    if not found:
        raise Missing("no steps of fp6")
    return found


def times(values: list[float]) -> str:
    return f"{sum(values) / len(values):.2f}x, {span(values)}"


def task(name: str, specs: str) -> str:
    """Rows of a task, rounded to nearest: of the GPU's run if it has them."""
    wanted = name.split("/")[0]
    known = {
        csv: {row["task"] for row in read(csv)} for csv in ("h200_generation", "cpu_generation")
    }
    csv = next((csv for csv, tasks in known.items() if wanted in tasks), "h200_generation")
    return f"{csv}.csv: method=rtn; task={name}; spec={specs}"


def changes(name: str) -> str:
    """What formats change of a task's score, with its standard error."""
    return ", ".join(f"{s} {lost(task(name, s), 'change', 3)}" for s in SCORED)


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
        measured(
            "FP5, INT6 and FP6 on a larger model",
            "FP6 best",
            lambda: (
                "KL of fp5, int6 and fp6, rounded: "
                f"{kl(STUDY + 'fp5')}, {kl(STUDY + 'int6')}, {kl(STUDY + 'fp6')}"
            ),
            STUDY + "fp5/int6/fp6",
        ),
        Claim(
            "No clear link between bits and quality",
            "over tasks and models",
            f"clear by KL, pico, rounded: int4 {kl(CPU + 'int4')}, fp5 {kl(CPU + 'fp5')}, fp6 "
            f"{kl(CPU + 'fp6')}, int8 {kl(CPU + 'int8')}; tasks' scores differ by little more than "
            "their errors",
            CPU + "int4/fp5/fp6/int8, docs/accuracy.md",
        ),
        Claim(
            "INT6 is dearer to convert to FP16",
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
        measured(
            "... and large models less",
            "1B to 65B",
            lambda: (
                "seen on two models, trained differently; KL after prose over KL after code: int4 "
                f"rows {overfit_of('int4')}; groups {overfit_of('int4:group=128')}"
            ),
            H200 + "pico/study-105m; spec=int4/int4:group=128; method=gptq",
        ),
        Claim(
            "INT4 loses code generation",
            "CodeLLaMA-34B, JavaScript pass@1: 45.05 to 43.45 (CGQ), 43.22 (FGQ)",
            f"bodies of functions that parse, minus bf16's: {changes('python_parses')}",
            task("python_parses", "int4/int4:group=128/fp6"),
        ),
        measured(
            "... measured by tests that run the code (pass@k)",
            "HumanEval-X, MultiPL-E",
            lambda: (
                "a line of a held-out module written and its code run, minus bf16's: pass@1 "
                f"{changes('line_pass@1')}; pass@10 {changes('line_pass@10')}"
            ),
            task("line_pass@1/line_pass@10", "int4/int4:group=128/fp6")
            + ", benchmarks/code_tests.py",
        ),
        Claim(
            "Zero-shot tasks",
            "means of PIQA, ARC and others",
            "which of four lines comes next in held-out code, minus bf16's: "
            f"{changes('python_next_line')}; public tasks (`anybit eval --tasks`) need a network",
            task("python_next_line", "int4/int4:group=128/fp6"),
        ),
        Claim(
            "INT4 loses summaries, FP6 does not",
            "BART-406M, ROUGE on CNN and XSum",
            f"docstrings of functions, ROUGE-L minus bf16's: {changes('python_docstring')}; "
            "no BART was at hand",
            task("python_docstring", "int4/int4:group=128/fp6"),
        ),
        measured(
            "GPTQ and LoRC (a low-rank part beside the codes) help large models most",
            "prior work",
            lambda: (
                "of the KL of rounded int4 rows, GPTQ leaves "
                f"{by_model(left_by_gptq, '')}; LoRC of rank 8 on the 7M model "
                f"{left_on_pico('rtn+lorc')}, GPTQ with 16 windows {left_on_pico('gptq')}, both "
                f"{left_on_pico('gptq+lorc')}"
            ),
            H200 + f"pico/study-105m; spec=int4; method=rtn/gptq, {LORC}int4",
        ),
        Claim("4+2 storage", "4 and 2 bits", "planes of 4, 2 and 1 bits", "anybit/core/planes.py"),
        Claim(
            "Bias shift, exact for subnormals too",
            "2^12 in the scale",
            "exact for every code",
            "anybit/formats/minifloat.py, tests/test_formats.py",
        ),
        measured(
            "... makes the kernel faster",
            "1.36x",
            lambda: (
                f"{span(slower('fp6', ('unshifted', 'implicit')))} from 8 to 512 tokens: one "
                "product more for two weights"
            ),
            "h200_ablation.csv: scheme=fp6; decoder=unshifted/ours; pipeline=implicit",
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

    def over(other: str) -> str:
        """fp6's speed over another format's on weights of many models, by tokens."""
        found = {m: over_shapes(other, "fp6", m) for m in (8, 16, 32)}
        means = ", ".join(f"M={m} {mean(x):.2f}x ({span(x)})" for m, x in found.items())
        return f"{len(found[8])} weights of many models, geometric means: {means}"

    def used(spec: str, kind: str, peer: str) -> str:
        """Parts of the data sheet's bandwidth and fp16 rate, at 16 and 64 tokens."""
        rows = [
            find(cells("h200_shapes")[*TALL, m], ("", peer, (spec,), (kind,), "")) for m in (16, 64)
        ]
        if None in rows:
            raise Missing(f"{spec}, {TALL}")
        parts = [
            " and ".join(f"{float(row[column]) / most:.0%}" for row in rows if row)
            for column, most in (("weight_gbps", 4800), ("tflops", 989))
        ]
        return f"reads at {parts[0]}, multiplies at {parts[1]}"

    def larger(other: str) -> str:
        """The same for larger models, in another run."""
        return ", ".join(f"M={m} {span(over_layers(other, 'fp6', m))}" for m in (8, 16, 32))

    return [
        measured(
            "Kernel over cuBLAS, 8, 16, 32 tokens",
            "2.2x, 2.2x, 2.0x",
            lambda: over("bf16"),
            SHAPES + "fp6; M=8/16/32",
        ),
        measured(
            "... of larger models",
            "LLaMA-65B and 70B, OPT-30B and 65B",
            lambda: f"layers of {', '.join(map(named, timed('fp6')))}: {larger('bf16')}",
            LARGER + "fp6/bf16",
        ),
        measured(
            "... over W8A16 (TensorRT-LLM)",
            "1.3x, 1.3x, 1.2x",
            lambda: f"the larger models, over our own int8: {larger('int8')}",
            LARGER + "fp6/int8",
        ),
        Claim(
            "... over bitsandbytes (FP4)",
            "7.6x, 7.5x, 6.6x",
            f"over its NF4: {span(ratios('nf4:group=64', 16, 'bitsandbytes'), digits=1)} "
            "at 16 tokens (another process)",
            nf4 + ", " + GEMM + "fp6; M=16",
        ),
        measured(
            "... level with fine-grained W4A16",
            "level",
            lambda: (
                f"slower: over our own int4 in groups of 128, {over('int4:group=128')}; layers "
                f"of the larger models {larger('int4:group=128')}"
            ),
            SHAPES + "fp6/int4:group=128; M=8/16/32, " + LARGER + "fp6/int4:group=128",
        ),
        measured(
            "... slower than coarse-grained W4A16 alone",
            "slower",
            lambda: f"the larger models, over our own int4 with one scale a row: {larger('int4')}",
            LARGER + "fp6/int4",
        ),
        Claim(
            "... like cuBLAS beyond 128 tokens",
            "the same",
            f"{span(speeds('fp6', 256))} at 256 tokens",
            GEMM + "fp6; M=256",
        ),
        measured(
            "Below 128 tokens cuBLAS uses over 80 % of the bandwidth and under half of the tensor "
            "cores; FP6 frees the one and uses more of the other (figure 10a)",
            "figure",
            lambda: (
                f"57344x8192, 16 and 64 tokens, of the data sheet's rates: cuBLAS "
                f"{used('bf16', 'bf16', 'cublas')}; fp6 {used('fp6', 'fp16', OURS)}"
            ),
            "h200_shapes.csv: N=57344; K=8192; M=16/64; format=bf16/fp6",
        ),
        Claim(
            "One kernel, not one that writes decoded weights and cuBLAS after it",
            "the second doubles the traffic",
            "one: 28672x4096 with 4,096 tokens takes 0.90 of the time of two kernels in one "
            "process; with fewer tokens two lose more",
            "notes/hopper_main_loop.md",
        ),
        measured(
            "Four codes decoded in a register at once",
            "a quarter of the instructions",
            lambda: (
                "two in fp16 and bf16, four in fp8; four in fp16, built for the comparison: "
                f"{span(faster('fp6', ('four', 'implicit')))} of our speed"
            ),
            "h200_ablation.csv: scheme=fp6; decoder=four/ours; pipeline=implicit, "
            "benchmarks/decoders.py",
        ),
        Claim(
            "Packing ahead of time, free of bank conflicts",
            "words of 4 bytes, in turns",
            "16 bytes a thread",
            "anybit/kernels/cute/pack.py",
        ),
        Claim("Splitting and stitching planes", "yes", "yes", "anybit/kernels/cute/lang.py"),
        measured(
            "Slices decoded while others multiply",
            "yes",
            lambda: f"overlapped over in turns: {span(slower('fp6', ('ours', 'turns')))}",
            "h200_ablation.csv: scheme=fp6; decoder=ours; pipeline=turns/implicit",
        ),
        measured(
            "Tensor cores beat CUDA cores, and more so as the batch grows",
            "figure, AWQ's kernel without tensor cores",
            lambda: (
                "time of a kernel on CUDA cores over that of our int4 in groups of 128: "
                + ", ".join(f"M={m} {span(x)}" for m, x in cores(SIMT, "tensor cores").items())
            ),
            "h200_cuda_cores.csv: kernel=CUDA cores fp32/tensor cores",
        ),
        Claim("Any width", "FP6, FP5, FP3", "3 to 8 bits", "h200_gemm.csv: format=fp5"),
        measured(
            "LLaMA-70B on one GPU instead of two, tokens a second and GPU",
            "1.69x to 2.65x",
            lambda: (
                f"{span(gains())} of the most that bf16 reaches on two (half of its layers on one, "
                "and no communication)"
            ),
            "h200_papers_engine.csv: model=llama-3-70b/llama-3-70b-half; kv=model",
        ),
        measured(
            "... its linear layers alone, over cuBLAS on two GPUs",
            "1.20x on average",
            lambda: f"{span(gains('gemm_us'))}, over half of them on one",
            "h200_papers_engine.csv: model=llama-3-70b/llama-3-70b-half; kv=model",
        ),
        *(
            measured(
                f"{named(model).replace('Llama-2', 'LLaMA')} on one GPU",
                theirs,
                lambda model=model: (
                    f"steps over our own bf16, by batch: {by_batch(gains_of(model))}"
                ),
                f"h200_papers_engine.csv: model={model}; format=fp6/bf16; kv=model",
            )
            for model, theirs in (
                ("llama-2-13b", "1.23x"),
                ("opt-30b", "1.91x, 1.84x, 1.72x with batches of 1, 2, 4"),
            )
        ),
        measured(
            "... their linear layers",
            "2.39x (OPT-30B), 2.11x (LLaMA-13B)",
            lambda: "; ".join(linear()),
            "h200_papers_engine.csv: model=opt-30b; format=fp6/bf16; kv=model",
        ),
        measured(
            "The gain grows with the generated length",
            "figure",
            lambda: (
                f"not at a fixed batch: 70B, batch 1: {grows('1')}; batch 64: {grows('64')}. The "
                "paper's batches shrink as the cache grows, and its steps hold prompts, too"
            ),
            "h200_papers_engine.csv: model=llama-3-70b/llama-3-70b-half; kv=model; batch=1/64",
        ),
        Claim(
            "A library with a C++ interface, in place of cuBLAS, and one that packs weights",
            ".so",
            "in Python: `anybit.linear`, and a torch operator; weights are packed when loaded",
            "docs/api.md, anybit/nn/op.py",
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
            "built from its sources for the H200; our speed over its: "
            + ", ".join(f"M={m} {span(over_paper('fp6_llm', 'fp6', 'fp6', m))}" for m in MS),
            "h200_paper_kernels.csv: peer=fp6_llm; format=fp6; M=1/16/64/256, " + OWN,
        ),
    ]
