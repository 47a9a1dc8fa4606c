"""Tables that help to choose: README.md and docs/formats.md."""

from collections.abc import Sequence
from dataclasses import dataclass

from results import FOUR, Row, loss, markdown, read, scheme

from anybit.cli.info import FRACTION
from anybit.core.scheme import parse_scheme

NOT_RUN = "not run"
TEXT = "59957"  # tokens of the text of docs/accuracy.md; older rows are of another text


@dataclass(frozen=True)
class Model:
    """Shapes of a model of two matrices of embeddings and head, in bf16."""

    shapes: Sequence[tuple[int, int]]  # rows and columns of the linear layers of a block
    blocks: int
    dense: int  # weights of the embeddings and the head
    cached: int  # keys and values of a token, all blocks

    def gigabytes(self, spec: str) -> float:
        """Of the weights; norms, a megabyte, are left out."""
        bits = 16.0 * self.dense
        for n, k in self.shapes:
            width = 16.0 if spec == "bf16" else parse_scheme(spec)[0].bits_per_weight((n, k))
            bits += self.blocks * n * k * width
        return bits / 8e9


def llama(hidden: int, heads: int, inner: int, blocks: int, words: int = 128256) -> Model:
    """Heads of 128, and 8 of keys and of values."""
    qkv, out = (128 * (heads + 16), hidden), (hidden, 128 * heads)
    shapes = [qkv, out, (2 * inner, hidden), (hidden, inner)]
    return Model(shapes, blocks, 2 * words * hidden, 2 * 128 * 8 * blocks)


LLAMA_8B = llama(4096, 32, 14336, 32)
LLAMA_70B = llama(8192, 64, 28672, 80)
QWEN3_14B = llama(5120, 40, 17408, 40, words=151936)
QWEN3_32B = llama(5120, 64, 25600, 64, words=151936)


def tables() -> dict[str, str]:
    return {
        "large": large(),
        "beside": beside(),
        "speed": speed(),
        "hardware": hardware(),
        "cards": cards(),
    }


# Quality: two published models, whose files are in 4 bits.

LARGE = (  # what is recommended, best first
    ("bf16", "dense"), ("int8", "gptq"), ("int8", "rtn"), ("fp:e2m3", "gptq"),
    ("fp:e2m3", "rtn"), ("plan:4.5", "gptq"), ("int4:group=64,zero", "gptq"),
    ("liquid@int8", "smooth+gptq"), ("trellis:bits=4,rotate=kn", "gptq+gradients"),
    ("trellis:bits=4,rotate=kn", "gptq"), ("trellis:bits=3,rotate=kn", "gptq+gradients"),
    ("trellis:rotate=kn", "gptq+gradients"), ("trellis:code=look,rotate=kn", "gptq"),
)  # fmt: skip


def studied() -> dict[tuple[str, str], Row]:
    """Rows of the model of 1.5 billion parameters, by format and method."""
    return {(row["spec"], row["method"]): row for row in read("study_qwen2.5-coder-1.5b")}


def large() -> str:
    """That model: what has been measured, and the tasks of the formats that were kept for them."""
    rows, tasks = studied(), read("tasks_qwen2.5-coder-1.5b")
    found, out = [rows[pair] for pair in LARGE if pair in rows], []
    for row in found:
        sizes = [f"{float(row['bits']):.2f}", f"{float(row['gb']):.2f}"]
        scored = [loss(row, found), f"{float(row['kl']):.4f}"]
        cells = [f"`{row['spec']}`", quantizer(row), *sizes, *scored]
        out.append(cells + (task(row, tasks) if tasks else []))
    if not out:
        return ""
    titles = ["format", "quantizer", "bits", "GB", "loss, nats", "KL"]
    titles += ["pass@1, %", "calls, %"] if tasks else []
    return f"{markdown(titles, out, words=2)}\n\n{conditions(found)}"


def quantizer(row: Row) -> str:
    names = {"rtn": "rounded", "dense": "16-bit products"}
    return names.get(row["method"], f"`{row['method']}`")


def task(row: Row, tasks: Sequence[Row]) -> list[str]:
    """Functions that pass and calls that are valid, in percent with standard errors."""
    name = f"{row['spec']}-{row['method']}".translate(str.maketrans(":,=", "---"))
    kept = {one["model"]: one for one in tasks}
    whole = [one for one in tasks if not one["model"].endswith(("-rtn", "-gptq"))]  # the file
    found = whole[0] if row["method"] == "dense" and whole else kept.get(name)
    return ["", ""] if found is None else [percent(found, "pass1"), percent(found, "valid")]


def percent(row: Row, name: str) -> str:
    return f"{100 * float(row[name]):.0f} ± {100 * float(row[name + '_error']):.0f}"


def conditions(rows: Sequence[Row]) -> str:
    """On what a study's rows were measured, in words."""
    sizes = {(-int(row["tokens"]), row["windows"].split()[-1], row["gpu"]) for row in rows}
    said = [f"{-n:,} tokens in windows of {window} ({gpu})" for n, window, gpu in sorted(sizes)]
    said[1:] = [f"with a star {one}" for one in said[1:]]
    samples = {f"{row['samples']} windows of {row['length']}" for row in rows if row["text"]}
    more = "".join(f"; calibrated on {one}" for one in sorted(samples))
    return f"*Half English, half Python: {', '.join(said)}{more}.*"


def published(spec: str, method: str) -> Row | None:
    """The newest row of a published model, uncalibrated or calibrated on code and prose."""
    rows = [
        row
        for row in read("h200_published")
        if (row["spec"], row["method"]) == (spec, method) and row["text"] in ("", "mixed")
    ]
    return min(rows, key=lambda row: row["tokens"] != TEXT, default=None)


FILES = ("Q5_K_M", "Q4_K_M", "IQ4_XS")  # of llama.cpp, of which the table has a line
PACKAGES = ("GPTQModel", "AutoRound")
OURS = "int4:group=64,zero, method gptq, 16 windows of 512"


def beside() -> str:
    """Other tools' files of the same model, and our row on the text of the last of them."""
    out = []
    for row in read("cpu_llama_cpp"):
        if row["file"] in FILES:
            out.append([f"llama.cpp {row['file']}", *scores(row)])
    for row in read("cpu_other_tools"):
        tool = row["tool"].partition(" ")[0]
        if tool in PACKAGES:
            out.append([tool, *scores(row)])
        elif row["format"] == OURS:
            out.append(["anybit, `gptq`", *scores(row)])
    return markdown(["other tools", "bits", "loss, nats", "KL"], out)


def scores(row: Row) -> list[str]:
    return [f"{float(row['bits']):.2f}", *(f"{float(row[name]):.4f}" for name in ("loss", "kl"))]


# Speed: random weights in the shapes of Llama-3-8B.

SPEED = [
    "trellis:code=look@int8", FOUR, "liquid@int8", "trellis:code=look",
    "trellis:bits=3,code=look@int8", "fp6", "bf16",
]  # fmt: skip


def steps(spec: str, batch: str) -> tuple[Row, Row] | None:
    """A decode step of Llama-3-8B's shapes, and that of bf16 in the same run."""
    rows = [
        r for r in read("h200_engine_steps") if (r["model"], r["batch"]) == ("llama-3-8b", batch)
    ]
    found = {scheme(r["format"]): r for r in rows if "+" not in r["format"]}
    if scheme(spec) in found and "bf16" in found:
        return found[scheme(spec)], found["bf16"]
    return None


def rate(spec: str, batch: str = "1") -> str:
    if not (found := steps(spec, batch)):
        return NOT_RUN
    ours, dense = (float(row["step_us"]) for row in found)
    tokens = f"{int(batch) * 1e6 / ours:,.0f}"
    return tokens if spec == "bf16" else f"{tokens} ({dense / ours:.1f}x)"


def speed() -> str:
    out = []
    for spec in SPEED:
        if steps(spec, "1") is None:
            return ""
        sizes = [f"{LLAMA_8B.gigabytes(spec):.1f}", rate(spec), rate(spec, "16")]
        out.append([f"`{spec}`", *sizes])
    return markdown(["8B shapes", "GB", "tokens/s, batch 1", "batch 16"], out)


# What to take.

HARDWARE = [  # hardware and goal, what to add to the format's name, format, its quantizer, runs in
    ("H100 or H200, many users", ", calibrated", "liquid@int8", "smooth+gptq",
     "vLLM's plugin"),
    ("a CPU, or a GPU from Ampere on (untested)", ", calibrated", "int4:group=64,zero", "gptq",
     "vLLM: plugin, or exported"),
    ("8 bits, no data", "", "int8", "rtn", "the same"),
    ("6 bits, no data", "", "fp:e2m3", "rtn", "vLLM's plugin"),
    ("llama.cpp or Ollama", ", calibrated", "int4:group=32", "gptq", "GGUF (Q4_0), exported"),
    ("4 bits, least loss", ", calibrated", "trellis:bits=4,rotate=kn", "gptq", "vLLM's plugin"),
    ("3 bits", ", calibrated", "trellis:bits=3,rotate=kn", "gptq", "the same"),
    ("2 bits, speed", ", calibrated", "trellis:code=look,rotate=kn", "gptq", "the same"),
    ("2 bits, least loss", ", refined", "trellis:rotate=kn", "gptq-gradients+tune", "the same"),
]  # fmt: skip


def hardware() -> str:
    out = []
    for goal, more, spec, method, also in HARDWARE:
        row = published(spec, method)
        if row is None:
            return ""
        sizes = [f"{LLAMA_8B.gigabytes(spec):.1f}", f"{LLAMA_70B.gigabytes(spec):.0f}"]
        large = loss(studied().get((spec, method))).partition(" ")[0]
        star = "" if row["tokens"] == TEXT else "*"
        lost = loss(row).partition(" ")[0] + star
        out.append([goal, f"`{spec}`{more}", large, lost, *sizes, also])
    losses = ["loss, 1.5B", "loss, 135M"]
    titles = ["you have, or want", "use", *losses, "8B, GB", "70B, GB", "also runs in"]
    return markdown(titles, out, words=2)


CARDS = (8, 12, 16, 24, 80)
MODELS = {"8B": LLAMA_8B, "14B": QWEN3_14B, "32B": QWEN3_32B, "70B": LLAMA_70B}
WIDTHS = {  # bits, most first
    "16": "bf16", "8": "int8", "6": "fp:e2m3", "4.4": "int4:group=64,zero",
    "4": "trellis:bits=4,rotate=kn", "3": "trellis:bits=3,rotate=kn", "2": "trellis:rotate=kn",
}  # fmt: skip
TOKENS = 8192  # of a bf16 cache


def cards() -> str:
    """The most bits in which a model fits a card, as `anybit info` counts, and its GB."""
    out = [[f"{card} GB", *(most(model, card) for model in MODELS.values())] for card in CARDS]
    return markdown(["card", *MODELS], out)


def most(model: Model, card: float) -> str:
    left = FRACTION * card - TOKENS * model.cached * 2 / 1e9
    for bits, spec in WIDTHS.items():
        if model.gigabytes(spec) <= left:
            return f"{bits} bits, {model.gigabytes(spec):.1f}"
    return "-"
