"""A small PTX machine: runs a compiled Hopper kernel on the CPU, thread by thread.

It knows the instructions that CuTe DSL makes of our kernels, with what they mean across threads:
mbarriers with transaction counts, bulk and tensor copies (swizzled, multicast), WGMMA fragments and
descriptors, stmatrix, clusters. Warps take turns at random and asynchronous work happens at a
random moment between its issue and the wait for it, so that a missing wait shows as a wrong result
under some seed. Memory is checked: unaligned or foreign addresses and deadlocks are errors.

What it cannot see: `ptxas`, timing, and memory ordering finer than an instruction.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WARP = 32
LANES = np.arange(WARP)
SHARED_BASE = 1024  # of dynamic shared memory in each CTA's window
WINDOW = 1 << 24  # shared addresses of CTA r + 1 of the cluster start at (r + 1) * WINDOW
INSTRUCTION = re.compile(r"^(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)$", re.S)


class PtxError(RuntimeError):
    """The program did what a GPU would punish, or what this machine does not know."""


@dataclass
class Instruction:
    op: str
    args: list[str]
    predicate: str | None
    negated: bool
    text: str
    run: Callable[..., Any] | None = None


@dataclass
class TensorMap:
    """What a kernel's tensor map stands for: rows (M, bytes) and a box of 128 bytes x rows."""

    rows: np.ndarray
    box: int
    element: int


@dataclass
class Barrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def check(self) -> None:
        if self.pending < 0:
            raise PtxError("an mbarrier got more arrivals than it expects")
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase ^= 1


@dataclass
class Warp:
    index: int
    cta: "Cta"
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    pc: np.ndarray = field(default_factory=lambda: np.zeros(WARP, np.int64))
    live: np.ndarray = field(default_factory=lambda: np.ones(WARP, bool))
    waiting: Any = None  # a condition that must hold before the warp goes on
    open_group: list = field(default_factory=list)  # WGMMAs not committed yet
    groups: list[list] = field(default_factory=list)  # committed ones, oldest first
    reading: list[str] = field(default_factory=list)  # A registers of WGMMAs not waited for
    cluster_arrivals: int = 0
    copies: list = field(default_factory=list)  # of `cp.async`: (shared address, bytes)


@dataclass
class Cta:
    rank: int
    index: int
    shared: np.ndarray
    barriers: dict[int, Barrier] = field(default_factory=dict)
    named: dict[int, list[int]] = field(default_factory=dict)  # id -> [arrived warps, generation]
    warps: list[Warp] = field(default_factory=list)


class Machine:
    """One kernel, ready to be launched on numpy arrays."""

    def __init__(self, ptx: str):
        body = ptx[ptx.index("{", ptx.index(".entry")) + 1 : ptx.rindex("}")]
        header = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
        self.parameters = re.findall(r"\.param .*?(\w+)(?:\[\d+\])?[,\n)]", header)
        self.code, self.labels = parse(body)
        for instruction in self.code:
            instruction.run = handler(instruction.op)

    def launch(
        self,
        parameters: list[Any],
        grid: int,
        threads: int,
        shared: int,
        cluster: int = 1,
        seed: int = 0,
    ) -> None:
        """parameters: numpy arrays (global memory), integers, and one `TensorMap`."""
        self.random = np.random.default_rng(seed)
        self.eager = 0.0 if seed % 2 == 0 else 0.2  # how soon a WGMMA ends that nobody waits for
        self.memory: list[tuple[int, np.ndarray]] = []
        self.values: dict[str, Any] = {}
        for name, value in zip(self.parameters, parameters, strict=True):
            if isinstance(value, np.ndarray):
                base = 1 << 32 if not self.memory else self.memory[-1][0] + (1 << 32)
                self.memory.append((base, value.reshape(-1).view(np.uint8)))
                value = base
            self.values[name] = value
        for start in range(0, grid, cluster):
            self._run_cluster(start, cluster, grid, threads, shared)

    def _run_cluster(self, start: int, size: int, grid: int, threads: int, shared: int) -> None:
        self.grid, self.later = grid, []
        self.ctas = [
            Cta(r, start + r, np.full(SHARED_BASE + shared, 0xA5, np.uint8)) for r in range(size)
        ]
        warps = []
        for cta in self.ctas:
            cta.warps = [Warp(i, cta) for i in range(threads // WARP)]
            warps += cta.warps
        idle = 0
        while warps:
            warp = warps[self.random.integers(len(warps))]
            ran = self._turn(warp)
            if self.later and self.random.random() < 0.3:
                self.later.pop(self.random.integers(len(self.later)))()
                ran = True
            idle = 0 if ran else idle + 1
            if idle > 200 * len(warps) and not self.later:
                at = {f"cta {w.cta.rank} warp {w.index}": self.code[w.pc.min()].text for w in warps}
                raise PtxError(f"deadlock: {at}")
            if not warp.live.any():
                if warp.groups or warp.open_group:
                    raise PtxError("a warp left with WGMMAs in flight")
                warps.remove(warp)
        for late in self.later:
            raise PtxError(f"the cluster left with copies in flight: {late}")

    def _turn(self, warp: Warp) -> bool:
        """Let a warp run for a while; returns whether it did anything."""
        if warp.groups and self.random.random() < self.eager:
            self.retire(warp, len(warp.groups) - 1)
        if warp.waiting is not None:
            if not warp.waiting():
                return False
            warp.waiting = None
        for _ in range(int(self.random.integers(4, 60))):
            if not self._step(warp):
                return True
        return True

    def _step(self, warp: Warp) -> bool:
        """One instruction of the lanes that are furthest behind; False when the warp must wait."""
        if not warp.live.any():
            return False
        at = int(warp.pc[warp.live].min())
        instruction = self.code[at]
        active = warp.live & (warp.pc == at)
        warp.pc[active] = at + 1
        if instruction.predicate is not None:
            taken = warp.registers[instruction.predicate] != 0
            active &= ~taken if instruction.negated else taken
        if not active.any():
            return True
        assert instruction.run is not None
        try:
            return instruction.run(self, warp, active, instruction) is not False
        except PtxError as error:
            raise PtxError(f"{error} at: {instruction.text}") from None
        except Exception as error:
            raise PtxError(f"{error!r} at: {instruction.text}") from error

    # Operands.

    def read(self, warp: Warp, name: str) -> np.ndarray:
        """An operand's 64 raw bits in every lane."""
        found = warp.registers.get(name)
        if found is not None:
            return found
        special = {
            "%tid.x": warp.index * WARP + LANES,
            "%laneid": LANES,
            "%ctaid.x": warp.cta.index,
            "%nctaid.x": self.grid,
            "__dynamic_shmem__0": SHARED_BASE,
        }
        if name in special:
            return np.broadcast_to(np.uint64(special[name]), WARP).astype(np.uint64)
        if name in self.values:  # the address of a parameter
            return np.full(WARP, self.parameters.index(name), np.uint64)
        if name.startswith("0f"):
            return np.full(WARP, int(name[2:], 16), np.uint64)
        if name.startswith("0d"):
            raise PtxError("no doubles")
        try:
            value = int(name, 0)
        except ValueError:
            raise PtxError(f"{name} is read before it is written") from None
        return np.full(WARP, value & (1 << 64) - 1, np.uint64)

    def write(self, warp: Warp, name: str, value: np.ndarray, active: np.ndarray) -> None:
        if name == "_":
            return
        if name in warp.reading:
            raise PtxError(f"{name} is written while a WGMMA may read it")
        value = np.broadcast_to(np.asarray(value), WARP)
        if active.all():
            warp.registers[name] = value.astype(np.uint64)
            return
        old = warp.registers.get(name)
        old = np.zeros(WARP, np.uint64) if old is None else old
        warp.registers[name] = np.where(active, value.astype(np.uint64), old)

    # Memory.

    def shared_at(self, cta: Cta, address: int, size: int) -> np.ndarray:
        """A view of `size` bytes of shared memory, in this CTA's window or another's."""
        if address >= WINDOW:
            cta, address = self.ctas[address // WINDOW - 1], address % WINDOW
        if address % min(size, 16) or not SHARED_BASE <= address <= len(cta.shared) - size:
            raise PtxError(f"shared address {address} for {size} bytes")
        return cta.shared[address : address + size]

    def global_at(self, address: int, size: int) -> np.ndarray:
        for base, array in self.memory:
            if base <= address <= base + len(array) - size:
                if address % min(size, 16):
                    raise PtxError(f"unaligned global address: {address - base}, {size} bytes")
                return array[address - base : address - base + size]
        raise PtxError(f"global address {address:#x} for {size} bytes belongs to nothing")

    def barrier(self, cta: Cta, address: int) -> Barrier:
        if address >= WINDOW:
            cta, address = self.ctas[address // WINDOW - 1], address % WINDOW
        if address not in cta.barriers:
            raise PtxError(f"no mbarrier at {address}")
        return cta.barriers[address]

    def retire(self, warp: Warp, keep: int) -> None:
        """Do a warp's oldest WGMMA groups until `keep` are left."""
        while len(warp.groups) > keep:
            for work in warp.groups.pop(0):
                work()


# Reading the text.


def parse(body: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions and labels; names that a block declares are made its own."""
    body = re.sub(r"//.*", "", body)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = [{}]
    count = 0
    for piece in _statements(body):
        if piece == "{":
            count += 1
            scopes.append({})
        elif piece == "}":
            scopes.pop()
        elif piece.endswith(":"):
            name = piece[:-1].strip()
            labels[_own(scopes, name, count)] = len(code)
        elif piece.startswith(".reg"):
            if len(scopes) > 1:
                for name in piece.split()[2:]:
                    scopes[-1][name.strip(",")] = f"{name.strip(',')}#{count}"
        elif not piece.startswith("."):
            code.append(_instruction(piece, scopes, count))
    for instruction in code:
        if instruction.op.startswith("bra"):
            instruction.args = [str(labels[instruction.args[0]])]
    return code, labels


def _statements(body: str) -> list[str]:
    """Statements, labels and braces of blocks, in order."""
    out, at = [], 0
    pattern = re.compile(
        r"\s*(?:(?P<label>[$\w]+:)(?!:)|(?P<open>\{)(?=\s*(?:\.reg|//|$|\n))|(?P<close>\})|"
        r"(?P<statement>[^;]*;))",
        re.S,
    )
    while at < len(body) and body[at:].strip():
        found = pattern.match(body, at)
        if not found:
            raise PtxError(f"cannot read: {body[at : at + 80]!r}")
        out.append(found.group().strip().rstrip(";").strip())
        at = found.end()
    return [s for s in out if s]


def _own(scopes: list[dict[str, str]], name: str, count: int) -> str:
    if len(scopes) > 1 and not name.startswith("$L"):
        return f"{name}#{count}"
    return name


def _instruction(text: str, scopes: list[dict[str, str]], count: int) -> Instruction:
    found = INSTRUCTION.match(text)
    if not found:
        raise PtxError(f"cannot read: {text!r}")
    negated, predicate, op, rest = found.groups()
    names = {k: v for scope in scopes for k, v in scope.items()}
    args = split(rest)
    if op.startswith("bra"):
        args = [_own(scopes, args[0], count)]
    else:
        args = [re.sub(r"(?<![%\w])\w+", lambda m: names.get(m[0], m[0]), a) for a in args]
    predicate = names.get(predicate, predicate)
    return Instruction(op, args, predicate, negated == "!", " ".join(text.split()))


def split(text: str) -> list[str]:
    """Operands, at the commas outside of brackets."""
    out, depth = [""], 0
    for c in text:
        depth += (c in "[{") - (c in "]}")
        if c == "," and not depth:
            out.append("")
        else:
            out[-1] += c
    return [a.strip() for a in out if a.strip()]


# What instructions do: `ptx_instructions.py` adds to this list, and so do `ptx_warp.py` and
# `ptx_wgmma.py` where they are imported. A handler gets (machine, warp, active lanes, instruction);
# False means that the warp must wait.

HANDLERS: list[tuple[re.Pattern[str], Callable[..., Any]]] = []


def on(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: this function does the instructions whose names match."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.append((re.compile(pattern), fn))
        return fn

    return add


def handler(op: str) -> Callable[..., Any]:
    for pattern, fn in HANDLERS:
        if pattern.fullmatch(op):
            return fn
    raise PtxError(f"this machine does not know {op}")


# Late, because it needs what stands above.
from tests.kernels import ptx_instructions  # noqa: E402, F401
