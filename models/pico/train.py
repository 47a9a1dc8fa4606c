"""Train `pico`, a language model of Python source with 7 million parameters, in minutes.

The training text is the Python source found on the machine that trains: the standard library and
the installed packages. The modules of `anybit.evaluate.corpus.HELD_OUT`, and copies of them that
packages carry, are left out, so that perplexity on them means something.

    python models/pico/train.py --smoke --out out/pico            # CPU, under a minute
    python models/pico/train.py --seconds 450 --out models/pico    # one data-centre GPU
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from collect import CONTEXT, EOS, STDLIB, STDLIB_REPEAT, VOCAB, Corpus, build_corpus
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from anybit.evaluate.corpus import held_out_text

WARMUP, HOLD = 0.02, 0.4
LOG_EVERY = 20
CARD_TEMPLATE = Path(__file__).with_name("card_template.md")


def batches(corpus: Corpus, batch: int, length: int, seed: int, device: str) -> Iterator[Tensor]:
    """Endless batches of windows of packed documents, in a new random order each epoch."""

    def epoch(index: int) -> Tensor:
        rng = np.random.default_rng((seed, index))
        order = rng.permutation(np.repeat(np.arange(len(corpus.tokens)), corpus.repeats))
        stream = np.concatenate([corpus.tokens[i] for i in order])[rng.integers(length) :]
        windows = stream[: len(stream) // length * length].reshape(-1, length)
        return torch.from_numpy(windows[rng.permutation(len(windows))])

    with ThreadPoolExecutor(1) as background:
        index, following = 1, background.submit(epoch, 0)
        while True:
            windows = following.result().to(device)
            if len(windows) < batch:
                need, have = batch * length, len(windows) * length
                sys.exit(f"a batch has {need:,} tokens, the text only {have:,}; collect more")
            following = background.submit(epoch, index)
            index += 1
            for start in range(0, len(windows) - batch + 1, batch):
                yield windows[start : start + batch].long()


def causal_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention without a mask tensor: the stock one builds a mask under torch.compile."""
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    AttentionInterface.register("causal", causal_attention)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config)
    model.set_attn_implementation("causal")
    return model


def window_losses(model: LlamaForCausalLM, windows: Tensor, dtype: torch.dtype) -> Tensor:
    """Loss of each token of `windows` given those before it in its window."""
    # An embedding in bf16 keeps the residual stream in bf16, which halves its memory traffic.
    embedded = model.get_input_embeddings()(windows[:, :-1].clamp(min=0)).to(dtype)
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="none")


def held_out_windows(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """`text` as windows that overlap by one token, so that each token is predicted once."""
    ids = [tokenizer.bos_token_id, *tokenizer(text, verbose=False).input_ids]
    count = math.ceil((len(ids) - 1) / CONTEXT)
    padded = torch.full((count * CONTEXT + 1,), -100)
    padded[: len(ids)] = torch.tensor(ids)
    return padded.unfold(0, CONTEXT + 1, CONTEXT)


@torch.no_grad()
def total_loss(model: LlamaForCausalLM, windows: Tensor, dtype: torch.dtype) -> float:
    """Sum of the losses, in nats, over all tokens of `windows`."""
    parts = [windows[start : start + 64] for start in range(0, len(windows), 64)]
    losses = [window_losses(model, part.to(model.device), dtype).double().sum() for part in parts]
    return float(torch.stack(losses).sum())


def schedule(progress: float) -> float:
    """Share of the peak learning rate when `progress` (0 to 1) of the time is over."""
    return max(0.0, min(1.0, progress / WARMUP, (1 - progress) / (1 - HOLD)))


def optimizers_for(
    model: LlamaForCausalLM, kind: str, lr: float, fused: bool
) -> list[torch.optim.Optimizer]:
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": [embedding]}, {"params": gains, "weight_decay": 0.0}]
    if kind == "adamw":
        groups.append({"params": matrices})
    # The embedding stays at the rate known to suit AdamW when Muon's is set higher.
    adamw = torch.optim.AdamW(
        groups, lr=min(lr, 4e-3), betas=(0.9, 0.95), weight_decay=0.1, fused=fused
    )
    if kind == "adamw":
        return [adamw]
    return [torch.optim.Muon(matrices, lr, 0.1, adjust_lr_fn="match_rms_adamw"), adamw]


@contextmanager
def noise(matrices: Sequence[Tensor], strength: float) -> Iterator[None]:
    """Random changes to the matrices, `strength` times the standard deviation of each row.

    The model learns weights near which the loss is flat, so that it bears being rounded as well as
    models do that are larger for what they have learned.
    """
    saved = [w.detach().clone() for w in matrices]
    with torch.no_grad():
        for w in matrices if strength else []:
            w.addcmul_(torch.randn_like(w), w.std(1, keepdim=True), value=strength)
    yield
    with torch.no_grad():
        torch._foreach_copy_(list(matrices), saved)


def train(
    model: LlamaForCausalLM, corpus: Corpus, held_out: Tensor, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Train for `args.seconds` and return the log, one row for every `LOG_EVERY` steps."""
    cuda = model.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=cuda)
    optimizers = optimizers_for(model, args.optimizer, args.lr, fused=cuda)
    peaks = [group["lr"] for opt in optimizers for group in opt.param_groups]
    groups = [group for opt in optimizers for group in opt.param_groups]
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    data = batches(corpus, args.batch, args.window + 1, args.seed, model.device.type)

    def mean_loss(windows: Tensor) -> Tensor:
        return window_losses(model, windows, dtype).mean()

    step_loss = torch.compile(mean_loss, dynamic=False) if cuda else mean_loss
    with autocast:
        for _ in range(3):  # compiles, which is not training time
            step_loss(next(data)).backward()
        total_loss(model, held_out, dtype)
    model.zero_grad()
    held_out_tokens = int((held_out[:, 1:] != -100).sum())
    log: list[dict[str, float]] = []
    running = torch.zeros((), device=model.device)
    next_held_out = 0.0
    step, elapsed, began = 0, 0.0, time.perf_counter()
    while elapsed < args.seconds:
        rate = schedule(elapsed / args.seconds)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate
        with noise(matrices, args.noise):
            with autocast:
                loss = step_loss(next(data))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        running += loss.detach()
        step += 1
        if step % LOG_EVERY == 0 or not cuda:
            train_loss = running.item() / (LOG_EVERY if cuda else 1)
            running.zero_()
            row = {
                "step": step,
                "tokens": step * args.batch * args.window,
                "seconds": round(time.perf_counter() - began, 2),
                "learning_rate": round(args.lr * rate, 6),
                "train_loss": round(train_loss, 4),
            }
            if elapsed >= next_held_out * args.seconds:
                with autocast:
                    nats = total_loss(model, held_out, dtype) / held_out_tokens
                row["held_out_loss"] = round(nats, 4)
                next_held_out += 0.05
                print(row)
            log.append(row)
        elapsed = time.perf_counter() - began
    return log


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    modules: Sequence[tuple[str, str]],
) -> dict[str, tuple[int, int, float]]:
    """Bytes, tokens and loss in nats of each of `modules`, and of all ("total")."""
    scores = {}
    for name, text in modules:
        windows = held_out_windows(tokenizer, text)
        tokens = int((windows[:, 1:] != -100).sum())
        scores[name] = len(text.encode()), tokens, total_loss(model, windows, torch.float32)
    size, tokens, nats = (sum(column) for column in zip(*scores.values(), strict=True))
    return {**scores, "total": (int(size), int(tokens), nats)}


def plot(log: Sequence[dict[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    millions = [row["tokens"] / 1e6 for row in log]
    losses = [row["train_loss"] for row in log]
    axes.plot(millions, losses, color="#9db7d5", lw=1, label="training")
    held_out = [
        (row["tokens"] / 1e6, row["held_out_loss"]) for row in log if "held_out_loss" in row
    ]
    axes.plot(*zip(*held_out, strict=True), color="#c2410c", lw=2, label="held out")
    axes.set(xlabel="tokens seen (millions)", ylabel="loss (nats per token)")
    axes.set_ylim(min(losses) * 0.95, np.quantile(losses, 0.98) + 0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def perplexity_and_bits(score: tuple[int, int, float]) -> tuple[float, float]:
    size, tokens, nats = score
    return math.exp(nats / tokens), nats / math.log(2) / size


def write_card(
    args: argparse.Namespace,
    facts: dict[str, Any],
    modules: Sequence[tuple[str, str]],
    log: Sequence[dict[str, float]],
    device: str,
) -> None:
    """Evaluate the model as saved and write its card; every figure in it is measured here."""
    model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    model.to(device)  # type: ignore[arg-type]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    scores = evaluate(model, tokenizer, modules)
    perplexity, bits = perplexity_and_bits(scores["total"])
    last, config = log[-1], model.config
    rows = "\n".join(
        f"| `{name}` | {score[0]:,} | {score[1]:,} | {ppl:.3f} | {bpb:.3f} |"
        for name, score in scores.items()
        if name != "total"
        for ppl, bpb in [perplexity_and_bits(score)]
    )
    largest = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in facts["largest"])
    left_out = ", ".join(f"{reason} {count:,}" for reason, count in facts["left_out"])
    hardware = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    text = CARD_TEMPLATE.read_text(encoding="utf-8").format(
        parameters=f"{model.num_parameters():,}",
        perplexity=f"{perplexity:.3f}",
        bits=f"{bits:.3f}",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        vocab=VOCAB,
        context=CONTEXT,
        eos=EOS,
        stdlib=STDLIB,
        repeat=STDLIB_REPEAT,
        files=f"{facts['files']:,}",
        megabytes=f"{facts['bytes'] / 1e6:.1f}",
        corpus_tokens=f"{facts['tokens']:,}",
        packages=facts["packages"],
        largest=largest,
        left_out=left_out,
        steps=f"{last['step']:,}",
        tokens=f"{last['tokens']:,}",
        seconds=f"{last['seconds']:.0f}",
        throughput=f"{last['tokens'] / last['seconds']:,.0f}",
        hardware=hardware,
        optimizer={"muon": "Muon", "adamw": "AdamW"}[args.optimizer],
        hold=HOLD,
        lr=args.lr,
        noise=args.noise,
        batch=args.batch,
        window=args.window,
        seed=args.seed,
        train_loss=f"{last['train_loss']:.3f}",
        date=datetime.datetime.now(datetime.UTC).date(),
        versions=f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
        held_out_modules=len(scores) - 1,
        held_out_bytes=f"{scores['total'][0]:,}",
        held_out_tokens=f"{scores['total'][1]:,}",
        rows=rows,
    )
    (args.out / "README.md").write_text(text, encoding="utf-8")
    print(
        f"{model.num_parameters():,} parameters, perplexity {perplexity:.3f}, {bits:.3f} bits/byte"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--seconds", type=float, default=450, help="training time (450)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order (0)")
    parser.add_argument("--batch", type=int, default=128, help="windows in a batch (128)")
    parser.add_argument(
        "--optimizer", choices=("muon", "adamw"), default="muon", help="for the matrices (muon)"
    )
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate (0.006)")
    parser.add_argument(
        "--noise", type=float, default=0.3, help="noise on the weights, in their deviation (0.3)"
    )
    parser.add_argument("--cache", type=Path, help="folder to keep the tokenized text in")
    parser.add_argument(
        "--smoke", action="store_true", help="a little text, short windows and 10 seconds, for CPU"
    )
    args = parser.parse_args()
    args.window = CONTEXT
    modules = held_out_text()
    if args.smoke:  # Muon's bf16 products are slow on most CPUs
        args.seconds, args.batch, args.window, args.optimizer = 10, 8, 128, "adamw"
        modules = sorted(modules, key=lambda module: len(module[1]))[:3]
    args.out.mkdir(parents=True, exist_ok=True)
    if args.cache is not None:
        args.cache.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() and not args.smoke else "cpu"

    corpus = build_corpus(args.seed, max_bytes=3_000_000 if args.smoke else None, cache=args.cache)
    tokenizer = corpus.tokenizer
    model = build_model(tokenizer)
    model.to(device)  # type: ignore[arg-type]
    held_out = torch.cat([held_out_windows(tokenizer, text) for _, text in modules])
    log = train(model, corpus, held_out, args)

    model.to(torch.bfloat16).save_pretrained(args.out)  # type: ignore[arg-type]
    tokenizer.save_pretrained(args.out)
    with (args.out / "train_log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*log[0]], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(log)
    plot(log, args.out / "loss.png")
    write_card(args, corpus.facts, modules, log, device)


if __name__ == "__main__":
    main()
