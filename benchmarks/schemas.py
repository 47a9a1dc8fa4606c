"""How many JSON schemas the server takes, whether answers keep to them, and what a mask costs.

DATA is the folder `maskbench/data` of https://github.com/guidance-ai/jsonschemabench: a schema a
file, with answers that are valid or not. Each answer is written token by token, with a mask before
each token. Prints a row: schemas, the share that is taken, valid answers that the grammar takes (of
those whose keys are in the schema's order), invalid ones that it takes, and times.

    python benchmarks/schemas.py DATA --sample 300 --tokenizer models/pico
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoTokenizer

from anybit.engine.structured import Grammars, Structured
from anybit.errors import InvalidInput


def takes(grammars: Grammars, structured: Structured, ids: list[int], masks: list[float]) -> bool:
    """Whether the grammar takes a text. masks: gets seconds of each mask."""
    matcher = grammars.matcher(structured)
    bits = torch.zeros(-(-grammars.vocabulary // 32), dtype=torch.int32)
    for token in ids:
        begun = time.perf_counter()
        matcher.fill(bits)
        masks.append(time.perf_counter() - begun)
        word, bit = divmod(token, 32)
        if matcher.error or not (int(bits[word]) >> bit) & 1:
            return False
        matcher.take(token)
    return matcher.ended or bool(matcher.grammar.is_accepting())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", default="models/pico")
    parser.add_argument("--list", action="store_true", help="print what is refused, and why")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    grammars = Grammars(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
    files = sorted(given.data.glob("*.json"))
    files = random.Random(given.seed).sample(files, min(given.sample, len(files)))
    counts: Counter[str] = Counter()
    masks: list[float] = []
    compiling: list[float] = []
    for file in files:
        try:
            case = json.loads(file.read_text())
        except ValueError:
            continue
        counts["schemas"] += 1
        begun = time.perf_counter()
        try:
            structured = Structured(json=case["schema"])
            grammars.matcher(structured)
        except InvalidInput as error:
            if given.list:
                print(file.name, error)
            continue
        counts["taken"] += 1
        compiling.append(time.perf_counter() - begun)
        for test in case["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            kind = "valid" if test["valid"] else "invalid"
            counts[kind] += 1
            ids = tokenizer.encode(text, add_special_tokens=False)
            took = takes(grammars, structured, ids, masks)
            counts[f"{kind} taken"] += took
            if given.list and took != test["valid"]:
                print(file.name, "takes" if took else "refuses", text[:200])
    schemas, taken = counts["schemas"], counts["taken"]
    print(f"{schemas} schemas, {taken} taken ({taken / schemas:.1%})")
    for kind in ("valid", "invalid"):
        print(f"{counts[f'{kind} taken']} of {counts[kind]} {kind} answers taken")
    print(f"compiled in {statistics.median(compiling) * 1e3:.1f} ms (median)")
    masks.sort()
    mean, last = statistics.fmean(masks), masks[int(len(masks) * 0.99)]
    print(f"a mask {mean * 1e6:.0f} us (mean), {last * 1e6:.0f} us (p99), of {len(masks):,}")


if __name__ == "__main__":
    main()
