"""A checkpoint's tensors, read while the GPU takes those before them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from anybit.checkpoint.layout import Tensors
from anybit.files.safetensors import Stored

PINNED = 1 << 28  # bytes of a tensor that is read into pinned memory, of which little is to be kept
EARLY = 1 << 28  # bytes that are read before they are asked for


class Reads:
    """Reads tensors; for a GPU also the next ones, which cost the host's memory EARLY bytes.

    order: names of tensors or of layers, in which they are asked for.
    """

    def __init__(self, stored: Mapping[str, Tensors], order: Iterable[str], device: torch.device):
        self.pinned = device.type == "cuda"
        within = defaultdict(list)  # tensors of a layer in codes
        for name in stored:
            within[name.rpartition(".")[0]].append(name)
        names = [[n] if n in stored else within[n.rpartition(".")[0]] for n in order]
        every = dict.fromkeys(name for each in names for name in each) if self.pinned else {}
        self._next = [(n, t) for n in reversed(every) if isinstance(t := stored[n], Stored)]
        self._early: dict[str, tuple[Stored, Future[Tensor]]] = {}
        self._bytes = 0  # of these
        self._thread = ThreadPoolExecutor(1, "anybit-reads")

    def take(self, name: str, stored: Tensors) -> Tensor:
        """A tensor, in the host's memory, which is then forgotten here.

        Raises:
            InvalidInput: Its file is damaged.
        """
        early, future = self._early.pop(name, (None, None))
        if early is not None:
            self._bytes -= early.nbytes
        self._go_on(name)
        return self._read(stored) if future is None or early is not stored else future.result()

    def _go_on(self, name: str) -> None:
        """Have the next ones read. name: the tensor that is asked for now."""
        if self._next and self._next[-1][0] == name:
            self._next.pop()
        while self._next and self._bytes + (size := self._next[-1][1].nbytes) <= EARLY:
            name, stored = self._next.pop()
            self._bytes += size
            self._early[name] = stored, self._thread.submit(self._read, stored)

    def _read(self, stored: Tensors) -> Tensor:
        if self.pinned and isinstance(stored, Stored):
            return stored.read(pinned=stored.nbytes <= PINNED)
        return stored.read()
