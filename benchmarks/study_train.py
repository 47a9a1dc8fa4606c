"""Train the model of the accuracy study: 105 million parameters, Python source, one GPU.

It is trained as `models/pico` is, on the same text and with the same tokenizer, but with AdamW and
without noise on its weights: notes/training_pico.md tells what both do to a model's losses. It is
not published; `benchmarks/study.py` reads it from `--out`.

    python benchmarks/study_train.py --seconds 350 --out build/study-105m   # one H200
    python benchmarks/study_train.py --smoke --out build/study            # CPU, a minute

Writes the model in bf16, `train_log.csv` and `facts.json`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from csv_rows import write_rows

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "models" / "pico")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from collect import (  # noqa: E402
    CONTEXT,
    STDLIB,
    STDLIB_REPEAT,
    Corpus,
    HeldOutGuard,
    collect,
    source_files,
    tokenize,
)
from train import causal_attention, held_out_windows, total_loss, train  # noqa: E402
from transformers import (  # noqa: E402
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from anybit.evaluate.corpus import held_out_text  # noqa: E402

PICO = ROOT / "models" / "pico"
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 9,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SMOKE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def corpus_of(seed: int, max_bytes: int | None) -> Corpus:
    """pico's training text, in pico's tokens."""
    began = time.perf_counter()
    guard = HeldOutGuard(held_out_text())
    # A limited text is read in seconds by one process.
    workers = 1 if max_bytes else max(1, (os.cpu_count() or 1) - 2)
    documents, left_out = collect(source_files(), guard, seed, max_bytes=max_bytes, workers=workers)
    print(
        f"{len(documents)} files in {time.perf_counter() - began:.0f} s; left out {left_out}",
        flush=True,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(PICO)
    tokens = tokenize(tokenizer, [document.text for document in documents])
    facts = {
        "files": len(documents),
        "bytes": sum(len(document.text.encode()) for document in documents),
        "tokens": sum(map(len, tokens)),
        "packages": len({document.package for document in documents}) - 1,
    }
    print(f"{facts} after {time.perf_counter() - began:.0f} s", flush=True)
    repeats = np.where([document.package == STDLIB for document in documents], STDLIB_REPEAT, 1)
    return Corpus(tokenizer, tokens, repeats, facts)


def build(tokenizer: PreTrainedTokenizerFast, shape: dict[str, int]) -> LlamaForCausalLM:
    AttentionInterface.register("causal", causal_attention)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **shape,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("causal")
    return model


def tuning_text(corpus: Corpus, windows: int, seed: int) -> torch.Tensor:
    """Windows of the training text (windows, CONTEXT), for PV-tuning."""
    order = np.random.default_rng(seed).permutation(len(corpus.tokens))
    stream, size = [], 0
    for index in order:
        stream.append(corpus.tokens[index])
        size += len(stream[-1])
        if size >= windows * CONTEXT:
            break
    count = min(windows, size // CONTEXT)
    return torch.from_numpy(np.concatenate(stream)[: count * CONTEXT]).long().view(-1, CONTEXT)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--seconds", type=float, default=350, help="training time (350)")
    parser.add_argument("--batch", type=int, default=64, help="windows in a batch (64)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (0.001)")
    parser.add_argument(
        "--bytes", type=int, help="text to collect and tokenize (all that is found)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, 10 seconds, for CPU")
    args = parser.parse_args(arguments)
    args.window, args.noise, args.optimizer = CONTEXT, 0.0, "adamw"
    modules, max_bytes, shape = held_out_text(), args.bytes, SHAPE
    if args.smoke:
        args.seconds, args.batch, args.window = 10, 8, 128
        max_bytes, shape = 3_000_000, SMOKE
        modules = sorted(modules, key=lambda module: len(module[1]))[:3]
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() and not args.smoke else "cpu"

    corpus = corpus_of(args.seed, max_bytes)
    model = build(corpus.tokenizer, shape)
    model.to(device)  # type: ignore[arg-type]
    held_out = torch.cat([held_out_windows(corpus.tokenizer, text) for _, text in modules])
    began = time.perf_counter()
    log = train(model, corpus, held_out, args)
    print(f"trained and compiled in {time.perf_counter() - began:.0f} s", flush=True)

    model.to(torch.bfloat16).save_pretrained(args.out)  # type: ignore[arg-type]
    corpus.tokenizer.save_pretrained(args.out)
    torch.save(tuning_text(corpus, 4096, args.seed), args.out / "tuning.pt")
    write_rows(args.out / "train_log.csv", log)
    nats = total_loss(model.float(), held_out, torch.float32) / int((held_out[:, 1:] != -100).sum())
    facts = corpus.facts | {
        "parameters": model.num_parameters(),
        "shape": shape,
        "seconds": log[-1]["seconds"],
        "seen_tokens": log[-1]["tokens"],
        "steps": log[-1]["step"],
        "batch": args.batch * args.window,
        "learning_rate": args.lr,
        "train_loss": log[-1]["train_loss"],
        "held_out_nats": nats,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (args.out / "facts.json").write_text(json.dumps(facts, indent=1))
    print(facts)


if __name__ == "__main__":
    main()
