"""Train a model with the rounding that it will be served with, and one without, to write a manual.

python examples/train_rounded.py [FORMAT [STEPS]]
"""

import sys
from pydoc_data.topics import topics

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit

FORMAT = sys.argv[1] if len(sys.argv) > 1 else "int2:group=32"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 100
BATCH, LENGTH, RATE = 8, 128, 1e-3  # sequences, tokens, of Adam

tokenizer = AutoTokenizer.from_pretrained("models/pico")
text = "\n".join(topics[name] for name in sorted(topics))
ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
held_out, rows = rows[::16], rows[[i for i in range(len(rows)) if i % 16]]


def loss(model: nn.Module) -> float:
    """Nats a token, held out."""
    with torch.no_grad():
        return float(model.eval()(input_ids=held_out, labels=held_out).loss)


def trained(rounding: bool) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained("models/pico", dtype=torch.float32)
    if rounding:
        anybit.fake_quantize_(model, FORMAT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(STEPS, 1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        model.train()(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


losses = {}
for name, rounding in (("without rounding", False), ("with rounding", True)):
    model = trained(rounding)
    before = loss(model)
    anybit.quantize_(model, FORMAT)  # to its layers, or of its own weights
    losses[name] = before, loss(model)
    print(f"{name}: {before:.3f} nats, quantized {losses[name][1]:.3f}", flush=True)
anybit.save(model, "out/train_rounded", overwrite=True)
