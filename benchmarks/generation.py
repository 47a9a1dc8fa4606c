"""Tasks that perplexity may hide, by format and quantizer.

The tasks of `anybit/evaluate/tasks`, by their own documents and metrics: the docstring of a
held-out function (ROUGE-L), its body (does it parse?), and which of four lines comes next, all
greedily. And lines whose code is run (`code_tests.py`): written greedily ("line_runs"), and pass@1
and pass@10 of ten texts at temperature 0.8. Each score is compared with bf16's on the same
documents, so that the error of the difference is smaller than that of the score.

The engine has the decoded weights in bf16, the model's own in turn.

    python benchmarks/generation.py models/pico --out benchmarks/results/cpu_generation.csv
"""

import argparse
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import code_tests
import torch
import transformers
from code_tests import Problem
from csv_rows import write_rows
from study import Work, calibrated, decode, parse, when

from anybit import LLM, SamplingParams
from anybit.engine.llm import Output
from anybit.evaluate import harness
from anybit.evaluate.generation import pass_at_k

SAMPLES, TRIES, TEMPERATURE = 16, 10, 0.8
LINE = 48  # tokens of a line at most
CASES = [
    ("bf16", "dense"),
    *((spec, "rtn") for spec in ("fp6", "int4:group=128", "int4")),
    *((spec, f"gptq{text}") for spec in ("int4", "int4:group=128") for text in ("", "/prose")),
    *((spec, "rtn") for spec in ("fp5", "int8")),
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
    """The score of each document of each task; ROUGE where its package is installed."""

    def written(task: str, tokens: int, stop: Sequence[str]) -> list[str]:
        prompts = [llm.encode(doc["text"])[-(llm.length - tokens) :] for doc in docs[task]]
        params = SamplingParams(max_tokens=tokens, temperature=0, stop=stop)
        return [output.text for output in generated(llm, prompts, params)]

    found = {}
    if importlib.util.find_spec("rouge_score"):
        texts = written("python_docstring", 48, ('"""', "\n\n"))
        found["python_docstring"] = [
            local.docstring_rouge(doc, [text])["rougeL"]
            for doc, text in zip(docs["python_docstring"], texts, strict=True)
        ]
    bodies = written("python_parses", 96, ())
    found["python_parses"] = [
        local.function_parses(doc, [body])["parses"]
        for doc, body in zip(docs["python_parses"], bodies, strict=True)
    ]
    return found | {"python_next_line": chosen(llm, local, docs["python_next_line"])}


def chosen(llm: LLM, local: Any, docs: list[dict[str, Any]]) -> list[float]:
    """Whether the true line is the likeliest of those that a document offers."""
    prompts, lengths = [], []
    for doc in docs:
        before = len(llm.encode(doc["text"]))
        for choice in doc["choices"]:
            ids = llm.encode(doc["text"] + choice)
            lengths.append(len(ids) - before)
            prompts.append(ids[-llm.length :])
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    likely = []
    for output, length in zip(generated(llm, prompts, params), lengths, strict=True):
        entries = output.completions[0].prompt_logprobs
        assert entries is not None
        likely.append(sum(entry.logprob for entry in entries[-length:] if entry))
    best = torch.tensor(likely).view(-1, local.CHOICES).argmax(-1).tolist()
    return [float(doc["answer"] == c) for doc, c in zip(docs, best, strict=True)]


def runs(llm: LLM, problems: Sequence[Problem]) -> dict[str, list[float]]:
    """Parts of the lines that pass: written greedily, and by several tries."""
    blanks = [code_tests.blank(p.line) for p in problems]  # which are shown, as a line's end is
    prompts = [
        llm.encode(f"{problem.before}\n{blank}")[-(llm.length - LINE) :]
        for problem, blank in zip(problems, blanks, strict=True)
    ]
    greedy = SamplingParams(max_tokens=LINE, temperature=0, stop="\n")
    sampled = SamplingParams(max_tokens=LINE, temperature=TEMPERATURE, n=TRIES, seed=0, stop="\n")
    jobs = [
        (problem.module, problem.number, blank + completion.text)
        for params in (greedy, sampled)
        for problem, blank, output in zip(
            problems, blanks, generated(llm, prompts, params), strict=True
        )
        for completion in output.completions
    ]
    right = code_tests.passed(jobs)
    most = len(problems)
    counts = [sum(right[at : at + TRIES]) for at in range(most, len(right), TRIES)]
    return {
        "line_runs": [float(r) for r in right[:most]],
        "line_pass@1": [pass_at_k(TRIES, count, 1) for count in counts],
        f"line_pass@{TRIES}": [pass_at_k(TRIES, count, TRIES) for count in counts],
    }


def generated(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Output]:
    """What the engine gives. It must all be there: a text that an error ended would score 0."""
    outputs = llm.generate(prompts, params, show_progress=False)
    for output in outputs:
        for completion in output.completions:
            if completion.error:
                raise SystemExit(f"the engine failed: {completion.error}")
    return outputs


def mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    some = torch.tensor(values, dtype=torch.float64)
    return round(float(some.mean()), 4), round(float(some.std()) / len(some) ** 0.5, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a dense model, such as models/pico")
    parser.add_argument("--limit", type=int, default=200, help="documents of each task at most")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="windows of GPTQ's text")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to write")
    args = parser.parse_args()
    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    local, docs = documents(args.limit)
    problems = code_tests.problems()
    print(f"{len(problems)} lines, {time.perf_counter() - began:.0f} s", flush=True)
    work = Work(args.model, args.device, 24_000, 1, 0, args.samples)
    llm = LLM(args.model, dtype="bfloat16", device=args.device)
    rows, base = [], {}
    for spec, method in CASES:
        if time.perf_counter() - began > args.seconds:
            print("not begun:", spec, method)
            continue
        name, kind, samples = parse(method, args.samples)
        if spec != "bf16":
            model = work.quantize(spec, method)
            decode(model)
            llm.load_weights(model.bfloat16().state_dict().items())
        got = scores(llm, local, docs) | runs(llm, problems)
        base = base or got
        for task, values in got.items():
            value, error = mean(values)
            change, change_error = mean([a - b for a, b in zip(values, base[task], strict=True)])
            row = {
                "model": args.model.name,
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
            print(f"{time.perf_counter() - began:5.0f} s", *row.values(), flush=True)
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
