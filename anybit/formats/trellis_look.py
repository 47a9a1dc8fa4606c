"""The trellis code `look`: bytes of the state are hashed, and the hash looks up whole vectors.

A step gives four weights of 1 or 2 bits, or two of 3 or 4, from a table of 1 KB:

    hash = low byte of the state * LOW + high byte * HIGH       below 2**16; a DP4A
    word = bits 7 to 14 of the hash; of two weights, bit 1 says which half of the word
    signs = hash * SPREAD mod 2**32
    value i = the word's byte i, complemented (-1 - v) if bit 8 i + 7 of the signs is set

So on a GPU the hash's bits are the address of a word, or of half a word, of which each bank of
shared memory has a copy (`hash & 0x7F80 | lane << 2`, with `& 0x7F82` for halves). A step of 2 bits
and four weights is a byte, as is one of 4 bits and two, so a state is two bytes as they lie.

`benchmarks/look_tables.py` trains the tables on Gaussian numbers.
"""

import base64
from dataclasses import dataclass

import torch
from torch import Tensor

# See `trellis.GAINS`.
GAINS = (1.16, 0.97, 0.94, 0.85)


@dataclass(frozen=True)
class Look:
    """Constants of the hash, and the table.

    Attributes:
        width: Weights of a step.
        low: What a state's low byte is multiplied by.
        high: What its high byte is; the two add up to at most 257.
        spread: What the hash is multiplied by for signs.
        packed: 256 words of four int8, or 512 halves of two, in base 85.
    """

    width: int
    low: int
    high: int
    spread: int
    packed: str

    def places(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States (S,) int64 -> rows of the table (S,), and which numbers are complements.

        Those are 1 where they are, else 0, (S, width).
        """
        h = (states & 255) * self.low + (states >> 8) * self.high
        row = h >> 7 & 255
        if self.width == 2:
            row = row * 2 + (h >> 1 & 1)
        return row, h[:, None] * self.spread >> 8 * torch.arange(self.width) + 7 & 1

    def table(self) -> Tensor:
        """(256, 4) or (512, 2) int8; complements make up the other half of each number."""
        data = bytearray(base64.b85decode(self.packed))
        return torch.frombuffer(data, dtype=torch.int8).view(-1, self.width)


def numbers(states: Tensor, rate: int) -> Tensor:
    """States (S,) int64 and bits a weight -> values (S, width)."""
    look = LOOKS[rate - 1]
    row, complement = look.places(states)
    return look.table()[row].long() ^ -complement


FOUR = (
    "1P>($APPo8`V<NQE(Qw|2P6$bFAxL-Azn=^Fb{AM83+mr{tgx<69o$%EC?DR7H|y;E?O`MGCo@wEEO(301yxpLo_8X75"
    "^+86eT5A0tp2fO$;;&5DE`2HUkw26CD)|4k-l)5l15$EI>CW5)&l>ViOfoBmN2o30fZy4;FeHNFW^`Dl82X3<U!-AtE{"
    "hH+dK!6a^j!5DpS>1~5TB4FyCA3M&601_Bu<AV@F~K^tf`2QEY<9{vth2^9)HIU^TK9W_W67CjGYSPl~gH8m3s8V(&6c"
    "M%U4GA|S~M+_)6J_;ZQ4GI`U5<(0d5=Tc;G!_OaG8+UROk6e|8U!LXG7B#Z03R_!11cdA2?s764;l>*AO#Z~SThJG4hm"
    "TX6Colk4l*$q1tcOGBn&JbHxe5K1r-@XWHAyA5Fj)V3JwGbTn7;?Bl;0M3KTj4^G{qH6BY?45*7^?78eEv9}`*_AS($6"
    "8a@&*3ppW69bF0^J_rXeBNa6w7Ys=u9|{``9VARBHwqFgRvi)$3pF(XB_ksnQx7H^3qT4>9S#N=9y$>u4i-2X7zjfW8y"
    "_+Y2qz;53L6Gn2pcgO0}e_c4<bMk9v(0{7z_eB79tHDJSz$$4+AYt`ZotO5HlhJK_OEJ6)0;(2s|P)A3YlhIV2YeA`}e"
    ")LlZz;2MiDbBo$HpIT;RZ2>=aE843*-@N^q32vaXB0zVTSF9Rq%5C;+q3kozi8y_krBRmNo02o^oARibOC{_wRGA0`!C"
    "{hj$RS#4YF+&I&9V`SE8X+rw5+x8QFA^ahGC>CdF&hpO5+xHp3qU#_EEEMi8cQ2JKodMF4pIpSN*)9{9uON11T+l~Aub"
    ";d2UG|x3;Zu35D_6P9zh}+`V;{nJ3a|FaXTd-5*934TR{~}9{ed0BMlWNArJ@$6arp27Bp%La1t~TD<nluMk^B#{wV_v"
    "A}<XDIU)rP0T&4^Bq0kmNB#u~3o;}k3I;tfA|MJX6mm8YAs87aOClmVF9=H_0U9I?2nsd|4hJg)4kr;H8YT!jH6uGI0w"
    "p0VG#Wn_OF0b-AQLJAPA4%5H&GxjFD57uPFoEW3q&3VCo(|w5Fb%8IxsI48v_9*5hNB0BP}I42mTocA08G42rf(pI|>*"
    "b1_B8UAsr1;Jx3o8G5|vfDK-mDBsw@eI!G#9U=ctz4=f2T|3U^1BNQA!Q4a(g2@N1C5F!;2G7>BV3LP>p4Ng7?J^~L+P"
    "eDWpB@s3cJ_sWlFc2SB2n!(<5)e&e2@?quPc%a>5E2(7G6w(~F9bL)6lEP#3oQ=`7CsF9F*Gd!Iv4{AAT25-"
)
THREE_BITS = (
    "0uUJk8Vfr<0}BWTAOjc=2p|zTCJq4w7E(bg9}!yx5(^6r0{;*n3IPHdA_Es46Hg5T5mYb<CM`V_AQmw$01^!gI5H(K75"
    "pU=8W|%+2?GThO$;;$3lRw+EC3z~5E>H-3nB^t3OOMeDK9M_4HOpvRuC0p695Dg0aP9c1PEp#J|7SqA}kOT2LA*n93(O"
    "aJa!8$4+RwkED9fM6Cyb>69PE|{~`Vz1q2f#8b2fqQ!Hgd3@0`h8UYJN3K#}EC>;(z7ArRv4=E5!L=6rGEie`Z91ac>W"
    "(flkFewT)LkJ@%E(ah21_u#897PTeB|S7iD-QuAD<1<KRa`R^8VDaWB@rkI1{Nwn10){=2MR0|6&M2#7yu9#O*#l43ky"
    "jR5F{li6Dubh10Nd?9StWHF%TLD1rilESso4#4H_m72?hrROavA&9RU<M5)>>31Xx@a3K9w%7ZU>!6%Ypo5)V))A0H70"
    "6fqYo4KN%>8C(A(Hw*+W9uhPj6$wHc7Yq^z6cs=mEfEbVPahEr4KOVNAR`|ULJcM#3PA=#3<m}cBQO{x3l%RE7y~*F6C"
    "WlI1sxp&0}}{H1sN|H{|rhV4kS1W7#=M<6$k(?6&DQ|H695k5CJJm1T6wA3Me84JPJYs5*u4I4KW-rAT}5fFC!8S6A}j"
    "lI2Jcd2?z}X9STSOISLA15dIQ76$k|w5`G6a06`xX1T6^~C;=rd00;*U3<WSS8XGDl8Z-|X0uN3Z7akK3BUlGCCL|vbB"
    "2EqtN)J5_H986#8z~A3AR8`X3K|O`EfyUXDmDWJBp?zB5+xNb4mm9nD;EPb7D56(Jry(?2ulM2Jskry7Y-H{1}O^?7%C"
    "hH22BDW1OO!*4-OM18#f*o{R{&VJT(h7c`zvs5E3d<M=T>j9|I)|9Saa3AQlP=5(Pv$2Q5?vcMmZN9~Cl7J1Y+r10@F("
    "94QY1C?o+202u@xB^?YZJ^%m&6EGqk2m(4JAsh}R25LA18yFcMKPnh6AO}Dj1{@s-2M8|;2n;6%3m^_16(a{OFCR7`2_"
    "PdSDi=2yNG%cv7ZoW1FeoPjJVqQO9w#INQb+;>6h0yg9VjsW6Bk1yFC-`v7ytqn6(JA{A1o&{0s#&I8y^z{5Gq6jFbWb"
    "B0R;dQ92XZyFE<+<CjC4GGARc;AUHBHFFqwYRR%aE1SbL~05=8;9~dA#M-vGZ2@V_~6dn@{CKn_J3>h^k1xGRgHUb1hL"
    "rF9R9|$oGBnKT6B@7iu2?-bs2L(M@0SW^aK{Z4o2@Vb!B@Y1>A_y-f4^$gC3Mvf*5Hth=DlRDjFA@R`9Vadw"
)
FOUR_BITS = (
    "0uLPn83#Z>0165SA_x`_2qY0ZB@+b!6je$lBoA8&6A26s0RRsm3I+rkBmo&74pa>T8CEU{BQQN19}_Y$01*!fIy5LL7X"
    "K?07$77?1qA^dN(eUw3=aw>DE%1>6&Mo@4j~K!2|6GfEH5h}4H6guR1G6*68{Dd1XUje1PWy%IwTbwCMy#W2mt~s8YVI"
    "YJ8=;&4+0efDhLv25+F7-4gxy{0VVz)0R<E%7C$8lSS(gI4J17k83PMO3l;`FC>an#7ArRt4=fi=L=X`NDl!)c8V?Q@W"
    "fKPxFDDE$Lkc7(E(ak22nP*396<>eB0V-kDiQ=GE*=3LS6ej}8Ui3SBnv4E0~jqs1t%K_0|_h|78wN(83PR%O*{!63kg"
    "aS5F;Zd5h^Mg1RWa_9}OfIF%uXF1`ioKS|1J(4IL*E1quoYP6QS*AOaFQ5EU#1`&?QS3lj($78D2*5)cLk5)e=(9wH72"
    "6EPPl5i=b}9bW$;G!FkV9uPJi6ADBb7z-8*6&FPyD-R7VPaY2r3okGOA|4?VM+_t!2SN%!4h9GdBQP2#4;eEP7y~>G79"
    "S-N1|J>>1Q!TM2OBOK{0vGQ4J9}Z8X7S@69@t_6c-8=H695j6#pno{wxA33o0K3Knp_z6CGzc2{sxpBsdxlFeDTY7!n5"
    "nIvOuY1q2NN9SKPOHxLe84*?566a@no5`G0U0z@Gf1T6~~Dgq%f2MGxf3<WGL8XYDf9W)LW0}@gf8Xgi6Bv%JECnF#cB"
    "2W$tPYym0I6Da(A1MkA9~&=U2ptI@Ee;$NDmMZFBp(wA6DAcc4L2_mDH#Se7eoR*Kov6^3{3+BKN|o!7Z4N{2rdZ|87&"
    "<Q1yBPa0t6--4-OS28aE;r{tW;VKQ{|8c`7Ur5fv>|OD!Tn9RVT@9Sjm491{!(5d}s#1}jtpcnvoSA{I7HIw=no|0e_&"
    "94!g~DkcRG0v7`yCLjkZJpcd)7BnIt3kE(T9vclL1!_719U2)TLM<6G9|$}l0~{U(2MRI?3=1Ly3?L616(R>PFCjG}2_"
    "hmTFBUi!K`9Xp84xK1H6bblK1mxUA0#CPS4aN^5<(&jAT2Kf6B|S$G$|+*6#@Yl6DJY~AuA>|{s9mJ9v>713@SkcG7J("
    "I2Lc8Z85$i+GddX<A^|-JF)a=_9yu>IDL*MZWCb`a1}6n00XPH=92OovM->Pb3=SM36eAW3ClVzI3>+*c14}akHUR@gN"
    "J%ybA__4MDGC}FDhd=y2L~At1qMG^{t5#YNHRSz3lI+*B@hD>Bn31o4@($14=D-*5;g?`DJ?1iFdG039V#p!"
)
LOOKS = (  # by bits a weight, from 1 on
    Look(4, 129, 128, 0x35BF992D, FOUR),
    Look(4, 129, 128, 0x35BF992D, FOUR),
    Look(2, 169, 88, 0x0741C7A9, THREE_BITS),
    Look(2, 127, 130, 0x31B1C27F, FOUR_BITS),
)
WIDTHS = tuple(look.width for look in LOOKS)
