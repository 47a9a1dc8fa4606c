"""Tasks that perplexity may hide, on models/pico by format and quantizer.

The tasks of `anybit/evaluate/tasks`, by their own documents and metrics: the docstring of a
held-out function (ROUGE-L), its body (does it parse?), and which of four lines comes next. The
engine writes greedily. Each score is compared with bf16's on the same documents, so that the error
of the difference is smaller than that of the score.

    python benchmarks/generation.py --out benchmarks/results/cpu_generation.csv
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from study import ROOT, Work, calibrated, parse, when, write_rows

import anybit
from anybit import LLM, SamplingParams
from anybit.evaluate import harness

SAMPLES = 16
CASES = [
    ("bf16", "dense"),
    *((spec, "rtn") for spec in ("fp6", "fp5", "int4:group=128", "int4")),
    *((spec, f"gptq{text}") for spec in ("int4", "int4:group=128") for text in ("", "/prose")),
    *((spec, "rtn") for spec in ("int8", "int3")),
    *((spec, "gptq") for spec in ("fp6", "fp5")),
]


def documents(limit: int) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    """The module of our tasks, and `limit` documents of each task."""
    spec = importlib.util.spec_from_file_location("local", harness.TASKS / "local.py")
    assert spec is not None
    assert spec.loader is not None
    local = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(local)
    local.split = lambda some: some[:: max(1, len(some) // limit)][:limit]  # no package `datasets`
    makers = {
        "python_docstring": local.docstrings,
        "python_parses": local.functions,
        "python_next_line": local.next_lines,
    }
    return local, {name: make() for name, make in makers.items()}


def scores(llm: LLM, local: Any, docs: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """The score of each document of each task."""

    def written(task: str, tokens: int, stop: Sequence[str]) -> list[str]:
        prompts = [llm.encode(doc["text"])[-(llm.length - tokens) :] for doc in docs[task]]
        params = SamplingParams(max_tokens=tokens, temperature=0, stop=stop)
        return [output.text for output in llm.generate(prompts, params, show_progress=False)]

    texts = written("python_docstring", 48, ('"""', "\n\n"))
    bodies = written("python_parses", 96, ())
    prompts, lengths = [], []
    for doc in docs["python_next_line"]:
        before = len(llm.encode(doc["text"]))
        for choice in doc["choices"]:
            ids = llm.encode(doc["text"] + choice)
            lengths.append(len(ids) - before)
            prompts.append(ids[-llm.length :])
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    likely = []
    for output, length in zip(
        llm.generate(prompts, params, show_progress=False), lengths, strict=True
    ):
        entries = output.completions[0].prompt_logprobs
        assert entries is not None, output.completions[0].error
        likely.append(sum(entry.logprob for entry in entries[-length:] if entry))
    chosen = torch.tensor(likely).view(-1, local.CHOICES).argmax(-1).tolist()
    lines = docs["python_next_line"]
    return {
        "python_docstring": [
            local.docstring_rouge(doc, [text])["rougeL"]
            for doc, text in zip(docs["python_docstring"], texts, strict=True)
        ],
        "python_parses": [
            local.function_parses(doc, [body])["parses"]
            for doc, body in zip(docs["python_parses"], bodies, strict=True)
        ],
        "python_next_line": [
            float(doc["answer"] == c) for doc, c in zip(lines, chosen, strict=True)
        ],
    }


def mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    some = torch.tensor(values, dtype=torch.float64)
    return round(float(some.mean()), 4), round(float(some.std()) / len(some) ** 0.5, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=200, help="documents of each task at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to write")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    pico = ROOT / "models" / "pico"
    local, docs = documents(args.limit)
    work = Work(pico, args.device, 24_000, 1, 0, SAMPLES)
    rows, base = [], {}
    for spec, method in CASES:
        name, kind, samples = parse(method, SAMPLES)
        with tempfile.TemporaryDirectory() as room:
            folder = pico
            if spec != "bf16":
                folder = Path(room)
                anybit.save(work.quantize(spec, method).bfloat16(), folder, overwrite=True)
                work.tokenizer.save_pretrained(folder)
            got = scores(LLM(folder, device=args.device), local, docs)
        base = base or got
        for task, values in got.items():
            value, error = mean(values)
            change, change_error = mean([a - b for a, b in zip(values, base[task], strict=True)])
            row = {
                "model": "pico",
                "spec": spec,
                "method": name,
                "text": kind if calibrated(name) else "",
                "samples": samples if calibrated(name) else 0,
                "task": task,
                "documents": len(values),
                "score": value,
                "score_error": error,
                "change": change,
                "change_error": change_error,
                **when(),
            }
            rows.append(row)
            print(*row.values(), flush=True)
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
