"""Train weights for `sparse`: one of two neighbours is zero, by a mask function of your own.

python examples/sparse_finetune.py [STEPS [BATCH]]
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit
from anybit.evaluate.corpus import calibration_text

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
BATCH = int(sys.argv[2]) if len(sys.argv) > 2 else 8
LENGTH, RATE = 256, 1e-3  # tokens of a sequence; of Adam


def mask(weight: Tensor) -> Tensor:
    """True for the larger of two neighbouring columns. Any other choice of one of them will do."""
    first, second = weight.abs().unflatten(1, (-1, 2)).unbind(-1)
    return torch.stack((first > second, first <= second), -1).flatten(1)


class Masked(nn.Module):
    """Computes with the masked weight; the gradient reaches all, so that the choice can change."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (weight * mask(weight) - weight).detach()


dense = AutoModelForCausalLM.from_pretrained("models/pico", dtype=torch.float32).eval()
model = AutoModelForCausalLM.from_pretrained("models/pico", dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained("models/pico")
layers = [m for name, m in model.model.named_modules() if isinstance(m, nn.Linear)]
for layer in layers:
    parametrize.register_parametrization(layer, "weight", Masked())

text = "".join(source for _, source in calibration_text())
ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
held_out, rows = rows[::64][:4], rows[[i for i in range(len(rows)) if i % 64]]


def loss(some: Tensor) -> Tensor:
    """KL(dense || model), nats a token."""
    with torch.no_grad():
        target = dense(input_ids=some).logits.log_softmax(-1)
    got = model(input_ids=some).logits.log_softmax(-1)
    return nn.functional.kl_div(got, target, reduction="none", log_target=True).sum(-1).mean()


with torch.no_grad():
    losses = [float(loss(held_out))]
optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(STEPS, 1))
generator = torch.Generator().manual_seed(0)
for step in range(STEPS):
    loss(rows[torch.randint(len(rows), (BATCH,), generator=generator)]).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if (step + 1) % 50 == 0 or step + 1 == STEPS:
        with torch.no_grad():
            losses.append(float(loss(held_out)))
        print(f"step {step + 1}: KL {losses[0]:.3f} -> {losses[-1]:.3f} nats, held out", flush=True)

for layer in layers:
    parametrize.remove_parametrizations(layer, "weight")  # leaves the masked weight
anybit.quantize_(model, "sparse")
with torch.no_grad():
    print(f"quantized: {float(loss(held_out)):.3f}")
anybit.save(model, "out/sparse", overwrite=True)
