"""Tables that help to choose: README.md and docs/formats.md."""

from collections.abc import Sequence

from results import FOUR, M2V8, Row, loss, markdown, read, scheme, score

from anybit.core.scheme import parse_scheme

# Rows, columns and number of the linear layers; what the embeddings and the head hold.
LLAMA_8B = ([(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], 32, 2 * 128256 * 4096)
LLAMA_70B = ([(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)], 80, 2 * 128256 * 8192)
OWN = "study-105m"
SMALL_M2V8 = ("codebook:m=2,v=8,b=8,group=64", "additive")  # groups that its widths bear
NOT_RUN = "not run"


def tables() -> dict[str, str]:
    return {"first": first(), "hardware": hardware()}


def gigabytes(spec: str, model: tuple[Sequence[tuple[int, int]], int, int] = LLAMA_8B) -> float:
    """Of the weights, embeddings and head in bf16; norms, a megabyte, are left out."""
    shapes, layers, dense = model
    bits = 16.0 * dense
    for n, k in shapes:
        width = 16.0 if spec == "bf16" else parse_scheme(spec)[0].bits_per_weight((n, k))
        bits += layers * n * k * width
    return bits / 8e9


def engine(spec: str, batch: str = "1") -> tuple[Row, Row] | None:
    """A decode step of Llama-3-8B's shapes, and that of bf16 in the same run."""
    for run in ("h200_engine_steps", "h200_codebook_engine"):
        rows = [r for r in read(run) if (r["model"], r["batch"]) == ("llama-3-8b", batch)]
        rows = [r for r in rows if "+" not in r["format"] and "aqlm" not in r["backends"]]
        found = {scheme(r["format"]): r for r in rows}
        if scheme(spec) in found and "bf16" in found:
            return found[scheme(spec)], found["bf16"]
    return None


def gpu_speed(spec: str) -> str:
    if not (found := engine(spec)):
        return NOT_RUN
    ours, dense = (float(row["step_us"]) for row in found)
    rate = f"{1e6 / ours:.0f}"
    return rate if spec == "bf16" else f"{rate} ({dense / ours:.1f}x)"


def cpu_speed(spec: str) -> str:
    rows = [r for r in read("cpu_model") if (r["engine"], r["format"]) == ("anybit", spec)]
    return f"{float(rows[0]['decode_tokens_per_s']):.1f}" if rows else NOT_RUN


def real(spec: str, method: str) -> str:
    """The loss of a published model, uncalibrated or calibrated on code and prose."""
    for row in read("h200_published"):
        same = (row["spec"], row["method"]) == (spec, method)
        if same and row["text"] in ("", "mixed"):
            return loss(row).partition(" ")[0]
    return NOT_RUN


FIRST = [  # name; format on the GPU, quantizer; format on SmolLM2, quantizer; format on the CPU
    ("`bf16`", "bf16", "dense", "", "", "bf16"),
    ("`fp6`", "fp6", "rtn", "fp6", "rtn", "fp6"),
    ("`int4`, calibrated", FOUR, "gptq", "int4:group=64,zero", "gptq", "int4:group=64"),
    ("2 bits, calibrated", M2V8, "additive", *SMALL_M2V8, ""),
]


def first() -> str:
    out = []
    for name, spec, method, small, by, cpu in FIRST:
        row = score(spec, method, OWN)
        if row is None or engine(spec) is None:
            return ""
        dense = method == "dense"
        losses = ["0", "0"] if dense else [real(small, by), loss(row).partition(" ")[0]]
        out.append([name, f"{gigabytes(spec):.1f}", *losses, gpu_speed(spec), cpu_speed(cpu)])
    titles = ["8B model", "GB", "loss, SmolLM2-135M", "loss, own 105M", "tokens/s, H200"]
    return markdown([*titles, "tokens/s, 2 CPU cores"], out)


INT4 = ("int4:group=64,zero", "gptq", "*")  # of SmolLM2, for other groups: a star
HARDWARE = [  # hardware and goal, what to use, format, its row of SmolLM2, also runs in
    ("H100 or H200", "`liquid@int8`, calibrated", "liquid@int8", ("liquid@int8", "gptq", ""),
     "vLLM with the plugin"),
    ("another NVIDIA GPU from Ampere on (untested)", f"`{FOUR}`, calibrated", FOUR, INT4,
     "vLLM: plugin, or exported"),
    ("memory for 8 bits, no data", "`int8`", "int8", ("int8", "rtn", ""), "the same"),
    ("less memory, no data", "`fp6`", "fp6", ("fp6", "rtn", ""), "vLLM with the plugin only"),
    ("a CPU", "`int4:group=64`, calibrated", "int4:group=64", INT4, "vLLM: plugin, or exported"),
    ("llama.cpp or Ollama", "`int4:group=32`", "int4:group=32", ("int4:group=32", "rtn", ""),
     "GGUF (Q4_0), exported"),
    ("little memory", "`codebook:m=2,v=8,group=128`, calibrated", M2V8, (*SMALL_M2V8, "*"),
     "vLLM with the plugin only"),
]  # fmt: skip


def hardware() -> str:
    out = []
    for goal, use, spec, (small, method, star), also in HARDWARE:
        sizes = [f"{gigabytes(spec, model):.{d}f}" for model, d in ((LLAMA_8B, 1), (LLAMA_70B, 0))]
        out.append([goal, use, *sizes, real(small, method) + star, also])
    titles = ["you have", "use", "8B, GB", "70B, GB", "loss, SmolLM2", "also runs in"]
    return markdown(titles, out, words=2)
