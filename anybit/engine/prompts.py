"""What requests ask about their prompts: log probabilities of its tokens, and an embedding."""

import torch
from torch import Tensor

from anybit.engine.models.layers import Decoder
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import Logprob, Sequence

ROWS = 256  # of logits at a time: a vocabulary of 150,000 takes 150 MB in fp32


def read_prompts(model: Decoder, hidden: Tensor, scheduled: list[Scheduled]) -> None:
    """Note in the sequences what a step's hidden states (T, hidden) say about their prompts."""
    start = 0
    for s in scheduled:
        states = hidden[start : start + s.tokens][: len(s.seq.prompt) - s.first]
        start += s.tokens + len(s.draft)
        if not s.reads_prompt:
            continue
        if s.first == 0:  # the beginning, or a new one after a preemption
            s.seq.pooled.clear()
        del s.seq.prompt_logprobs[s.first + 1 :]  # of a step that is run again
        if s.seq.params.embed:
            s.seq.pooled[s.first] = states.float().sum(0)
        if s.seq.params.prompt_logprobs is not None:
            following = s.seq.prompt[s.first + 1 : s.first + 1 + len(states)]
            for at in range(0, len(following), ROWS):
                some = following[at : at + ROWS]
                logits = model.logits(states[at : at + len(some)])
                s.seq.prompt_logprobs += scored(logits, some, s.seq.params.prompt_logprobs)


def scored(logits: Tensor, tokens: list[int], count: int) -> list[Logprob]:
    """Log probabilities of tokens by their logits (T, V), with those of the likeliest ones."""
    logp = logits.float().log_softmax(-1)
    index = torch.tensor(tokens, device=logp.device)[:, None]
    own = logp.gather(1, index)[:, 0].tolist()
    values, ids = (t.tolist() for t in logp.topk(min(count, logp.shape[1])))
    return [
        Logprob(token, value, tuple(zip(top, tops, strict=True)))
        for token, value, top, tops in zip(tokens, own, ids, values, strict=True)
    ]


def prompt_results(seq: Sequence) -> tuple[list[Logprob | None] | None, list[float] | None]:
    """What a sequence has noted of its prompt: log probabilities, and an embedding (hidden,)."""
    scores = None if seq.params.prompt_logprobs is None else seq.prompt_logprobs
    if not seq.pooled:
        return scores, None
    mean = torch.stack([*seq.pooled.values()]).sum(0) / len(seq.prompt)
    return scores, torch.nn.functional.normalize(mean, dim=0).tolist()
