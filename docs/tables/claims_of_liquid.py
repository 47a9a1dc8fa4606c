"""What LiquidGEMM and LiquidServe claim."""

from claims import (
    BIG,
    WEIGHTS,
    Claim,
    best,
    by_batch,
    found,
    lost,
    measured,
    one,
    over_paper,
    span,
)
from paper_tables import (
    NAMES,
    ablation,
    caches,
    named,
    over_best,
    over_layers,
    ratios,
    slower,
    steps,
    sums,
    system,
    timed,
    without,
)
from results import Missing

from anybit.planning.cost_model import DEVICES, cost, instructions, threshold

GEMM = "h200_gemm.csv: peer=anybit-hopper; activation=int8-given; format="
PIPELINES = "h200_ablation.csv: scheme=liquid@int8; experts="
LAYERS = "h200_layers.csv: model=llama-2-7b/llama-2-13b/llama-2-70b/llama-3-8b; format="
SYSTEM = "h200_papers_engine.csv: model="
ENGINE = "h200_engine.csv: model="
DENSE = ENGINE + "llama-2-7b; format=bf16; kv=model; batch="
SHORT = SYSTEM + "llama-3-70b-half; format=bf16; kv=model; context="
MOE = SYSTEM + "mixtral-8x7b; format=liquid@int8; kv=int8; context=1280; batch="
CACHE = "cpu_kv_scales.csv: weights="
RUN = "llama-3-8b"
LAYERS_OF = {RUN: 32, "llama-2-7b": 32, "llama-2-13b": 40, "llama-2-70b": 80}


def w8(m: int) -> list[float]:
    """Speed over our own int8 weights, for the four weights."""
    return [
        best("int8", m, shape, "int8-given") / best("liquid", m, shape, "int8-given")
        for shape in WEIGHTS
    ]


def peaks() -> str:
    """Of every model that was run, by the best of other formats."""
    out = [f"{name} {x:.2f}x" for model, name in NAMES.items() if (x := over_best(model))]
    if not out:
        raise Missing("no peaks")
    return ", ".join(out)


def by_layers(other: str, m: int) -> str:
    """liquid's speed in all products of a layer, over another format's."""
    return span(over_layers(other, "liquid@int8", m))


def qserve(m: int, fmt: str = "int4:group=128") -> list[float]:
    """Our speed over its kernel's, for the four weights."""
    return over_paper("qserve", fmt, "liquid", m, "int8-given")


def at_batch(model: str, batch: int) -> float:
    ours, dense = (
        one(f"{ENGINE}{model}; format={f}; kv={kv}; batch={batch}", "tokens_per_s")
        for f, kv in (("liquid@int8", "int8"), ("bf16", "model"))
    )
    return ours / dense


def with_int8(batch: int) -> dict[str, float]:
    """liquid's steps with int8's products, as timed in a layer, over its own, by model."""
    out = {}
    for model, count in LAYERS_OF.items():
        wanted = (model, "liquid@int8", "int8", str(batch), "1280")
        step = steps().get(wanted) or steps("h200_engine").get(wanted)
        if step:
            int8, ours = (sums()[model][spec][batch] for spec in ("int8@int8", "liquid@int8"))
            out[model] = 1 + count * (int8 - ours) / float(step["step_us"])
    return out


def same_batch(batch: int) -> str:
    """`with_int8`, but of the model where both were run."""
    found = with_int8(batch).items()
    return f"{batch} sequences " + ", ".join(f"{NAMES[m]} {x:.2f}x" for m, x in found if m != RUN)


def gemms(other: str) -> dict[str, float]:
    """Speed of the products of liquid's large steps over another format's, 8B, INT8 caches."""
    found = ratios(("llama-3-8b", other, "int8"), ("llama-3-8b", "liquid@int8", "int8"), "gemm_us")
    return {batch: found[batch] for batch in ("256", "512") if batch in found}


def share(place: str) -> str:
    """The part of a decode step that GEMMs take."""
    row = found(place)[0]
    gemm, attention, rest = (float(row[f"{part}_us"]) for part in ("gemm", "attention", "rest"))
    return f"{gemm / (gemm + attention + rest):.0%}"


def stalls() -> str:
    """What sums of bytes take of its kernel's time, by tokens."""
    parts: dict[str, list[float]] = {}
    for row in found("h200_stalls.csv: kernel=qserve"):
        share = 100 * int(row["samples_of_sums"]) / int(row["samples"])
        parts.setdefault(row["M"], []).append(share)
    return "on an H200, of the samples of its kernel in the FFN of 7B: " + ", ".join(
        f"M={m} {span(some, ' %', 0)}" for m, some in parts.items()
    )


def predicted(m: int) -> float:
    """Time over the cost model's for the largest weight."""
    alpha = instructions("liquid@int8")
    time = cost(DEVICES["h200"], m, *BIG, 4.25, "int8", alpha)
    return best("liquid", m, BIG, "int8-given") * 1e-6 / time.seconds


def experts(m: int) -> float:
    rows = "h200_experts.csv: peer=anybit-hopper; activation=int8-given"
    int8, ours = (one(f"{rows}; format={f}; M={m}", "us") for f in ("int8", "liquid"))
    return int8 / ours


def liquid() -> list[Claim]:
    h100, a100 = DEVICES["h100"], DEVICES["a100"]
    tokens = [threshold(h100, 4, "int8"), threshold(h100, 8, "int8"), threshold(a100, 8, "int8")]
    alpha = h100.alu * 4 / 8 / h100.bandwidth
    return [
        Claim(
            "Two levels, within 119 (equations 1, 2, 8 to 12)",
            "yes",
            "the same; all codes, steps and minima are tested",
            "anybit/formats/liquid.py, tests/test_formats.py",
        ),
        Claim(
            "Step of a group (equation 7)",
            "range / 15, rounded to nearest",
            "the smallest that clips nothing, range / 15.5 rounded up",
            "anybit/formats/liquid.py",
        ),
        Claim(
            "Instructions that decode eight weights",
            "7",
            f"{8 * instructions('liquid@int8'):.0f} counted, 53 / 8 = 6.6 compiled, with addresses",
            "docs/kernels.md",
        ),
        Claim(
            "Tokens from which tensor cores are the limit: W4A8 and W8A8 on H100, W8A8 on A100",
            "150, 300, 156",
            ", ".join(f"{t:.0f}" for t in tokens),
            "anybit/planning/cost_model.py, tests/test_cost_model.py",
        ),
        Claim(
            "Instructions a weight that hide behind loading, and behind 150 tokens' products, H100",
            "5.07, 5.05",
            f"{alpha:.2f}, {150 * 2 * h100.alu / h100.mma['int8']:.2f}",
            "anybit/planning/cost_model.py",
        ),
        Claim(
            "Equation 6 predicts times",
            "used for design",
            f"time over prediction, all overlapped: {span(map(predicted, (1, 4, 16)))} up to 16 "
            f"tokens, {predicted(64):.2f}x at 64, {span(map(predicted, (128, 256, 1024)))} beyond",
            GEMM + "liquid; N=28672, anybit/measure/roofline.py",
        ),
        measured(
            "The subtraction of QServe's dequantization (vadd) causes 21 % of warp stalls",
            "profile, Nsight",
            stalls,
            "h200_stalls.csv: kernel=qserve",
        ),
        measured(
            "LiquidQuant alone (figure 13)",
            "up to 1.29x",
            lambda: (
                "over QServe's order, products and then sums of bytes without carries: in turns "
                f"{span(ablation('liquid@int8', ('lanes', 'turns'), ('ours', 'turns')))}, in the "
                f"shipped pipeline {span(slower('liquid@int8', ('lanes', 'implicit')))}"
            ),
            PIPELINES + "0; decoder=lanes/ours; pipeline=turns/implicit",
        ),
        measured(
            "Explicit pipeline (ExCP) over none",
            "slower for few tokens, faster for many",
            lambda: span(ablation("liquid@int8", ("ours", "turns"), ("ours", "explicit"))),
            PIPELINES + "0; decoder=ours; pipeline=explicit/turns",
        ),
        measured(
            "Implicit pipeline (ImFP) over none",
            "faster at all sizes",
            lambda: (
                f"{span(slower('liquid@int8', ('ours', 'turns')))}; our baseline overlaps two "
                "warpgroups already"
            ),
            PIPELINES + "0; decoder=ours; pipeline=implicit/turns",
        ),
        measured(
            "... with experts",
            "the largest gain",
            lambda: (
                "8 experts of 14336x4096: explicit "
                f"{span(ablation('liquid@int8', ('ours', 'turns'), ('ours', 'explicit'), 8))}, "
                f"implicit {span(slower('liquid@int8', ('ours', 'turns'), 8))}, LiquidQuant "
                f"{span(ablation('liquid@int8', ('lanes', 'turns'), ('ours', 'turns'), 8))}"
            ),
            PIPELINES + "8",
        ),
        Claim(
            "Weights are the left operand, in a persistent kernel",
            "ping-pong",
            "the left operand, too; persistent where CTAs have equal shares of all tiles; two "
            "warpgroups share a tile",
            "anybit/kernels/hopper/gemm.py, anybit/kernels/hopper/shares.py",
        ),
        Claim("Dual-MMA layout", "LDS.128", "16 bytes a thread", "anybit/kernels/cute/pack.py"),
        Claim(
            "Kernel over QServe's, 256 tokens",
            "2.75x (7B), 2.87x (13B), 2.90x (70B)",
            "its W4A8 kernels in groups of 128, four weights of 8B: "
            + ", ".join(f"M={m} {span(qserve(m))}" for m in (1, 16, 64, 256))
            + f"; with one scale a row, M=256 {span(qserve(256, 'int4'))}",
            "h200_paper_kernels.csv: peer=qserve; M=1/16/64/256, " + GEMM + "liquid; M=1/16/64/256",
        ),
        Claim(
            "Kernel over TensorRT-LLM's",
            "1.12x to 1.63x",
            "",
            "not run: TensorRT-LLM was not at hand; cuBLAS fp8 stands in the table of times",
        ),
        Claim(
            "Faster than W8A8 for few tokens, level for many",
            "predicted, and measured",
            f"over our int8@int8: {span(w8(1) + w8(16))} up to 16 tokens, {span(w8(64))} at 64, "
            f"{span(w8(256) + w8(1024))} at 256 and 1,024",
            GEMM + "liquid/int8; M=1/16/64/256/1024",
        ),
        measured(
            "Layers of LLaMA-2-7B, 13B, 70B (figures 5, 12)",
            "W4A8 fastest or level, M = 4 to 256",
            lambda: (
                f"{', '.join(map(named, timed('liquid@int8')))}: over our int8@int8 "
                + ", ".join(f"M={m} {by_layers('int8@int8', m)}" for m in (4, 64, 256))
                + "; over cuBLAS fp8 "
                + ", ".join(f"M={m} {by_layers('cublas fp8', m)}" for m in (4, 64, 256))
            ),
            LAYERS + "liquid@int8/int8@int8/cublas fp8; M=4/64/256",
        ),
        Claim(
            "Mixtral, beyond 32 tokens, over TensorRT-LLM's FP8 and W4A16",
            "1.41x to 1.84x, 1.12x to 2.53x; slower below 32",
            f"over our int8@int8: {span(experts(m) for m in (32, 64, 128, 256))}, one projection",
            "h200_experts.csv: peer=anybit-hopper; format=liquid/int8; M=32/64/128/256",
        ),
        Claim(
            "GEMMs take most of a step (figure 4)",
            "over 20 % even with large batches and 1,024 tokens",
            f"7B shapes in bf16, 1,280 tokens: {share(DENSE + '16')} with 16 sequences, "
            f"{share(DENSE + '128')} with 128",
            DENSE + "16/128",
        ),
        measured(
            "... and more with 128 tokens in and out than with 1,024",
            "figure",
            lambda: (
                "not run so short; half of the layers of Llama-3-70B in bf16: 64 sequences "
                f"{share(SHORT + '640; batch=64')} with 640 tokens, "
                f"{share(SHORT + '2560; batch=64')} with 2,560; 16 sequences "
                f"{share(SHORT + '640; batch=16')} and {share(SHORT + '2560; batch=16')}"
            ),
            SHORT + "640/2560; batch=16/64",
        ),
        measured(
            "... and in all steps of Mixtral-8x7B",
            "figure, FP8",
            lambda: (
                "liquid@int8 with an INT8 cache, 1,280 tokens: "
                f"{share(MOE + '16')} with 16 sequences, {share(MOE + '128')} with 128, "
                f"{share(MOE + '496')} with 496"
            ),
            MOE + "16/128/496",
        ),
        measured(
            "Peak tokens a second in 80 GB (table 1)",
            "up to 4.94x QServe, 1.63x TensorRT-LLM",
            lambda: f"over the best of our bf16, fp8@fp8 and int8@int8 that ran: {peaks()}",
            ENGINE + "llama-2-7b/llama-3-8b; format=liquid@int8/bf16, "
            "h200_papers_engine.csv: format=liquid@int8/int8@int8/fp8@fp8/bf16; kv=int8",
        ),
        measured(
            "GEMMs of a layer at the peaks (figure 10)",
            "1.90x QServe, up to 1.58x TensorRT-LLM (7B); level with its FP8 (8B)",
            lambda: (
                f"8B, by batch, over our int8@int8 {by_batch(gemms('int8@int8'))}; over fp8@fp8 "
                f"{by_batch(gemms('fp8@fp8'))}"
            ),
            SYSTEM + "llama-3-8b; format=liquid@int8/int8@int8/fp8@fp8; kv=int8; batch=256/512",
        ),
        Claim(
            "The same batch (figure 11)",
            "fastest at 16 and 128",
            f"over our bf16: {at_batch('llama-2-7b', 16):.2f}x and "
            f"{at_batch('llama-2-7b', 128):.2f}x (7B shapes, INT8 cache)",
            ENGINE + "llama-2-7b; format=liquid@int8/bf16; batch=16/128",
        ),
        measured(
            "... over W8A8, more models",
            "fastest",
            lambda: (
                "computed, from steps in which int8's products take the place of liquid's: "
                f"{same_batch(16)}; {same_batch(128)}. For 8B this gives "
                f"{with_int8(16)[RUN]:.2f}x and {with_int8(128)[RUN]:.2f}x, and "
                f"{system('int8@int8')['16']:.2f}x and {system('int8@int8')['128']:.2f}x were "
                "measured, so 1.03x is level; of several runs"
            ),
            LAYERS + "liquid@int8/int8@int8; M=16/128, "
            "h200_papers_engine.csv: format=liquid@int8; kv=int8; batch=16/128, "
            + ENGINE
            + "llama-2-7b; format=liquid@int8; kv=int8; batch=16/128",
        ),
        measured(
            "W4A8 beats W8A8 in a system",
            "yes",
            lambda: (
                "decode steps of 8B shapes, INT8 cache, over int8@int8 by batch: "
                f"{by_batch(system('int8@int8'))}"
            ),
            SYSTEM + "llama-3-8b; format=liquid@int8/int8@int8; kv=int8; context=1280",
        ),
        measured(
            "... and FP8",
            "yes",
            lambda: f"the same over fp8@fp8: {by_batch(system('fp8@fp8'))}",
            SYSTEM + "llama-3-8b; format=fp8@fp8; kv=int8; context=1280",
        ),
        measured(
            "With another kernel (LiquidServe/wo)",
            "1.13x to 1.98x slower",
            lambda: f"with our Triton kernels, 8B, by batch: {by_batch(without())}",
            SYSTEM + "llama-3-8b; format=liquid@int8; kv=int8; context=1280",
        ),
        Claim(
            "Static INT8 KV cache, a scale for each channel",
            "the default",
            f"loss on pico {lost(CACHE + 'fp32; cache=int8 by channels (code)', digits=5)}; a "
            f"scale for each token, as is our default, "
            f"{lost(CACHE + 'fp32; cache=int8 by tokens', digits=5)}",
            CACHE + "fp32; cache=int8 by channels (code)/int8 by tokens",
        ),
        measured(
            "... its time",
            "",
            lambda: (
                "decode steps with scales of channels over those with scales of tokens, by batch: "
                f"{by_batch(caches('int8-static', 'int8', 'step_us'))}"
            ),
            SYSTEM + "llama-3-8b; format=liquid@int8; kv=int8/int8-static",
        ),
        Claim(
            "Accuracy is kept",
            "models of 7B to 70B; figures in a report to come",
            "smoothing and GPTQ: loss "
            f"{lost('h200_accuracy.csv: model=study-105m; spec=liquid@int8; method=smooth+gptq')}; "
            "no published model was at hand",
            "h200_accuracy.csv: model=study-105m; spec=liquid@int8; method=smooth+gptq",
        ),
        Claim(
            "PagedAttention, FlashAttention-2; tokens quantized inside other kernels",
            "yes",
            "yes, in Triton",
            "anybit/kernels/triton/attention.py, anybit/kernels/triton/activation.py",
        ),
        Claim("SmoothQuant with a grid search", "yes", "yes", "anybit/quantizers/smooth.py"),
    ]
