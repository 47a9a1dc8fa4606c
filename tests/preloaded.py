"""What processes of `tests.forks` have imported when they begin; no part of it starts a thread."""

import torch
import transformers.models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import anybit.engine.llm
import anybit.serve.front
import anybit.serve.run

__all__ = ["AutoModelForCausalLM", "PreTrainedTokenizerFast", "anybit", "torch", "transformers"]
