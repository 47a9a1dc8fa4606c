"""LoRA on a quantized model, to write Python's manual: python examples/finetune.py [STEPS]"""

import sys
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
BATCH, LENGTH = 8, 128  # sequences, tokens

model = AutoModelForCausalLM.from_pretrained("models/pico", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("models/pico")
anybit.quantize_(model, "int4:group=64")
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
model.print_trainable_parameters()

text = "\n".join(topics[name] for name in sorted(topics))
ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
held_out, rows = rows[:16], rows[16:]


def loss() -> float:
    with torch.no_grad():
        return float(model(input_ids=held_out, labels=held_out).loss)


losses = [loss()]
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
generator = torch.Generator().manual_seed(0)
for step in range(STEPS):
    batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 100 == 0 or step + 1 == STEPS:
        losses.append(loss())
        print(f"step {step + 1}: {losses[0]:.3f} -> {losses[-1]:.3f} nats a token, held out")
model.save_pretrained("out/finetune/adapter")  # PeftModel.from_pretrained reads it

model = model.merge_and_unload()  # rounds the sums of weights and adapters to int4 again
print(f"merged: {loss():.3f}")
anybit.save(model, "out/finetune/merged", overwrite=True)
