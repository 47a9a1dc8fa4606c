"""FP6 weights in a transformers model: one line, no data.

python examples/one_line_fp6.py [MODEL] [PROMPT]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit

MODEL = sys.argv[1] if len(sys.argv) > 1 else "models/pico"
PROMPT = sys.argv[2] if len(sys.argv) > 2 else "<|endoftext|>def read_lines(path):"

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
anybit.quantize_(model, "fp6")

inputs = tokenizer(PROMPT, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=48, do_sample=False)[0]))
