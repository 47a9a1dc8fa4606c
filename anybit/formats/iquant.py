"""The i-quants of GGUF files (llama.cpp), 1.6 to 3.5 bits: vectors of fixed tables, with signs.

    W = d * unit * (2 * step + 1) * sign * T[row]

A code stands for 8 weights, or for 4 of iq3: the number of a row of T in its lowest bits, and above
it a sign for each weight, 1 for minus. T holds 256 to 2,048 of all vectors of a few whole numbers,
those that weights are most often near. In iq1 there are no signs, and all numbers of a vector are
one more or less than those of T. d is an fp16 number of 256 columns, step one of 4 bits for 16 or
32 of them. All products are exact in fp32.

The tables are those of llama.cpp's `ggml-common.h` (MIT License, the ggml authors), as bitmaps: of
all vectors in the order of numbers whose digits they are, the first weight the lowest, those that
are rows.
"""

import zlib
from base64 import b85decode
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from anybit.core.format import Entry, Format, Grid, read_options, register
from anybit.core.frame import Frame, Rows
from anybit.core.groups import grouped, groups_of, store_scale, ungroup
from anybit.errors import InvalidInput
from anybit.formats.kmeans import nearest
from anybit.formats.kquant import BLOCK, row_unit
from anybit.formats.microscaling import by_pieces
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.tables import looked

if TYPE_CHECKING:
    import triton.language as tl

    from anybit.kernels.triton import lang

TABLES = {
    "iq1_s": (
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2"
        "dT8mb2WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;Qqcc"
        "SPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<"
        "XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;"
        "XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_OntvSw"
        "2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?"
        "+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U"
        "7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzc"
        "rHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_"
        "p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1"
    ),
    "iq2_xxs": (
        "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;"
        "is&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbH"
        "qcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_"
        "jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
    ),
    "iq2_xs": (
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c"
        ")w(<-fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVC"
        "GbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD"
        "31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;"
        "(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC"
    ),
    "iq2_s": (
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&Yf"
        "Ej@sgh^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KV"
        "P=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<"
        "S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC"
        "*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6"
    ),
    "iq3_xxs": (
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-"
        "c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKY"
        "tPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA"
        "?Xny*@kmBo4W|8$?wEo20v5Uy_5"
    ),
    "iq3_s": (
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!"
        "%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+"
        "32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)g"
        "e8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^e"
        "u)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
    ),
}


class Kind(NamedTuple):
    """One of the formats.

    Attributes:
        table: Its name in `TABLES`.
        width: Weights of a code.
        row: Bits of a row's number.
        signs: Bits of signs in a code; 7 stand for 8 signs, of which an even number is set.
        group: Columns that share a step.
        unit: See above.
        levels: Numbers of T.
        even: Whether an even number of each 8 weights has a sign.
        shift: Of iq1, which bit says that numbers are one less, not one more: "step", the highest
            of the group's step, or "code", the highest of a code.
    """

    table: str
    width: int
    row: int
    signs: int
    group: int
    unit: float
    levels: tuple[int, ...]
    even: bool = False
    shift: str = ""


ONE, TWO = (-8, 0, 8), (8, 25, 43)
KINDS = {
    "iq1_s": Kind("iq1_s", 8, 11, 0, 32, 1 / 8, ONE, shift="step"),
    "iq1_m": Kind("iq1_s", 8, 11, 0, 16, 1 / 8, ONE, shift="code"),
    "iq2_xxs": Kind("iq2_xxs", 8, 8, 8, 32, 1 / 8, TWO, even=True),
    "iq2_xs": Kind("iq2_xs", 8, 9, 7, 16, 1 / 8, TWO, even=True),
    "iq2_s": Kind("iq2_s", 8, 10, 8, 16, 1 / 8, TWO),
    "iq3_xxs": Kind("iq3_xxs", 4, 8, 4, 32, 1 / 4, (4, 12, 20, 28, 36, 44, 52, 62), even=True),
    "iq3_s": Kind("iq3_s", 4, 9, 4, 32, 1.0, (1, 3, 5, 7, 9, 11, 13, 15)),
}
TRIES = (0.55, 0.65, 0.75, 0.85, 0.95, 1.05, 1.2)  # largest weights over the largest number


@register(*KINDS)
@dataclass(frozen=True)
class IQuant(Format):
    """One of `KINDS`.

    The grid holds "d" (N, K / 256) fp16, "step" (N, K / (2 group)) uint8, the steps of two groups
    in each, the first one's lower, "table" (rows, width) int8, which is T, and "scale" (N, 1), a
    power of two, 1 unless a row's weights are beyond fp16's range.

    Attributes:
        name: One of `KINDS`.
    """

    name: str = "iq3_s"

    searched = False

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.kind.row + self.kind.signs + (self.kind.shift == "code")

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.kind.width

    @property
    def tile(self) -> tuple[int, int]:
        return (1, 2 * self.kind.group)

    def entries(self) -> dict[str, Entry]:
        return {
            "scale": Entry(),
            "d": Entry(group=BLOCK),
            "step": Entry(torch.uint8, 2 * self.kind.group),
            "table": Entry(torch.int8, table=(2**self.kind.row, self.width)),
        }

    def rows(self, codes: Tensor, grid: Grid) -> Rows:
        kind, codes = self.kind, codes.int()
        factor, minus = self._factors(grid)
        row, more = codes & ((1 << kind.row) - 1), codes >> kind.row
        table = grid["table"].float()
        if not kind.shift:
            more = evened(more) if kind.signs == 7 else more
            return Rows(table, row, more, factor)
        if minus is not None:
            more = minus.repeat_interleave(codes.shape[1] // minus.shape[1], 1)
        return Rows(torch.cat((table + 1, table - 1)), row | more << kind.row, None, factor)

    def frame(self, grid: Grid) -> Frame:
        numbers = torch.tensor(self.numbers, device=grid["step"].device)
        return Frame(numbers, self._factors(grid)[0], None)

    def values(self, codes: Tensor, grid: Grid) -> Tensor:
        rows = self.rows(codes, grid)
        return ungroup(grouped(units_of(rows), rows.factor) * rows.factor[..., None])

    @property
    def numbers(self) -> tuple[float, ...]:
        """All numbers of weights in units of their factors, 16 of them, the last repeated."""
        levels = torch.tensor(self.kind.levels)
        both = (levels + 1, levels - 1) if self.kind.shift else (levels, -levels)
        some = torch.cat(both).unique().tolist()
        return tuple(map(float, some + some[-1:] * (16 - len(some))))

    def digits(self, codes: Tensor, grid: Grid) -> Tensor:
        units = units_of(self.rows(codes, grid)).view(len(codes), -1)
        numbers = torch.tensor(self.numbers, device=codes.device)
        digits = torch.bucketize(units, numbers, out_int32=True)
        if not torch.equal(numbers[digits.clamp_max(15)], units):
            raise InvalidInput(
                f"the table of this weight is not that of {self.spec!r}; convert the model again"
            )
        return digits.to(torch.uint8)

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        factor, minus = self._factors(grid)
        x = grouped(w * (1 / grid["scale"].float()), factor)
        x = x * torch.where(factor == 0, 0.0, 1 / factor)[..., None]
        if minus is not None:
            x = x - (1 - 2 * minus[..., None])
        table = grid["table"].float()
        return self._encode(ungroup(x).contiguous(), table).to(
            torch.uint8 if self.bits <= 8 else torch.int32
        )

    def _encode(self, x: Tensor, table: Tensor) -> Tensor:
        """Codes of weights (N, K) in units of their factors, but for a shift of the group."""
        kind, n = self.kind, len(x)
        if kind.shift:
            both = torch.cat((table + 1, table - 1)) if kind.shift == "code" else table
            return nearest(x.reshape(-1, 8), both).view(n, -1)
        minus = x < 0
        if kind.even:  # the smallest of 8 weights takes the other sign, if it must
            eight, at = minus.view(n, -1, 8), x.view(n, -1, 8).abs().argmin(-1, keepdim=True)
            odd = eight.sum(-1, keepdim=True) % 2 == 1
            minus = eight.scatter(-1, at, eight.gather(-1, at) ^ odd).view(n, -1)
        size = torch.where(minus, -x, x)
        places = torch.arange(kind.width, device=x.device)
        signs = (minus.view(n, -1, kind.width).long() << places).sum(-1)
        row = nearest(size.view(-1, kind.width), table).view(n, -1)
        return row | (signs & ((1 << kind.signs) - 1)) << kind.row

    def fit(self, w: Tensor) -> Grid:
        """The factor of each group of least squared error among a few, then the d of a block for
        which all are odd multiples.
        """
        kind = self.kind
        scale = row_unit(w)
        table = table_of(kind).to(w.device)
        both = by_pieces(
            torch.cat((w, scale), 1), lambda part: self._fit(part[:, :-1] / part[:, -1:], table)
        )
        factor, minus = both.chunk(2, 1)
        most = 2 * (7 if kind.shift else 15) + 1
        per = BLOCK // kind.group
        d = (groups_of(factor, per).amax(-1) / (most * kind.unit)).half()
        unit = d.float().repeat_interleave(per, 1) * kind.unit
        step = (factor / torch.where(unit == 0, 1.0, unit) - 1).mul_(0.5).round_()
        step = step.clamp_(0, most // 2).byte() | (minus.byte() << 3)
        step = step[:, ::2] | step[:, 1::2] << 4
        return {"scale": store_scale(scale), "d": d, "step": step, "table": table}

    def _fit(self, w: Tensor, table: Tensor) -> Tensor:
        """Factors, then whether numbers are one less, of all groups of some rows."""
        kind, groups = self.kind, groups_of(w, self.kind.group)
        levels = torch.tensor(kind.levels, dtype=torch.float32, device=w.device)
        if kind.shift:
            shifts, some = ((1, -1) if kind.shift == "step" else (0,)), groups
        else:
            shifts, some = (0,), groups.abs()
        largest, found = groups.abs().amax(-1), []
        for shift in shifts:
            numbers = levels + shift
            for part in TRIES:
                factor = largest / (numbers.abs().max() * part)
                x = some * torch.where(factor == 0, 0.0, 1 / factor)[..., None]
                near = torch.bucketize(x.contiguous(), (numbers[1:] + numbers[:-1]) / 2)
                error = (numbers[near] * factor[..., None] - some).square_().sum(-1)
                found.append((error, factor, torch.full_like(factor, shift < 0)))
        errors, factors, less = (torch.stack(part) for part in zip(*found, strict=True))
        best = errors.argmin(0, keepdim=True)
        factor, minus = factors.gather(0, best)[0], less.gather(0, best)[0]
        # The rows of the table that are nearest, then the factor that is best for them.
        x = groups * torch.where(factor == 0, 0.0, 1 / factor)[..., None]
        x = x - (1 - 2 * minus[..., None]) if kind.shift == "step" else x
        ones = torch.ones(len(w), 1, device=w.device)
        codes = self._encode(ungroup(x), table.float())
        step = (minus.byte() << 3)[:, ::2] | (minus.byte() << 7)[:, 1::2]
        plain = {"scale": ones, "d": ones.expand(-1, w.shape[1] // BLOCK) / kind.unit}
        q = grouped(self.values(codes, plain | {"step": step, "table": table}), factor)
        qq, qx = q.square().sum(-1), (q * groups).sum(-1)
        factor = torch.where(qq > 0, qx / qq, factor).clamp_min_(0)
        return torch.cat((factor, minus), 1)

    def _factors(self, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """Factors of groups (N, groups), and whether a group's numbers are one less, int32."""
        stored = grid["step"]
        step = torch.stack((stored & 15, stored >> 4), -1).flatten(1).int()
        minus = step >> 3 if self.kind.shift == "step" else None
        step = step & 7 if self.kind.shift else step
        d = grid["d"].float() * self.kind.unit
        return d.repeat_interleave(step.shape[1] // d.shape[1], 1) * (2 * step + 1), minus

    # What Triton's compiler asks for: it reads fields of a format, and no tuples.

    @property
    def row(self) -> int:
        return self.kind.row

    @property
    def signs(self) -> int:
        return self.kind.signs

    @property
    def steps(self) -> int:
        return self.kind.group

    @property
    def base(self) -> float:
        return self.kind.unit

    def triton_decode(self, at: Any) -> Any:
        code = lang.code(at)
        step = lang.halves(lang.level(at, 1), at, self.steps)
        number = lang.lookup(at, 2, code & ((1 << self.row) - 1))
        more = code >> self.row
        if self.signs == 0:
            if self.bits == self.row:
                more = step >> 3
            number += (1 - 2 * lang.spread(more, self.width)).to(tl.float32)
            step = step & 7
        else:
            if self.signs == 7:
                odd = more ^ more >> 4
                odd = odd ^ odd >> 2
                more = more | ((odd ^ odd >> 1) & 1) << 7
            number = tl.where(lang.spread_bits(more, self.width) == 1, -number, number)
        factor = lang.level(at, 0) * self.base * (2 * step + 1).to(tl.float32)
        return number * lang.spread(factor, self.width)

    def hopper_decode(self, operand: str) -> Decoder | str:
        if operand == "int8" and self.kind.group < 32:
            return f"groups of {self.kind.group} columns; int8 products take 32 and more"
        return looked(self.numbers, self.kind.group, operand)

    def _spec_parts(self) -> tuple[str, list[str]]:
        return self.name, self._options(skip=("name",))

    @classmethod
    def from_spec(cls, name: str, args: list[str]) -> "IQuant":
        return cls(name, **read_options(cls, name, args, ("name",)))


@cache
def table_of(kind: Kind) -> Tensor:
    """T (rows, width) int8."""
    bitmap = torch.frombuffer(
        bytearray(zlib.decompress(b85decode(TABLES[kind.table]))), dtype=torch.uint8
    )
    bits = bitmap[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    base = len(kind.levels)
    digits = bits.flatten().nonzero() // base ** torch.arange(kind.width) % base
    return torch.tensor(kind.levels, dtype=torch.int8)[digits]


def units_of(rows: Rows) -> Tensor:
    """Numbers of weights in units of their factors, (N, K) fp32."""
    values = embedding(rows.row, rows.table)
    if rows.signs is not None:
        places = torch.arange(values.shape[-1], dtype=torch.int32, device=values.device)
        values = values * (1 - 2 * (rows.signs[..., None] >> places & 1))
    return ungroup(values)


def evened(signs: Tensor) -> Tensor:
    """8 signs of 7, the last being set where an odd number of them is; int32."""
    odd = signs ^ signs >> 4
    odd = odd ^ odd >> 2
    return signs | ((odd ^ odd >> 1) & 1) << 7
