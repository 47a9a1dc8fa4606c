"""4-bit weights and 8-bit activations, calibrated and served with OpenAI's protocol (LiquidServe).

python examples/w4a8_serve.py [PORT]     then, for example, open http://127.0.0.1:8000
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit
from anybit.evaluate.corpus import calibration_text
from anybit.serve.run import FrontEnds, bind, run
from anybit.serve.settings import Settings

MODEL, OUT = "models/pico", "out/w4a8"
PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 8000

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
texts = [text for _, text in calibration_text()]  # use text like that of your users
calibration = anybit.Calibration(texts, samples=4, length=256, kv_scales=True)
anybit.quantize_(model, "liquid@int8", anybit.Smooth(calibration, then=anybit.GPTQ()))
anybit.save(model, OUT, overwrite=True)
AutoTokenizer.from_pretrained(MODEL).save_pretrained(OUT)

with FrontEnds(bind("127.0.0.1", PORT)) as front_ends:
    print(f"http://127.0.0.1:{PORT}", flush=True)
    run(anybit.LLM(OUT, kv_cache="int8"), Settings(("pico",)), front_ends)  # until Ctrl-C
