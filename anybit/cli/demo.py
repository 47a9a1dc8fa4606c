"""`anybit demo`: one real model in every family of formats, measured, saved and loaded again."""

import copy
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from torch import Tensor
from torch.nn import Linear

import anybit
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.evaluate.corpus import held_out_text
from anybit.evaluate.model import context_of, encode, load_text_model
from anybit.evaluate.perplexity import Remembered, excerpts, score
from anybit.files.picture import require_matplotlib
from anybit.kernels.processor import processor
from anybit.nn.model import quantized_layers
from anybit.nn.plan import resolve
from anybit.progress import Progress, progress

FORMATS = (
    "int8",
    "int4",
    "int3",
    "int2",
    "fp6",
    "fp5",
    "fp4",
    "liquid",
    "sparse",
    "codebook:m=1,v=4",
    "codebook:m=2,v=8",
    "int4:group=64,zero",
    "int3:group=64,zero",
    "int2:group=64,zero",
)
LEGEND = (
    "bits: per weight of the quantized layers, with scales. MB: the whole checkpoint. KL: nats per "
    "token. top-1: positions with the same likeliest token. Speed is not shown: this model is too "
    "small for it; `anybit bench` times layers."
)
SAVED = "fp6"  # the format of the checkpoint that is kept
WRITTEN = 20  # tokens of the example
PROMPT = '''\
import json

def load_config(path):
    """Load the configuration from a JSON file."""
    if not os.path.exists(path):'''

FRESH = """\
import sys
import anybit
from transformers import AutoModelForCausalLM, AutoTokenizer

path, prompt, tokens = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)
inputs = tokenizer(tokenizer.bos_token + prompt, return_tensors="pt")
ids = model.generate(**inputs, max_new_tokens=int(tokens), do_sample=False)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""


@dataclass(frozen=True)
class Row:
    """The figures of one format, or of the dense model (spec "bf16").

    bits: stored bits per weight over the quantized layers, scales and tables included. bytes: size
    of the checkpoint's tensors on disk. kl: nats per token. text: what the model writes behind the
    prompt of `Results`, greedily.
    """

    spec: str
    bits: float
    bytes: int
    perplexity: float
    perplexity_error: float
    kl: float
    agreement: float
    text: str


@dataclass(frozen=True)
class Results:
    """All figures of a run, the dense model's row first, and what they depend on."""

    model: str
    parameters: int
    documents: int
    tokens: int
    window: int
    python: str
    torch: str
    processor: str
    threads: int
    rows: list[Row]
    prompt: str
    saved: str
    completion: str


def demo(formats: Sequence[str], tokens: int, out: Path, console: Console | None = None) -> Results:
    """Quantize models/pico to each format, measure, save, load in a fresh process.

    tokens: held-out tokens that every format is scored on, at most. out: gets `results.json`,
    `size_vs_kl.png` and the checkpoint `fp6`, replacing those of an earlier run.

    Raises FileNotFoundError without models/pico, ValueError for an unknown format, ImportError
    without matplotlib, all before anything is measured.
    """
    console = console or Console()
    path = pico()
    require_matplotlib()
    dense, tokenizer = load_text_model(path, "cpu")
    shapes = {n: tuple(m.weight.shape) for n, m in dense.named_modules() if isinstance(m, Linear)}
    for spec in formats:
        resolve(shapes, spec)
    out.mkdir(parents=True, exist_ok=True)

    documents = excerpts([encode(tokenizer, text) for _, text in held_out_text()], tokens)
    total = sum(len(ids) - 1 for ids in documents)
    console.print(
        f"[bold]{path.name}[/]: {dense.num_parameters() / 1e6:.1f} million parameters in "
        f"{dtype_name(dense.dtype)}. Every format is scored on the same {total} tokens of "
        f"{len(documents)} modules of Python's standard library that training left out, against "
        f"the unquantized model.\n{LEGEND}"
    )
    reference = Remembered(copy.deepcopy(dense).float())
    with progress("scoring", total * (1 + len(formats))) as step:
        rows = [
            measure(dense, tokenizer, each, reference, documents, step) for each in (None, *formats)
        ]
    console.print(table(rows))

    checkpoint = out / SAVED
    anybit.save(anybit.quantize_(copy.deepcopy(dense), SAVED), checkpoint, overwrite=True)
    tokenizer.save_pretrained(checkpoint)
    show_texts(rows, console)
    console.print(f"\nSaved {checkpoint}. A fresh process loads it and writes:\n")
    completion = complete_afresh(checkpoint)
    console.print(code(completion))

    results = Results(
        model=path.name,
        parameters=dense.num_parameters(),
        documents=len(documents),
        tokens=total,
        window=context_of(dense),
        python=platform.python_version(),
        torch=torch.__version__,
        processor=processor(),
        threads=torch.get_num_threads(),
        rows=rows,
        prompt=PROMPT,
        saved=SAVED,
        completion=completion,
    )
    (out / "results.json").write_text(json.dumps(asdict(results), indent=2) + "\n")
    plot(rows, out / "size_vs_kl.png")
    console.print(f"\nWrote {out}/size_vs_kl.png and {out}/results.json.")
    return results


def show_texts(rows: Sequence[Row], console: Console) -> None:
    """Print each text once, with the formats that write it."""
    console.print("\nGreedy completions of the same prompt:\n")
    console.print(code(PROMPT))
    for text in dict.fromkeys(row.text for row in rows):
        console.print(f"\n[bold]{', '.join(row.spec for row in rows if row.text == text)}[/]")
        console.print(code(text))


def measure(
    dense: Any,
    tokenizer: Any,
    spec: str | None,
    reference: Remembered,
    documents: Sequence[Tensor],
    step: Progress,
) -> Row:
    """The row of one format, or of the dense model itself for spec=None.

    Scores are computed in fp32: in bf16, the rounding of activations alone makes a KL
    divergence of 0.0007, more than int8 weights do.
    """
    name = spec or dtype_name(dense.dtype)
    step(0, name)
    model, bits = copy.deepcopy(dense), dense.dtype.itemsize * 8.0
    if spec:
        anybit.quantize_(model, spec, show_progress=False)
        layers = [layer.packed for _, layer in quantized_layers(model)]
        bits = (
            sum(p.nbytes() for p in layers) * 8 / sum(n * k for n, k in (p.shape for p in layers))
        )
    beginning = encode(tokenizer, PROMPT).tolist()
    size, tokens = stored(model, beginning)
    window = context_of(dense)
    got = score(
        model.float(), documents, window=window, dense=reference, step=lambda n: step(n, name)
    )
    assert got.kl is not None
    assert got.agreement is not None
    return Row(
        name,
        bits,
        size,
        got.perplexity,
        got.perplexity_error,
        got.kl,
        got.agreement,
        tokenizer.decode(tokens, skip_special_tokens=True),
    )


def stored(model: Any, beginning: list[int]) -> tuple[int, list[int]]:
    """Bytes of the model's tensors when it is saved, and what the engine writes with them."""
    with TemporaryDirectory(prefix="anybit-") as folder:
        target = Path(folder, "model")
        model.name_or_path = ""  # whose other files need no copy
        if any(quantized_layers(model)):
            anybit.save(model, target)
        else:
            model.save_pretrained(target)
        size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        llm = LLM(target, max_running=1)
        greedy = SamplingParams(max_tokens=WRITTEN, temperature=0)
        (output,) = llm.generate(beginning, greedy, show_progress=False)
        return size, output.tokens


def complete_afresh(checkpoint: Path) -> str:
    """The prompt and its completion, by a new Python process that knows only the directory."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(checkpoint.resolve()), PROMPT, str(WRITTEN)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
        encoding="utf-8",
    )
    if done.returncode:
        raise ChildProcessError(
            f"a fresh process could not load {checkpoint} (exit code {done.returncode}):\n"
            f"{done.stderr[-2000:]}"
        )
    return done.stdout.strip("\n")


def code(text: str) -> Syntax:
    return Syntax(text.strip("\n"), "python", background_color="default", word_wrap=True)


def pico() -> Path:
    """The directory of the demonstration model, which a clone of the repository holds."""
    beside = Path(anybit.__file__).parent.parent  # the package, in a clone
    found = (root / "models" / "pico" for root in (beside, Path()))
    path = next((path for path in found if (path / "config.json").is_file()), None)
    if path is None:
        raise FileNotFoundError(
            "the demo needs a clone of the repository: its model, models/pico, is not in the "
            "package; run `make demo` in a clone, or `anybit quantize ORG/NAME -o OUT` anywhere"
        )
    return path


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def table(rows: Sequence[Row]) -> Table:
    """The figures of all formats."""
    out = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("format", "bits", "MB", "perplexity", "KL", "top-1"):
        out.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    for row in rows:
        out.add_row(
            row.spec,
            f"{row.bits:.2f}",
            f"{row.bytes / 1e6:.2f}",
            f"{row.perplexity:.3f}" if row.perplexity < 100 else f"{row.perplexity:.4g}",
            f"{row.kl:.5f}",
            f"{row.agreement:.1%}",
        )
    return out


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw KL divergence (log) against bits per weight, every point with its name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 6.0), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in rows[1:]:
        axes.annotate(row.spec, (row.bits, row.kl), (6, 4), textcoords="offset points")
        axes.plot(row.bits, row.kl, "o", color="#2463b0")
    axes.set(
        yscale="log",
        xlabel="stored bits per weight",
        ylabel="KL divergence from bf16, nats per token",
    )
    axes.margins(x=0.09, y=0.09)
    axes.grid(True, color="#e2e2e2")
    figure.savefig(path)
