"""PTX text -> instructions."""

import re
from dataclasses import dataclass

INSTRUCTION = re.compile(r"^(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)$", re.S)
STATEMENT = re.compile(
    r"\s*(?:(?P<label>[$\w]+:)(?!:)|(?P<open>\{)(?=\s*(?:\.reg|//|$|\n))|(?P<close>\})|"
    r"(?P<statement>[^;]*;))",
    re.S,
)


class PtxError(RuntimeError):
    """The program did what a GPU would punish, or what this machine does not know."""


@dataclass
class Instruction:
    """One instruction.

    Args:
        op: Its name with all modifiers, such as "add.s32".
        args: Its operands as text; the first is mostly the result.
        predicate: The register that decides in every lane whether it runs; None for always.
        negated: Whether it runs where the predicate is false.
        text: The statement, for messages.
    """

    op: str
    args: list[str]
    predicate: str | None
    negated: bool
    text: str


@dataclass
class Program:
    """One kernel.

    Args:
        code: Its instructions; the operand of a branch is the index of its target.
        parameters: Names of its parameters, in order.
        shared: Name of its dynamic shared memory; "" where it has none.
        ctas: CTAs that must fit on a multiprocessor at once (`.minnctapersm`).
    """

    code: list[Instruction]
    parameters: list[str]
    shared: str
    ctas: int


def parse(ptx: str) -> Program:
    """The only kernel of a PTX file.

    Raises:
        PtxError: A statement cannot be read.
    """
    start = ptx.index(".entry")
    opening = ptx.index("{", start)
    header = ptx[start:opening]
    shared = re.search(r"\.extern\s+\.shared[^;]*?(\w+)\[\]", ptx)
    ctas = re.search(r"\.minnctapersm\s+(\d+)", header)
    return Program(
        _code(ptx[opening + 1 : ptx.rindex("}")]),
        re.findall(r"\.param .*?(\w+)(?:\[\d+\])?[,\n)]", header),
        shared[1] if shared else "",
        int(ctas[1]) if ctas else 1,
    )


def names(text: str) -> list[str]:
    """The registers of "{%r1, %r2}", or of "%r1"."""
    return [name.strip() for name in text.strip("{}").split(",")]


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


def _code(body: str) -> list[Instruction]:
    """Instructions; names that a block declares are made its own."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = [{}]
    count = 0
    for piece in _statements(re.sub(r"//.*", "", body)):
        if piece == "{":
            count += 1
            scopes.append({})
        elif piece == "}":
            scopes.pop()
        elif piece.endswith(":"):
            labels[_own(scopes, piece[:-1].strip(), count)] = len(code)
        elif piece.startswith(".reg"):
            if len(scopes) > 1:
                for name in piece.split()[2:]:
                    scopes[-1][name.strip(",")] = f"{name.strip(',')}#{count}"
        elif not piece.startswith("."):
            code.append(_instruction(piece, scopes, count))
    for instruction in code:
        if instruction.op.startswith("bra"):
            instruction.args = [str(labels[instruction.args[0]])]
    return code


def _statements(body: str) -> list[str]:
    """Statements, labels and braces of blocks, in order."""
    out, at = [], 0
    while at < len(body) and body[at:].strip():
        found = STATEMENT.match(body, at)
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
    renamed = {k: v for scope in scopes for k, v in scope.items()}
    args = split(rest)
    if op.startswith("bra"):
        args = [_own(scopes, args[0], count)]
    else:
        args = [re.sub(r"(?<![%\w])\w+", lambda m: renamed.get(m[0], m[0]), a) for a in args]
    predicate = renamed.get(predicate, predicate)
    return Instruction(op, args, predicate, negated == "!", " ".join(text.split()))
