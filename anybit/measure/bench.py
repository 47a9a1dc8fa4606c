"""Compare layers: one row for each kernel, format, shape and number of tokens.

Every contestant gets the same random weight and is compared with a reference before it is timed
(`timing.py` says how). What is wrong, refused or broken becomes a row without numbers that says so.
"""

import csv
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput, Unsupported, in_a_line, message
from anybit.files.directory import check_folder
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.between import seen_by
from anybit.kernels.dense import free_bytes
from anybit.kernels.processor import processor
from anybit.kernels.registry import BACKENDS, get_backend, refusals
from anybit.measure.timing import ReadFloor, check_alive, medians_in_turns, rotated
from anybit.nn.linear import QuantLinear
from anybit.quantizers.quantize import quantize_tensor

# ||y - reference|| / ||reference||. Rounding the weight and the output gives some 4e-4 in fp16 and
# 3e-3 in bf16; kernels that add partial sums in fp16 were seen to reach 2.5e-3. int8 and fp8 add
# that a token's scale may be rounded, and the 14-bit sums of Hopper's fp8 matrix units.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 1.3e-2, torch.float32: 1e-4}
TOLERANCE_QUANTIZED = {"int8": 4e-3, "fp8": 1.5e-2}


@dataclass(frozen=True)
class Row:
    """One measurement; the fields are the columns of the CSV.

    us: median time of one product in microseconds; None if it was not measured, and `note` says
    why. weight_gbps: GB/s of weight bytes. vs_cublas_fp16: how many times faster than the dense
    layer in the same run (torch's fp16 product on a GPU, which is cuBLAS; bf16 on a CPU).
    vs_floor: `us` over the time of reading the weight's bytes and doing nothing else.
    """

    gpu: str
    date: str
    commit: str
    peer: str
    format: str
    activation: str
    M: int
    N: int
    K: int
    us: float | None = None
    weight_gbps: float | None = None
    tflops: float | None = None
    vs_cublas_fp16: float | None = None
    vs_floor: float | None = None
    note: str = ""


COLUMNS = tuple(field.name for field in fields(Row))


@dataclass
class Layer:
    """A weight as one peer holds it, ready to be multiplied.

    weight: the tensors (or modules) that `run(weight, *inputs)` reads; they are deep-copied.
    nbytes: bytes of one copy that a product has to read.
    decoded: (N, K), the weight that the codes stand for.
    inputs: x (M, K) -> what `run` takes; runs outside the timed region.
    seen: x -> the activation that is really multiplied, fp32, for the reference.
    result: (what `run` returned, its inputs) -> y, where scales are still to be applied.
    random: whether codes were drawn; `decoded` need not resemble the given weight then.
    """

    weight: Any
    run: Callable[..., Tensor]
    nbytes: int
    decoded: Tensor
    inputs: Callable[[Tensor], tuple[Any, ...]] = lambda x: (x,)
    seen: Callable[[Tensor], Tensor] = lambda x: x.float()
    result: Callable[[Tensor, tuple[Any, ...]], Tensor] = lambda y, inputs: y
    random: bool = False


@dataclass(frozen=True)
class Case:
    """One contestant: who multiplies, which format, and how a dense weight becomes a `Layer`.

    activation: "fp16", "bf16", "int8" or "fp8": quantized in the timed region; "int8-given" or
        "fp8-given": quantized before it.
    dtype: of x, and of y.
    prepare: (N, K) fp32 -> Layer. Raises `Refused` when this layer is not for it.
    rounding: relative error that a correct result may have beyond that of its dtypes: of a peer
        whose kernel adds up in 16 bits.
    """

    peer: str
    format: str
    activation: str
    dtype: torch.dtype
    prepare: Callable[[Tensor], Layer]
    note: str = ""
    rounding: float = 0.0


class Refused(Exception):
    """A peer does not multiply such a layer; the text says why."""


class WrongResult(Exception):
    """A peer's result differs from the reference by more than rounding explains."""


# Cases that need no other package.


def dense_case(dtype: torch.dtype, device: torch.device) -> Case:
    """The layer before quantization: torch's matrix product, which is cuBLAS on a GPU."""

    def prepare(w: Tensor) -> Layer:
        weight = w.to(dtype)
        return Layer(weight, lambda weight, x: x @ weight.T, weight.nbytes, weight)

    peer = "cublas" if device.type == "cuda" else "torch"
    return Case(peer, short(dtype), short(dtype), dtype, prepare)


def anybit_case(scheme: str, dtype: torch.dtype, backend: str | None = None) -> Case:
    """A QuantLinear as a user gets it (peer `anybit`), or one backend (`anybit-<backend>`)."""
    fmt, activation = parse_scheme(scheme)

    def prepare(w: Tensor) -> Layer:
        try:
            fmt.check(*w.shape)
        except InvalidInput as error:
            raise Refused(str(error)) from None
        packed = quantize_tensor(w, fmt)
        packed = packed if backend is None else packed.stored()  # kernels see no rotation
        weight: Any
        run: Callable[..., Tensor]
        if backend is None:
            weight = QuantLinear(packed, None, activation, dtype)
            run = lambda layer, x: layer(x)  # noqa: E731
        else:
            reason = refusals(LayerSpec.of(packed, activation))[backend]
            if reason is not None:
                raise Refused(reason)
            module = get_backend(backend)
            weight = module.prepare(packed, activation, dtype)

            def run(prepared: Prepared, x: Tensor) -> Tensor:
                return module.linear(x, prepared, None)

        return Layer(
            weight,
            run,
            packed.nbytes(),
            packed.dequantize(),
            seen=lambda x: seen_by(packed, x, activation),
        )

    peer = "anybit" if backend is None else f"anybit-{backend}"
    return Case(peer, fmt.spec, activation or short(dtype), dtype, prepare)


# Measuring.


def run(
    schemes: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    csv_path: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """`anybit bench`: the rows of `start`, all of them; written to `csv_path` if there is one."""
    if csv_path:
        check_folder(csv_path)
    rows = list(start(schemes, shapes, ms, say))
    if csv_path:
        write_csv(csv_path, rows)
    return rows


def start(
    schemes: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    say: Callable[[str], None],
    every: bool = False,
) -> Iterator[Row]:
    """Time schemes ("fp6", "liquid@int8") against the dense layer, on this machine.

    Checks what is asked at once; says and yields each row as it is measured. With `every`, times
    each kind of kernels for this device beside the one that a layer gets.
    Raises ValueError for unknown formats and for shapes that one of them cannot store.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = [name for name, (_, devices) in BACKENDS.items() if device.type in devices]
    backends = [None, *(kinds if every else ())]  # those for all devices are decoded copies
    cases = [anybit_case(s, dense_dtype(device), name) for s in schemes for name in backends]
    for scheme in schemes:
        for shape in shapes:
            parse_scheme(scheme)[0].check(*shape)
    check_memory(shapes, ms, device)

    def rows() -> Iterator[Row]:
        say(f"on {device_name(device)}")
        for row in measure(cases, shapes, ms, device, current_commit()):
            say(line(row))
            yield row

    return rows()


def check_memory(
    shapes: Sequence[tuple[int, int]], ms: Sequence[int], device: torch.device
) -> None:
    """Unsupported for weights and tokens that do not fit: in fp32, and as the layers have them."""
    free = free_bytes(device)
    for n, k in shapes:
        if free is not None and (needed := 6 * (n * k + max(ms) * (n + k))) > free:
            raise Unsupported(
                f"{n}x{k} with {max(ms)} tokens takes {needed / 1e9:.3g} GB or more, and "
                f"{free / 1e9:.3g} GB are free; bench a smaller layer, or fewer tokens"
            )


def measure(
    cases: Sequence[Case],
    shapes: Iterable[tuple[int, int]],
    ms: Sequence[int],
    device: torch.device,
    commit: str = "",
    floor: ReadFloor | None = None,
) -> Iterator[Row]:
    """Yield a row for each shape (N, K), number of tokens M and case, in this order.

    The dense layer comes first for every M, whether or not `cases` name it. On a GPU all of one M
    take turns and find the chip as warm as the others do.
    """
    floor = floor or ReadFloor.measure(device)
    baseline = dense_case(dense_dtype(device), device)
    others = [c for c in cases if (c.peer, c.format) != (baseline.peer, baseline.format)]
    about = blank(device, commit)
    for n, k in shapes:
        random = torch.Generator(device).manual_seed(n * 31 + k)
        w = torch.randn(n, k, device=device, generator=random) * 0.02
        x = torch.randn(max(ms), k, device=device, generator=random)
        entries: list[_Entry] = []
        for case in [baseline, *others]:
            entries.append(_Entry(case, w, x, ms))
            check_alive(device, f"{case.peer} {case.format} {case.activation} at {n}x{k}")
        for m in ms:
            if device.type == "cuda":  # what graphs took
                torch.cuda.empty_cache()
            calls = [entry.calls(x[:m]) for entry in entries]
            times = iter(medians_in_turns([some for some in calls if some], device))
            found = [next(times) if some else None for some in calls]
            label, dense = replace(about, M=m, N=n, K=k), None
            for entry, us in zip(entries, found, strict=True):
                row = entry.row(label, us, floor)
                if entry is entries[0]:
                    dense = row.us
                if row.us and dense:
                    row = replace(row, vs_cublas_fp16=dense / row.us)
                yield row


class _Entry:
    """A case at one shape, prepared and checked at every M; then timed.

    What other packages raise becomes a note, not an end.
    """

    def __init__(self, case: Case, w: Tensor, x: Tensor, ms: Sequence[int]):
        self.case = case
        self.failures: dict[int, str] = {}
        try:
            layer = case.prepare(w)
            if not layer.random:
                plausible(layer.decoded.float(), w)
            self.copies = rotated(layer.weight, layer.nbytes)
        except Exception as error:
            self.failures = dict.fromkeys(ms, failure(error))
            return
        decoded = layer.decoded.float()
        for m in ms:
            try:
                tokens = x[:m].to(case.dtype)
                y = self._product(layer, tokens)
                check(y, layer.seen(tokens) @ decoded.T, tolerance(case))
            except Exception as error:
                self.failures[m] = failure(error)
        self.layer = replace(layer, decoded=decoded.new_empty(0))  # large, and not needed again

    def calls(self, x: Tensor) -> list[Callable[[], Any]]:
        """M = len(x) tokens with each copy; none where that fails."""
        if len(x) in self.failures:
            return []
        try:
            self.tokens = x.to(self.case.dtype)
            inputs = self.layer.inputs(self.tokens)
            self.before = self._product(self.layer, self.tokens)
        except Exception as error:
            self.failures[len(x)] = failure(error)
            return []
        return [partial(self.layer.run, c, *inputs) for c in self.copies]

    def row(self, label: Row, us: float | Exception | None, floor: ReadFloor) -> Row:
        """The row of a time of `calls`, or of what these raised."""
        case = self.case
        label = replace(label, peer=case.peer, format=case.format, activation=case.activation)
        if us is None:
            return replace(label, note=self.failures[label.M])
        try:
            if isinstance(us, Exception):
                raise us
            # A race, or a counter that is left behind, shows in later products.
            check(self._product(self.layer, self.tokens), self.before.float(), tolerance(case))
        except Exception as error:
            return replace(label, note=failure(error))
        return finish(replace(label, us=us, note=case.note), self.layer.nbytes, floor)

    def _product(self, layer: Layer, tokens: Tensor) -> Tensor:
        """By a copy, not by the original: the copies are what is timed."""
        inputs = layer.inputs(tokens)
        return layer.result(layer.run(self.copies[-1], *inputs), inputs)


def blank(device: torch.device, commit: str | None = None) -> Row:
    """A row of this device, day and commit (by default the checkout's), and nothing else yet."""
    commit = current_commit() if commit is None else commit
    return Row(device_name(device), time.strftime("%Y-%m-%d"), commit, "", "", "", 0, 0, 0)


def finish(row: Row, nbytes: int, floor: ReadFloor) -> Row:
    """Fill the columns that follow from the time and the weight's bytes."""
    assert row.us is not None
    return replace(
        row,
        weight_gbps=nbytes / row.us / 1e3,
        tflops=2 * row.M * row.N * row.K / row.us / 1e6,
        vs_floor=row.us / floor(nbytes),
    )


def tolerance(case: Case) -> float:
    """The relative error that a correct result may have."""
    extra = TOLERANCE_QUANTIZED.get(case.activation.removesuffix("-given"), 0.0)
    return TOLERANCE[case.dtype] + extra + case.rounding


def check(y: Tensor, reference: Tensor, limit: float) -> float:
    """Relative error ||y - reference|| / ||reference||; WrongResult above `limit` or for NaN."""
    if y.shape != reference.shape:
        raise WrongResult(f"shape {tuple(y.shape)} instead of {tuple(reference.shape)}")
    error = float((y.float() - reference).norm() / reference.norm())
    if not error <= limit:
        raise WrongResult(f"relative error {error:.2g} where {limit:.2g} is allowed")
    return error


def plausible(decoded: Tensor, w: Tensor) -> None:
    """WrongResult unless a decoded weight resembles the weight that it was made from.

    The reference of a peer rests on that peer's own decoding; this holds the decoding to the
    truth. Even one or two bits leave an angle whose cosine is far above 1/4.
    """
    size = float(decoded.norm() / w.norm())
    cosine = float((decoded * w).sum() / decoded.norm() / w.norm())
    if not (cosine > 0.25 and 0.5 < size < 2):
        raise WrongResult(
            f"the decoded weight has {size:.2g} times its size at cosine {cosine:.2g}"
        )


def failure(error: Exception) -> str:
    """A note on why there is no number."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "failed: out of GPU memory"
    kinds = {Refused: "refused", WrongResult: "wrong result"}
    kind = kinds.get(type(error))
    return f"{kind}: {message(error)}" if kind else f"failed: {in_a_line(error)}"


# Rows, names and files.


def line(row: Row) -> str:
    """A row as text for a log."""
    head = f"{row.peer:14} {row.format:28} {row.activation:10} {row.N}x{row.K} M={row.M:<5}"
    if row.us is None:
        return f"{head} {row.note}"
    return (
        f"{head} {row.us:8.2f} us {row.weight_gbps:6.0f} GB/s {row.tflops:6.1f} TFLOPS "
        f"{row.vs_cublas_fp16 or 0:5.2f}x dense {row.vs_floor:6.2f}x floor  {row.note}"
    ).rstrip()


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """All rows, with the columns of `Row`; the file appears only when it is complete."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow(_text(getattr(row, name)) for name in COLUMNS)
    temporary.replace(path)


def read_csv(path: Path) -> list[Row]:
    """The inverse of `write_csv`. Raises ValueError when the columns are others."""
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        if tuple(table.fieldnames or ()) != COLUMNS:
            raise InvalidInput(f"{path}: columns {table.fieldnames}; expected {list(COLUMNS)}")
        return [Row(**{name: _value(name, line[name]) for name in COLUMNS}) for line in table]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> Any:
    kind = next(field.type for field in fields(Row) if field.name == name)
    if kind is int:
        return int(text)
    return text if kind is str else float(text) if text else None


def short(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def dense_dtype(device: torch.device) -> torch.dtype:
    """What the dense layer that all are compared with computes in."""
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's and how many threads are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} threads"


def current_commit() -> str:
    """Short hash of the checkout that this file lies in, with + if it has changes; else ""."""
    where = Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=where, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + "+" if commit and git("status", "--porcelain", "-uno") else commit
    except OSError:
        return ""


def parse_shape(text: str) -> tuple[int, int]:
    """ "4096x14336" -> (N, K)."""
    try:
        n, k = (int(part) for part in text.lower().split("x"))
        if n < 1 or k < 1:
            raise ValueError
    except ValueError:
        raise InvalidInput(f"shape {text!r} is not NxK, such as 4096x14336") from None
    return n, k


def parse_counts(text: str) -> list[int]:
    """ "1,16,256" -> [1, 16, 256]."""
    try:
        counts = [int(part) for part in text.split(",")]
        if not counts or min(counts) < 1:
            raise ValueError
    except ValueError:
        raise InvalidInput(f"{text!r} is not a list of token counts, such as 1,16,256") from None
    return counts
