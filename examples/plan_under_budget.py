"""A format for each layer under a budget of memory: python examples/plan_under_budget.py [MB]"""

import sys

from transformers import AutoModelForCausalLM

import anybit
from anybit.evaluate.corpus import calibration_text
from anybit.nn.model import quantized_layers
from anybit.planning.allocate import plan_formats

MEGABYTES = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0  # for the quantized layers of pico

model = AutoModelForCausalLM.from_pretrained("models/pico", dtype="auto")
weights = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
texts = [text for _, text in calibration_text()]
calibration = anybit.Calibration(texts, samples=2, length=256)
choices = ["int3:group=32", "int4:group=32", "fp6"]
bits = MEGABYTES * 8e6 / weights
plan = plan_formats(model, calibration, bits=bits, candidates=choices, head=None)
print(plan.table())

anybit.quantize_(model, plan.plan, anybit.Clip())
size = sum(b.nbytes for _, layer in quantized_layers(model) for b in layer.buffers())
print(f"{size / 1e6:.2f} of {MEGABYTES} MB: {size * 8 / weights:.2f} bits a weight")
