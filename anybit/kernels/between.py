"""What lies between products: norms, SiLU, tokens quantized, rotated and routed, attention.

`Family` is the definition, in plain torch. A family of kernels derives from it, in a file of its
own, and overrides what it has kernels for; tensors that these do not take are left to the
definition. Families are named in `FAMILIES` and nowhere else, and `of` alone chooses one.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.core.packed import Packed
from anybit.core.rotation import block, turned
from anybit.kernels import viterbi
from anybit.kernels.attention import Batch, Scores, gathered, rotate
from anybit.kernels.backend import Activations, Pairs
from anybit.kernels.races import waits
from anybit.kernels.recurrences import Scan, taken, write
from anybit.kernels.reference import FINER, quantize_tokens, quantized_activation, rest
from anybit.kernels.scans import Texts

if TYPE_CHECKING:
    from anybit.kernels.kv.cache import LayerCache


class Wanted(NamedTuple):
    """How a layer wants its input.

    Attributes:
        activation: the notation in which it multiplies; None: x's dtype.
        vector: (K,), of the rotation before that; None: there is none.
        rotated: whether it takes inputs that are rotated and not quantized.
        pairs: which tokens get a second row of codes; None: none does.
    """

    activation: str | None = None
    vector: Tensor | None = None
    rotated: bool = False
    pairs: Pairs | None = None


class Routing(NamedTuple):
    """Where tokens lie when they are sorted by the experts that they meet.

    Attributes:
        starts: (experts + 1,) int32. Expert e has rows starts[e] to starts[e + 1]; those behind
            the last are no expert's.
        rows: (T, top) int32, of each token's choices.
        owners: (T * top,) int32, the expert of each row; `experts` where it is none.
    """

    starts: Tensor
    rows: Tensor
    owners: Tensor


AS_IT_IS = Wanted()


class Unturned(NamedTuple):
    """Outputs of a layer before their rotation, which is left to the kernel that reads them.

    Attributes:
        y: (T, N).
        vector: (N,), of the rotation.
        bias: (N,) in y's dtype, which is added after it; None: there is none.
    """

    y: Tensor
    vector: Tensor
    bias: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.y.dtype

    @property
    def turned(self) -> Tensor:
        """The layer's outputs (T, N)."""
        y = of(self.y).rotate(self.y, self.vector, True)
        return y if self.bias is None else y + self.bias

    def chunk(self, parts: int, dim: int) -> tuple["Tensor | Unturned", ...]:
        """As of a tensor, along its last dimension; turned where a part would split a block."""
        n = self.y.shape[dim]
        if n % (parts * block(n)):
            return self.turned.chunk(parts, dim)
        bias = (None,) * parts if self.bias is None else self.bias.chunk(parts)
        each = zip(self.y.chunk(parts, dim), self.vector.chunk(parts), bias, strict=True)
        return tuple(Unturned(*one) for one in each)


def finished(x: Tensor | Unturned) -> Tensor:
    """Outputs of a layer, rotated."""
    return x.turned if isinstance(x, Unturned) else x


class Answers(threading.local):
    """Which tokens of the step that a thread runs are quantized to 16 bits, in two rows of 8.

    They are answers' tokens, where an engine reads prompts in 8 bits and writes in 16.
    """

    pairs: Pairs | None = None

    @contextmanager
    def within(self, pairs: Pairs | None) -> Iterator[None]:
        before, self.pairs = self.pairs, pairs
        try:
            yield
        finally:
            self.pairs = before

    def of(self, activation: str | None, tokens: int) -> Pairs | None:
        """Those of a layer that multiplies so many tokens."""
        here = activation == "int8" and self.pairs and tokens == self.pairs.tokens
        return self.pairs if here else None


ANSWERS = Answers()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32, rounded to the weight's dtype before the product with it, to x's after."""
    x32 = x.float()
    norm = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight * norm.to(weight.dtype)).to(x.dtype)


class Repeated:
    """A step that runs once, and again whenever it is replayed: what a recording does sooner.

    Attributes:
        out: the step's result, valid until the next replay.
        refused: an operator for which the step itself is run each time; None if there is none.
    """

    refused: str | None = None

    def __init__(self, step: Callable[[], Tensor]):
        self.step = step
        self.out = step()

    def replay(self) -> None:
        """Run the step on what its memory holds now."""
        self.out.copy_(self.step())


class Family:
    """The definition, in plain torch, for every device.

    Attributes:
        side_by_side: whether a cache's V lies with tokens side by side, in formats that may.
        turns: up to how many tokens kernels rotate `Unturned` outputs on the way; 0: none do.
    """

    side_by_side, turns = True, 0

    def about(self) -> str:
        """Which kernels these are, in words."""
        return "no compiled kernels"

    def runs_on(self, device: torch.device) -> bool:
        """Whether this family has kernels for a device of the type that `FAMILIES` says."""
        return True

    # Tokens.

    def add_norm(
        self, x: Tensor, delta: Tensor | Unturned | None, weight: Tensor, eps: float,
        wanted: Wanted = AS_IT_IS,
    ) -> tuple[Tensor | Activations, Tensor]:  # fmt: skip
        """RMSNorm of the sum of x and delta (T, hidden), and the sum.

        The first is as it is `wanted` where the kernel makes that, too, and in x's dtype elsewhere.
        """
        x = x if delta is None else x + finished(delta)
        return rms_norm(x, weight, eps), x

    def silu_mul(
        self, gate: Tensor | Unturned, up: Tensor | Unturned, wanted: Wanted = AS_IT_IS
    ) -> Tensor | Activations:
        """SiLU(gate) * up, both (T, N); `wanted` as in `add_norm`."""
        return F.silu(finished(gate)) * finished(up)

    def columns(self, x: Tensor, order: Tensor) -> Tensor:
        """x (T, N) with its columns in another order, int32 (M,)."""
        return x.index_select(1, order)

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """GELU(gate), by tanh, * up, both (T, N)."""
        return F.gelu(gate, approximate="tanh") * up

    def quantize(
        self, x: Tensor, activation: str, pairs: Pairs | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, K) -> codes, scale and sums of T rows or those of pairs, as in `Activations`."""
        codes, scale = quantize_tokens(x, activation)
        if pairs:
            token, second = pairs.places  # `index_select`: recordings refuse other indexing
            finer, codes, scale = (
                t.index_select(0, token) for t in (rest(x, codes, scale), codes, scale)
            )
            codes = torch.where(second[:, None], finer, codes)
            scale = torch.where(second[:, None], scale / FINER, scale)
        some = codes if activation == "int8" else codes.new_empty(0, 0, dtype=torch.int32)
        return codes, scale[:, 0], some.sum(-1, dtype=torch.int32)

    def join(self, y: Tensor, pairs: Pairs, bias: Tensor | None) -> Tensor:
        """Outputs (rows, N) of a backend that adds none up -> (T, N), plus a bias."""
        first, behind, two = pairs.sums
        out, more = (y.index_select(0, rows).float() for rows in (first, behind))
        out += torch.where(two[:, None], more, 0)
        return (out if bias is None else out + bias.float()).to(y.dtype)

    def rotate(self, x: Tensor, vector: Tensor, after: bool) -> Tensor:
        """H (vector * x), or vector * (H x), of every token; see `core/rotation.py`.

        Args:
            x: (..., K) of any float dtype; the arithmetic is fp32.
            vector: K numbers.
            after: Whether the vector multiplies after H, as that of a layer's outputs does.

        Returns:
            (..., K) in x's dtype.
        """
        v = vector.flatten().float()
        return (turned(x.float()) * v if after else turned(x.float() * v)).to(x.dtype)

    def placed(self, weight: Tensor) -> Tensor:
        """A dense weight where its device reads it fastest."""
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (T, K) times a dense weight (N, K)."""
        return F.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """SiLU(gate) * up (T, N / 2), of the halves of `linear`'s outputs."""
        gate, up = self.linear(x, weight, bias).chunk(2, -1)
        y = self.silu_mul(gate, up)
        assert isinstance(y, Tensor)
        return y

    def likeliest(self, logits: Tensor, invalid: int) -> Tensor:
        """The token (B,) int32 of the largest of each row of logits (B, V).

        `invalid` where the largest is NaN or infinite.
        """
        largest, tokens = logits.max(-1)
        return torch.where(largest.isfinite(), tokens, invalid).int()

    def drawn(
        self, logits: Tensor, best: Tensor, temperature: Tensor, least: Tensor, keys: Tensor
    ) -> Tensor:
        """A token (B,), in any integer dtype, of each row of logits (B, V), by `races.race`.

        Args:
            logits: Of 16 or 32 bits.
            best: The likeliest token of each row (B,), or -1; then any may come out.
            temperature: (B, 1) fp32.
            least: (B, 1) fp32, logarithms of how probable a token must be, relative to that.
            keys: (B, 2) int32.
        """
        most = logits.gather(1, best.clamp_min(0).long()[:, None]).float()
        x = (logits.float() - most) / temperature
        x = x.masked_fill(x < least, float("-inf"))
        every = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        return (x - waits(keys, every).log()).argmax(-1)

    # Tokens around the products of experts.

    def choose(self, logits: Tensor, top: int, normalize: bool) -> tuple[Tensor, Tensor]:
        """Weights in fp32 and numbers of the `top` likeliest experts, both (T, top).

        logits: Of a router, (T, experts). normalize: whether a token's weights add up to 1; they
        are the softmax over all experts otherwise.
        """
        weight, chosen = logits.float().softmax(-1).topk(top, -1)
        return weight / weight.sum(-1, keepdim=True) if normalize else weight, chosen

    def sort(self, chosen: Tensor, experts: int) -> Routing:
        """Give each choice (T, top) a row: by expert, then by token."""
        flat = chosen.flatten()
        flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
        owners, order = flat.sort(stable=True)
        ids = torch.arange(experts + 1, device=flat.device)
        starts = torch.searchsorted(owners, ids.to(owners.dtype), out_int32=True)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device=order.device)
        return Routing(starts, rows.view(chosen.shape).int(), owners.int())

    def spread(
        self, x: Tensor, routing: Routing, activation: str | None = None
    ) -> Tensor | Activations:
        """x (T, K) -> a row for each choice; quantized before, if `activation` says so."""
        order = x.new_empty(routing.rows.numel(), dtype=torch.int64)
        flat = routing.rows.flatten().long()
        order[flat] = torch.arange(len(flat), device=x.device)
        token = order // routing.rows.shape[1]
        if activation is None:
            return x[token]
        codes, scale, sums = self.quantize(x, activation)
        return Activations(codes[token], scale[token], sums[token] if len(sums) else sums, x.dtype)

    def combine(
        self, y: Tensor, routing: Routing, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Rows (M, N) of all choices -> the weighted sum of each token's (T, N).

        It is summed in fp32, in the order of choices. bias: (experts, N).
        """
        starts, rows, owners = routing
        dtype, y = y.dtype, y.float()
        if bias is not None:
            y = y + bias.float()[owners.clamp(max=len(bias) - 1).long()]
        here = (rows < starts[-1])[..., None]
        if not len(y):  # no choice is an expert's
            return y.new_zeros(len(rows), y.shape[1]).to(dtype)
        each = torch.where(here, y[rows.long().clamp(max=len(y) - 1)], 0)
        return (each * weight.float()[..., None]).sum(1).to(dtype)

    def clamped(
        self, y: Tensor, owners: Tensor, bias: Tensor, alpha: float, limit: float
    ) -> Tensor:
        """GPT-OSS's activation of y (M, 2 N) + the bias (experts, 2 N) of each row's owner."""
        y = y + bias[owners.long()]
        gate, up = y[..., ::2].clamp(max=limit), y[..., 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * (gate * alpha).sigmoid())

    # The KV cache.

    def refuse_cache(self, cache: "LayerCache") -> str | None:
        """None when this family's kernels write to such a cache and attend to it, or why not."""
        return "there are no kernels"

    def write(
        self, qkv: Tensor | Unturned, cache: "LayerCache", rope: tuple[Tensor, Tensor] | None,
        positions: Tensor, slots: Tensor, heads: int,
        norms: tuple[Tensor, Tensor, float] | None = None,
        kv: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Store K and V, and return Q (T, heads, D), normed, rotated, and turned as K is.

        Args:
            qkv: (T, (heads + 2 kv_heads) * D).
            cache: That this family does not refuse.
            rope: Cosines and sines (positions, D / 2) fp32; None: Q and K are rotated already. A
                CPU's kernels do not take None.
            positions: (T,), of each token in its text.
            slots: (T,): block * block_size + offset; kernels store no token whose slot is negative.
            heads: Of Q.
            norms: RMSNorm weights (D,) of Q's and K's heads, and the epsilon.
            kv: K and V (T, kv_heads * D) where `qkv` is Q alone, which a CPU's kernels do not take.
        """
        kv_heads = cache.k.shape[1]
        qkv = finished(qkv) if kv is None else torch.cat((finished(qkv), *kv), 1)
        q, k, v = qkv.unflatten(1, (-1, cache.head_dim)).split([heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
        if rope is not None:
            cos, sin = (table[positions, None] for table in rope)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        cache.store(k, v, slots)
        return cache.format.k.turn(q).to(q.dtype)

    def attend(
        self, q: Tensor, cache: "LayerCache", batch: Batch, scores: Scores,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of `write`'s queries (T, heads, D) over what the cache holds of their texts.

        It is put into `out`, if that is given.
        """
        return gathered(q, cache, batch, scores, out)

    # Recurrent states.

    def refuse_scan(self, scan: Scan) -> str | None:
        """None when this family's kernels run a recurrence over `Ragged` texts, or why not."""
        return "there are no kernels"

    def recur(
        self, scan: Scan, states: list[Tensor], x: Tensor, texts: Texts, rows: Tensor,
        seen: Tensor, to: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Outputs (T, M) of texts, whose states (rows, ...) go on.

        Args:
            scan: What makes outputs and states.
            states: Of all rows.
            x: Inputs (T, N), or a ring (rows, R, N) for `Ring`.
            texts: To which these belong, n of them.
            rows: Whose states each text has, (n,).
            seen: Tokens that these have seen, (n,); 0: they are zeros, whatever the row holds.
            to: Rows that get the states that the scan gives, or None. Row 0 may get any.
        """
        y, after = scan(taken(states, rows, seen), texts.given(x), texts)
        if to is not None:
            write(states, to, after)
        return y

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float,
        gate_first: bool,
    ) -> Tensor:  # fmt: skip
        """RMSNorm of groups of channels of x (T, N) fp32, and its product with SiLU(gate).

        Args:
            x: What is normed.
            gate: (T, N), whose dtype the result has.
            weight: Of the norm, (groups, N / groups), or (1, N / groups) for all of them; None:
                there is no norm.
            groups: Of channels.
            eps: Of the norm.
            gate_first: Whether the gate comes before the norm.
        """
        by = F.silu(gate.float())
        if weight is None:
            return (x * by).to(gate.dtype)
        x = (x * by if gate_first else x).unflatten(1, (groups, -1))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x = (x * weight.float()).flatten(1)
        return (x if gate_first else x * by).to(gate.dtype)

    # Other work.

    def record(
        self, step: Callable[[], Tensor], operators: Mapping[Any, Callable[..., Tensor]]
    ) -> Repeated:
        """Run a step, which can then be replayed.

        operators: what is done in operators of our own.
        """
        return Repeated(step)

    paths = staticmethod(viterbi.paths)


TORCH = Family()
# name: (family, type of its devices, package that it needs). A family that is the name of a module
# is the module's FAMILY, and imported when such a device first asks. The first that runs is taken.
FAMILIES: dict[str, tuple[Family | str, str, str]] = {
    "triton": ("anybit.kernels.triton.between", "cuda", "triton"),
    "native": ("anybit.kernels.native.between", "cpu", "llvmlite"),
}
chosen: dict[torch.device, Family] = {}


def of(x: Tensor) -> Family:
    """The family for tensors on x's device."""
    return chosen.get(x.device) or family_of(x.device)


def family_of(device: torch.device) -> Family:
    """The family for a device, which is kept for later calls."""
    for family, kind, package in FAMILIES.values():
        if kind == device.type and find_spec(package):
            one = import_module(family).FAMILY if isinstance(family, str) else family
            if one.runs_on(device):
                return chosen.setdefault(device, one)
    return chosen.setdefault(device, TORCH)


def outside(*tensors: Tensor) -> Family:
    """As `of`, for models that are not the engine's.

    The definition where gradients are asked for, where torch traces, and on GPUs that are not the
    current one, on which kernels are launched.
    """
    if torch.compiler.is_compiling():
        return TORCH
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return TORCH
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return TORCH
    return of(tensors[0])


def seen_by(packed: Packed, x: Tensor, activation: str | None) -> Tensor:
    """Activations fp32, quantized: with them, the decoded weight's product is the layer's."""
    if activation is None or not packed.format.rotate:
        return quantized_activation(x, activation)
    vector = packed.grid["rotate_in"]
    rotated = of(x).rotate(x, vector, False)
    return turned(quantized_activation(rotated, activation)) / vector.float()
