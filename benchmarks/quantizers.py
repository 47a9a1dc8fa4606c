"""Perplexity, KL and agreement of models/pico for every quantizer and a choice of formats.

Calibrated on standard library modules ("code") or on the language reference's prose ("prose"),
scored on other modules. On a CPU with 16 cores:

    python benchmarks/quantizers.py --jobs 16 --out benchmarks/results/quantizers.csv
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import anybit  # noqa: E402
from anybit import GPTQ, HQQ, RTN, Calibration, Clip, Smooth  # noqa: E402
from anybit.evaluate.corpus import calibration_text, held_out_text, module_path  # noqa: E402
from anybit.evaluate.perplexity import score  # noqa: E402

PICO = ROOT / "models" / "pico"
WINDOW, DOCUMENT = 512, 4000  # tokens
SPECS = {
    "int4": "rtn clip hqq gptq gptq:prose gptq:noclip smooth",
    "int4:group=128": "rtn clip hqq gptq gptq:prose gptq:noclip gptq:natural smooth smooth+gptq",
    "int4:group=64,zero": "rtn clip hqq gptq",
    "int3": "rtn clip hqq gptq gptq:prose gptq:noclip gptq:natural smooth smooth+gptq",
    "int3:group=64": "rtn clip hqq gptq",
    "int2:group=32,zero": "rtn clip hqq gptq",
    "fp6": "rtn clip hqq gptq smooth",
    "fp5": "rtn clip hqq gptq smooth",
    "fp4": "rtn clip gptq",
    "sparse": "rtn gptq",
    "liquid": "rtn clip gptq smooth smooth+clip smooth+gptq",
    "liquid@int8": "rtn clip gptq smooth smooth+clip smooth+gptq",
    "int4:group=128@int8": "rtn smooth smooth+gptq",
    "int8@int8": "rtn smooth",
}


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(PICO)


def dense() -> Any:
    return AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32).eval()


@cache
def documents(total: int) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    for _, text in held_out_text():
        if sum(map(len, out)) < total:
            out.append(torch.tensor(tokenizer()(text, verbose=False).input_ids[:DOCUMENT]))
    return out


def calibration(kind: str) -> Calibration:
    if kind == "prose":
        texts = [module_path("pydoc_data.topics").read_text("utf-8")]
    else:
        texts = [text for _, text in calibration_text()]
    return Calibration(texts, samples=128, length=WINDOW, tokenizer=tokenizer())


def quantizer_of(name: str) -> Any:
    first, _, kind = name.partition(":")
    text = calibration(kind) if first not in ("rtn", "clip", "hqq") else None
    flags = {"noclip": {"clip": False}, "natural": {"act_order": False}}.get(kind, {})
    return {
        "rtn": RTN,
        "clip": Clip,
        "hqq": HQQ,
        "gptq": lambda: GPTQ(text, **flags),
        "smooth": lambda: Smooth(text),
        "smooth+clip": lambda: Smooth(text, then=Clip()),
        "smooth+gptq": lambda: Smooth(text, then=GPTQ()),
    }[first]()


def measure(spec: str, name: str, tokens: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, start = dense(), time.perf_counter()
    if name != "dense":
        anybit.quantize_(model, spec, quantizer_of(name), show_progress=False)
    seconds = time.perf_counter() - start
    result = score(model, documents(tokens), window=WINDOW, stride=WINDOW * 3 // 4, dense=dense())
    return {
        "spec": spec,
        "quantizer": name,
        "perplexity": round(result.perplexity, 4),
        "perplexity_error": round(result.perplexity_error, 4),
        "kl": round(result.kl or 0.0, 5),
        "agreement": round(result.agreement or 0.0, 4),
        "seconds": round(seconds, 1),
    }


def rows(jobs: int, tokens: int) -> Iterator[dict[str, Any]]:
    cases = [("-", "dense")] + [(s, q) for s, names in SPECS.items() for q in names.split()]
    cases.sort(key=lambda case: ("gptq" not in case[1], "smooth" not in case[1]))  # longest first
    with ProcessPoolExecutor(jobs) as pool:
        for future in as_completed(pool.submit(measure, *case, tokens) for case in cases):
            yield future.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each (2)")
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens to score (60000)")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to write")
    args = parser.parse_args()
    done = []
    for row in rows(args.jobs, args.tokens):
        print(*row.values(), flush=True)
        done.append(row)
    done.sort(key=lambda row: list(SPECS).index(row["spec"]) if row["spec"] != "-" else -1)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*done[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(done)


if __name__ == "__main__":
    main()
