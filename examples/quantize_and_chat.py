"""Quantize a model on disk, then chat with it: python examples/quantize_and_chat.py [MODEL] [OUT]

pico is not a chat model: it continues what you type. Try "def fibonacci(n):"; Ctrl-D ends.
"""

import sys
from pathlib import Path

import anybit
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.serve.chat import talk

MODEL = sys.argv[1] if len(sys.argv) > 1 else "models/pico"
OUT = sys.argv[2] if len(sys.argv) > 2 else "out/chat"

if not Path(OUT).exists():
    print(quantize_checkpoint(MODEL, OUT, "int4:group=64,zero"))
llm = anybit.LLM(OUT)
talk(llm, anybit.SamplingParams(max_tokens=64, temperature=0.0))
