"""Blocks of the KV cache and rows of states: who holds which, and which prefixes are known."""

import hashlib
from array import array
from collections import OrderedDict

from anybit.engine.sequence import Sequence


class Kept:
    """Rows of states as they were at ends of prefixes, by the digests of these.

    When none is free, the longest unused one is given to another prefix.
    """

    def __init__(self, rows: range):
        self.free = list(rows)
        self.known: OrderedDict[bytes, int] = OrderedDict()

    def find(self, digest: bytes) -> int:
        """The row of a prefix that is used now; 0: there is none."""
        if digest in self.known:
            self.known.move_to_end(digest)
        return self.known.get(digest, 0)

    def take(self) -> int:
        """A row to write to, which nobody finds before it is put here; 0: there is none."""
        if not self.free and self.known:
            self.free.append(self.known.popitem(last=False)[1])
        return self.free.pop() if self.free else 0

    def put(self, digest: bytes, row: int) -> None:
        """A row now holds the states of a prefix."""
        if digest in self.known:  # another text was there first
            self.free.append(row)
        self.known.setdefault(digest, row)

    def forget(self, digest: bytes) -> None:
        """Find a prefix no more."""
        if digest in self.known:
            self.free.append(self.known.pop(digest))


class BlockManager:
    """Gives blocks of `block_size` tokens to sequences, shares them by prefix, takes them back.

    A full block is known by the hash of its tokens, of all blocks before it and of the text's
    adapter, so equal prefixes find each other. Blocks that nobody holds stay findable until they
    are needed for something else, the longest unused first.

    rows: of recurrent states, one for each sequence that holds blocks; 0: no layer keeps any.
    kept: of more rows, for states as they were at ends of prefixes. A prefix that is found ends
    where there are such states, and without any of these rows none is found.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        rows: int = 0,
        kept: int = 0,
    ):
        self.count, self.block_size, self.recurrent = blocks, block_size, rows > 0
        self.prefix_caching = prefix_caching and (not rows or kept > 0)
        self.rows = list(range(rows, 0, -1))  # free ones; 0 takes what nobody reads
        self.kept = Kept(range(rows + 1, rows + kept + 1))
        self.holders = [0] * blocks
        self.digest: list[bytes | None] = [None] * blocks
        self.known: dict[bytes, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # oldest first

    @property
    def usage(self) -> float:
        """Fraction of the blocks that running sequences hold."""
        return 1 - len(self.free) / self.count

    def match(self, seq: Sequence, multiple: int = 1) -> int:
        """Give a sequence that holds nothing the blocks of its longest known prefix.

        multiple: of how many tokens the prefix must be.

        Returns:
            The row of states at the prefix's end, if there are states; else 0.
        """
        # At least one token must run through the model, or there is nothing to sample from.
        for i in range((len(seq.tokens) - 1) // self.block_size if self.prefix_caching else 0):
            block = self.known.get(self._digest(seq, i))
            if block is None:
                break
            if not self.holders[block]:
                del self.free[block]
            self.holders[block] += 1
            seq.blocks.append(block)
        row, seq.fork = 0, len(seq.blocks) * self.block_size
        while seq.blocks and (self.recurrent or len(seq.blocks) * self.block_size % multiple):
            row = self.kept.find(seq.digests[len(seq.blocks) - 1])
            if row:
                break
            self._give_back(seq.blocks.pop())
        seq.computed = len(seq.blocks) * self.block_size
        return row

    def keep(self, seq: Sequence, tokens: int) -> tuple[tuple[int, int], ...]:
        """Places in the next `tokens` tokens whose states a later text may begin with, and rows.

        They are the last whole block's end, and where a known prefix has ended without states: what
        two texts have begun with, others may, too.
        """
        last = (len(seq.tokens) - 1) // self.block_size * self.block_size
        out = []
        for at in sorted({seq.fork, last}) if self.recurrent and self.prefix_caching else ():
            inside = tokens > 1 and seq.computed < at <= seq.computed + tokens
            if inside and self._digest(seq, at // self.block_size - 1) not in self.kept.known:
                out.append((at, self.kept.take()))
        out = [(at, row) for at, row in out if row]
        seq.keeping += out
        return tuple(out)

    def missing(self, seq: Sequence, tokens: int) -> int:
        """Blocks that a sequence lacks for `tokens` tokens in all; may be negative."""
        return -(-tokens // self.block_size) - len(seq.blocks)

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Make room for `tokens` tokens in all; False, and nothing done, without enough of it."""
        need = self.missing(seq, tokens)
        if need > len(self.free) or (self.recurrent and not seq.row and not self.rows):
            return False
        if self.recurrent and not seq.row:
            seq.row = self.rows.pop()
        for _ in range(need):
            block, _ = self.free.popitem(last=False)
            self._forget(block)
            self.holders[block] = 1
            seq.blocks.append(block)
        return True

    def shrink(self, seq: Sequence) -> None:
        """Take back the blocks that a sequence's next token does not need."""
        keep = seq.computed // self.block_size + 1
        for block in reversed(seq.blocks[keep:]):
            self._give_back(block)
        if len(seq.blocks) > keep:
            seq.blocks = seq.blocks[:keep]  # a new list, as in `release`

    def computed(self, seq: Sequence, tokens: int) -> None:
        """Note that the cache now holds the first `tokens` tokens; full blocks become findable."""
        first, seq.computed = seq.computed // self.block_size, tokens
        for i in range(first, tokens // self.block_size if self.prefix_caching else 0):
            digest, block = self._digest(seq, i), seq.blocks[i]
            if digest not in self.known:
                self.known[digest] = block
                self.digest[block] = digest
        for at, row in seq.keeping:
            if at <= tokens:
                self.kept.put(self._digest(seq, at // self.block_size - 1), row)
        seq.keeping = [(at, row) for at, row in seq.keeping if at > tokens]

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of a sequence, and its row, at once."""
        for block in reversed(seq.blocks):  # ends of texts are forgotten before their beginnings
            self._give_back(block)
        seq.blocks = []  # a new list: captured graphs know sequences' blocks by theirs
        seq.computed = 0
        self.kept.free += [row for _, row in seq.keeping]
        seq.keeping = []
        if seq.row:
            self.rows.append(seq.row)
            seq.row = 0

    def forget(self) -> None:
        """Find no prefix again that is in the cache now."""
        self.known.clear()
        self.digest = [None] * self.count
        for digest in list(self.kept.known):
            self.kept.forget(digest)

    def _give_back(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            self.free[block] = None

    def _digest(self, seq: Sequence, i: int) -> bytes:
        """Hash of blocks 0 to i, made once. A strong one: a collision would mix up two texts."""
        for at in range(len(seq.digests), i + 1):
            tokens = array("q", seq.tokens[at * self.block_size : (at + 1) * self.block_size])
            parent = seq.digests[at - 1] if at else (seq.params.adapter or "").encode()
            seq.digests.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())
        return seq.digests[i]

    def _forget(self, block: int) -> None:
        digest = self.digest[block]
        if digest is not None:
            del self.known[digest]
            self.digest[block] = None
            self.kept.forget(digest)
