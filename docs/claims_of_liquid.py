"""What LiquidGEMM and LiquidServe claim."""

from claims import BIG, WEIGHTS, Claim, best, found, lost, one, span

from anybit.planning.cost_model import DEVICES, cost, instructions, threshold

GEMM = "h200_gemm.csv: peer=anybit-hopper; activation=int8-given; format="
PIPELINES = "h200_ablation.csv: scheme=liquid@int8"
ENGINE = "h200_engine.csv: model="
CACHE = "cpu_kv_scales.csv: weights="
SYSTEMS = "not run: needs its kernels built on a GPU"


def w8(m: int) -> list[float]:
    """Speed over our own int8 weights, for the four weights."""
    return [
        best("int8", m, shape, "int8-given") / best("liquid", m, shape, "int8-given")
        for shape in WEIGHTS
    ]


def pipeline(of: str, to: str) -> list[float]:
    times = {(r["M"], r["pipeline"]): float(r["us"]) for r in found(PIPELINES)}
    return [times[m, to] / times[m, of] for m in {m for m, _ in times}]


def peak(model: str, spec: str, kv: str) -> tuple[float, str]:
    """Most output tokens a second of the batches that fit into 80 GB, and that batch."""
    rows = found(f"{ENGINE}{model}; format={spec}; kv={kv}")
    fits = [r for r in rows if int(r["batch"]) <= int(r["batch_in_80gb"])]
    top = max(fits, key=lambda r: float(r["whole_tokens_per_s"]))
    return float(top["whole_tokens_per_s"]), top["batch"]


def peaks(model: str, name: str) -> str:
    (ours, n), (dense, k) = peak(model, "liquid@int8", "int8"), peak(model, "bf16", "model")
    return f"{name} {ours:,.0f} ({n}) to bf16's {dense:,.0f} ({k}), {ours / dense:.2f}x"


def at_batch(model: str, batch: int) -> float:
    ours, dense = (
        one(f"{ENGINE}{model}; format={f}; kv={kv}; batch={batch}", "tokens_per_s")
        for f, kv in (("liquid@int8", "int8"), ("bf16", "model"))
    )
    return ours / dense


def share(model: str, batch: int) -> float:
    """The part of bf16's decode step that GEMMs take."""
    row = found(f"{ENGINE}{model}; format=bf16; kv=model; batch={batch}")[0]
    gemm, attention, rest = (float(row[f"{part}_us"]) for part in ("gemm", "attention", "rest"))
    return gemm / (gemm + attention + rest)


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
            "Instructions a weight that hide behind loading, H100",
            "5.07",
            f"{alpha:.2f}",
            "anybit/planning/cost_model.py",
        ),
        Claim(
            "Equation 6 predicts times",
            "used for design",
            f"time over prediction, all overlapped: {span(map(predicted, (1, 4, 16)))} up to 16 "
            f"tokens, {predicted(64):.2f}x at 64, {span(map(predicted, (128, 256, 1024)))} beyond",
            GEMM + "liquid; N=28672, anybit/measure/roofline.py",
        ),
        Claim(
            "QServe's dequantization costs 21 % of stalls", "profile", "", SYSTEMS + " (QServe's)"
        ),
        Claim(
            "LiquidQuant alone (figure 13)",
            "up to 1.29x",
            "",
            "not run: needs a kernel with QServe's dequantization as the baseline",
        ),
        Claim(
            "Explicit pipeline (ExCP) over none",
            "slower for few tokens, faster for many",
            f"slower everywhere: {span(pipeline('explicit', 'turns'))}",
            PIPELINES + "; pipeline=explicit/turns",
        ),
        Claim(
            "Implicit pipeline (ImFP) over none",
            "faster at all sizes",
            f"{span(pipeline('implicit', 'turns'))}; our baseline overlaps two warpgroups already",
            PIPELINES + "; pipeline=implicit/turns",
        ),
        Claim("... with experts", "the largest gain", "", "not run: no such ablation on a GPU yet"),
        Claim("Dual-MMA layout", "LDS.128", "16 bytes a thread", "anybit/kernels/cute/pack.py"),
        Claim(
            "Kernel over QServe's, 256 tokens",
            "2.75x (7B), 2.87x (13B), 2.90x (70B)",
            "",
            SYSTEMS + " (QServe's)",
        ),
        Claim(
            "Kernel over TensorRT-LLM's",
            "1.12x to 1.63x",
            "",
            "not run: needs TensorRT-LLM; cuBLAS fp8 stands in the table of times",
        ),
        Claim(
            "Faster than W8A8 for few tokens, level for many",
            "predicted, and measured",
            f"over our int8@int8: {span(w8(1) + w8(16))} up to 16 tokens, {span(w8(64))} at 64, "
            f"{span(w8(256) + w8(1024))} at 256 and 1,024",
            GEMM + "liquid/int8; M=1/16/64/256/1024",
        ),
        Claim(
            "Layers of LLaMA-2-7B, 13B, 70B (figures 5, 12)",
            "all GEMMs of a layer, M = 4 to 256",
            "",
            "not run: the shapes of Llama-3-8B alone were timed",
        ),
        Claim(
            "Mixtral, beyond 32 tokens, over TensorRT-LLM's FP8 and W4A16",
            "1.41x to 1.84x, 1.12x to 2.53x",
            f"over our int8@int8: {span(experts(m) for m in (32, 64, 128, 256))}, one projection",
            "h200_experts.csv: peer=anybit-hopper; format=liquid/int8; M=32/64/128/256",
        ),
        Claim(
            "GEMMs take most of a step (figure 4)",
            "over 20 % even with large batches and 1,024 tokens",
            f"bf16, 1,280 tokens: {share('llama-2-7b', 16):.0%} with 16 sequences, "
            f"{share('llama-2-7b', 128):.0%} with 128 (7B shapes)",
            ENGINE + "llama-2-7b; format=bf16; kv=model; batch=16/128",
        ),
        Claim(
            "Peak tokens a second in 80 GB (table 1)",
            "up to 4.94x QServe, 1.63x TensorRT-LLM",
            f"over our bf16, sequences in brackets: {peaks('llama-2-7b', '7B')}; "
            f"{peaks('llama-3-8b', '8B')}; up to 256 sequences were run",
            ENGINE + "llama-2-7b/llama-3-8b; format=liquid@int8/bf16",
        ),
        Claim(
            "The same batch (figure 11)",
            "fastest at 16 and 128",
            f"over our bf16: {at_batch('llama-2-7b', 16):.2f}x and "
            f"{at_batch('llama-2-7b', 128):.2f}x (7B shapes, INT8 cache)",
            ENGINE + "llama-2-7b; format=liquid@int8/bf16; batch=16/128",
        ),
        Claim(
            "W4A8 beats W8A8 and FP8 in a system", "yes", "", "not run: needs engine rows on a GPU"
        ),
        Claim("With another kernel (LiquidServe/wo)", "1.13x to 1.98x slower", "", SYSTEMS),
        Claim(
            "Static INT8 KV cache, a scale for each channel",
            "the default",
            f"loss on pico {lost(CACHE + 'fp32; cache=int8 by channels (code)', digits=5)}; a "
            f"scale for each token, as is our default, "
            f"{lost(CACHE + 'fp32; cache=int8 by tokens', digits=5)}",
            CACHE + "fp32; cache=int8 by channels (code)/int8 by tokens",
        ),
        Claim("... its time", "", "", "not run: only scales for each token were timed on a GPU"),
        Claim(
            "Accuracy is kept",
            "models of 7B to 70B; figures in a report to come",
            "smoothing and GPTQ: loss "
            f"{lost('h200_accuracy.csv: model=study-105m; spec=liquid@int8; method=smooth+gptq')}",
            "h200_accuracy.csv: model=study-105m; spec=liquid@int8; method=smooth+gptq",
        ),
        Claim("SmoothQuant with a grid search", "yes", "yes", "anybit/quantizers/smooth.py"),
    ]
