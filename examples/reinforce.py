"""Reinforce a model (GRPO) by answers in few bits, with their rounding in training and without.

python examples/reinforce.py [FORMAT [STEPS [SEED]]]
"""

import sys

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams

FORMAT = sys.argv[1] if len(sys.argv) > 1 else "int2:group=32"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 15
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 0
ANSWERS, LENGTH, RATE = 12, 24, 3e-4  # to each prompt, tokens, of Adam
TEXTS = ("def load(path):\n", "class Engine:\n", "import os\n\ndef main():\n", "def test_add():\n")

tokenizer = AutoTokenizer.from_pretrained("models/pico")
prompts = [tokenizer(text).input_ids for text in TEXTS]


def reward(answer: list[int]) -> float:
    """What the model is to learn: many short lines."""
    return min(tokenizer.decode(answer).count("\n"), 8) / 8


def loss(model: nn.Module, prompt: list[int], answers: list[list[int]], rewards: Tensor) -> Tensor:
    """Answers that are better than the others of a prompt are to become likelier."""
    rows = torch.tensor([prompt + answer for answer in answers])
    logprobs = model(input_ids=rows[:, :-1]).logits[:, -LENGTH:].log_softmax(-1)
    chosen = logprobs.gather(2, rows[:, -LENGTH:, None])[..., 0]
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return -(advantages[:, None] * chosen).mean() / len(prompts)


def reinforced(rounding: bool) -> list[float]:
    """The mean reward of the engine's answers before each step, and after the last."""
    model = AutoModelForCausalLM.from_pretrained("models/pico", dtype=torch.float32)
    llm = LLM("models/pico", FORMAT, dtype="float32", device="cpu", length=128)
    if rounding:
        anybit.fake_quantize_(model, FORMAT)
    optimizer, found = torch.optim.Adam(model.parameters(), lr=RATE), list[float]()
    for step in range(STEPS + 1):
        llm.load_weights(model.state_dict().items())
        params = SamplingParams(
            n=ANSWERS, max_tokens=LENGTH, ignore_eos=True, seed=1000 * SEED + step
        )
        texts = llm.generate(prompts, params, show_progress=False)
        answers = [[each.tokens for each in text.completions] for text in texts]
        rewards = torch.tensor([[reward(answer) for answer in group] for group in answers])
        found.append(float(rewards.mean()))
        if step == STEPS:
            break
        for prompt, group, given in zip(prompts, answers, rewards, strict=True):
            loss(model, prompt, group, given).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


rewards = {}
for name, rounding in (("without rounding", False), ("with rounding", True)):
    rewards[name] = reinforced(rounding)
    print(f"{name}: reward {' '.join(f'{r:.2f}' for r in rewards[name])}", flush=True)
