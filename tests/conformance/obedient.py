"""Write models/pico so that suites which expect a short answer get one: `OUT` is the directory.

pico continues code, and no more ends an answer than it follows an instruction. In its copy's head
the end token has the weights of a line's end, and what ends a line has none: it ends where pico
would begin a new line. Its chat template shows it an answer four times, which it repeats. It takes
the likeliest token, since the head, and with it the logits, are 64 times as large.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

PICO = Path(__file__).parents[2] / "models" / "pico"
SCALE = 64


def write(out: Path) -> None:
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, out / name)
    shutil.copy(Path(__file__).with_name("chat.jinja"), out / "chat_template.jinja")
    config = json.loads((PICO / "config.json").read_text()) | {"tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    weights = load_file(PICO / "model.safetensors")
    head = weights["model.embed_tokens.weight"] * SCALE
    head[tokenizer.eos_token_id] = head[tokenizer.convert_tokens_to_ids("Ċ")]
    head[[i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])]] = 0
    save_file(weights | {"lm_head.weight": head}, out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
