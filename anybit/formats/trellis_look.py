"""The trellis code `look`: bytes of the state are hashed, and the hash looks up whole vectors.

A step gives four weights of 1 or 2 bits, or two of 3 or 4, from a table of 1 KB:

    hash = low byte of the state * LOW + high byte * HIGH       below 2**16; a DP4A
    word = bits 7 to 14 of the hash; of two weights, bit 1 says which half of the word
    signs = hash * SPREAD mod 2**32
    value i = the word's byte i, complemented (-1 - v) if bit 8 i + 7 of the signs is set

So on a GPU the hash's bits are the address of a word, or of half a word, of which each bank of
shared memory has a copy (`hash & 0x7F80 | lane << 2`, with `& 0x7F82` for halves). A step of 2 bits
and four weights is a byte, as is one of 4 bits and two, so a state is two bytes as they lie.

`benchmarks/look_tables.py` searches the constants and trains the tables, on Gaussian numbers.
"""

import base64
from dataclasses import dataclass

import torch
from torch import Tensor

# See `trellis.GAINS`.
GAINS = (1.16, 0.97, 0.94, 0.87)


@dataclass(frozen=True)
class Look:
    """Constants of the hash, and the table.

    Attributes:
        width: Weights of a step.
        low: What a state's low byte is multiplied by.
        high: What its high byte is; the two add up to at most 256.
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
    "{|qMr9tc83`V0yPE(R122_+6lGY|#;8Cpv<EfjGL7!4K-1N|5y4hje*ECd)O7g-PuE?GMfGCf@wBoZ|@{}&SrMmH%b76C3"
    "75hNc;1quf#Q3@^x5)KV8FaZ+@78)H43?>Bw3qd0vFF7|O7Z)4^ViX%zApr;m0bd&o4ibADM;{j(DliTg3<U-@BqKfzLU9"
    "=^82%dr7!MJ73okxB3j{#~3Mc#{1PmN69!V|@Nf>J^1~Nz=8Vm+j4H^YLEE*6?8Z}267(EbeQw<aaFg+Rw91j*6aSIX>EH"
    "4W^Ne&}4ISMBK1Pl^H9!d!z6+cN-G7SbRH5>pST2eF?8UiFXFAOmX0u(hy1Th~B1qv-75+DQ(BmNB?Ts{vi3<+Bc4I?Km2"
    "{ADq03;k2BMdGZI1?EM2NN4XVkr<03mq&L2o4DhV-FBBA^;ad6&E!J?NVSB6&4I7AQ=Z277qvnCJ<UEC?pOG7dsR!4>%@O"
    "A!76xJqG_TA`(0x69-Bo83rH@9wAI4G!PgsRU8cs3^y|dB_t;qQ3xR&4Mhx45(o$nB{dl<4H-EZ7zaKS86znZ3L+j11QrW"
    "l3LGpQ01r(b2_ZiW9w0M39tr|B6(SKGIV2A%6aOVy|1}0U3@{}HJ{wU78Y*o;1wA7<CPN$zI3pGg8x#iuLK90+2MrGcArw"
    "#nJR1^g5d{oL8w&~?5`GgN2Ua8{20aiSGyo<r2niAs3<fYd8yhGmAvp#h3L01w9Uv1FAzlnZE+Zu#Gh!A8Qw~lNI7I{>B`"
    "*gN8z3}#2q6(DI1(ZrI6?&iEFu;S5hfQm4M#g6Ef@+o8a@m^N*pvD4NnFLOCSF{9S;~81~&>288jaZ22%$s2LUP^5fL9O9"
    "77x%`xF5bJVgvTek~jz3>Pk2Q9l<}9|I^1APN^OBo_+`4hLB~5in^GZyP!hFB&#lL@f>;11kv>A~FmJIw%7R2pI_|C?X6n"
    "MgRm27das(3<^6fAsq@Q7IZokAsHPfN+KaPG6+l|1Rp5~1q?V24ht*?5-AWK7bgZcHY7wa2Ph*fI}SY=O*0h-92GDDNhUD"
    "_Fj68aA}cEfS5glT4o4sfB{V|(4kS%8JSQv@A_4;!5iS!AE-EQK1q2ubB^(n03oA(iJ_;2V3<U=j93T)?K0X{8ECNObF)<"
    "WL96&QSGfFT~Uk^Jp5HAKQ2S5!CBpM+;QVs?n4i6tJ5F{23Fc>Nb3mh~q3Qax-JOc|(OFc^tC=xUiHVGpaI0__B3=1C;5)"
    "x8g2NDPrPdZ3C3k??^Fb)J6G72^`4`m}s4J`=>7(NIGHaRZ_Jr)HFBrY=}"
)
THREE_BITS = (
    "0uLMk8VW!_0tg8QBM24{2_zFdB@qPz6H-DiB@kN(6blUv{s9gk2L%KfB?1{A4^s~V7gjI`BQZS~AQdq(1QHMmJvAmL696a"
    "^7#}4_2nGWjNDDLu2@eb?DgYb|5f>5)4<iWy2|6GfEG{V|4HOpuRSq9)5(5Pg1XLUc1Po^(Kp_(xCoK{b1popp9V9XYICK"
    "pz4gnSeEeR205+OD=4+1;{03iV%1qT%<8a^irS1VaH3nx1i8UYGM3>E`CDjO0)6)QRw4=ol;K@biICo~lY84nQ@XA1@rF)"
    "0Z(MhGJ+E(sz61_lm19zP5gB|bDkDi8!DE*%0KSzI&|8v`IUB@8PD1sE<s10@{@1q&-178(T&82}6zOFIi73kymU6C)-m6"
    "Dukh10fj`APglIGZGsH2@w`LS|AV&3?3#C1_=fUPXrb-9|99S5)dr}0b5-a4HF3)7!m~(6cYso6%bD(A0iJ16fhVm4l)}^"
    "9$W$=H46bT9uYJi5eGyV6$}>)6d6PxFAxqaPaY5t4KOhSA|oFYM+_z$3qlA$4hRPgA21gu3>YvL7z8;B6(S`M1s@y+0~ZN"
    "P1{p6G{|-tX4JA4c8yzb-6bAw^6dVf{Gam^h7X2tn0W1P33nw81KMY3$793|l2{jlmA~+fhFeMTW77+;mI2tre1_%uTAPP"
    "nRHxCP35CIKB6$S(s5q=0Y|3V-b0xk_3Dgh!d0|*Ka4h1eR7#%7h9W)IW1QJpg92^xCAy)=8C?p^fB1{hpP7gm0H$Dp;At"
    "?t6ARI1W2pkL`D-j<PEj9rFBp?(D6DAZc4mU3nDHsGa7eWI+Ko&3^2~7k8JRAZ!7!DK?2`vZ|8ZI9S15E-V0s<x+3=tJ28"
    "aN*o01g2bIyDV5cq=Ur6cZ~`J})9Y9s(o^9SRa49Tp4;5(h~*1T0eqc?>oQAQd%HI4Kht0VV|$94rb0DI^9C0v7}xBOVGX"
    "JOKa(6f+<o3kE(VARP@R2WvY99T*rOMJX3E9|}7i1sxv*2?#L@3kxI!4I&O179<8PFd;P{2_7URFBCWyMk^2w8xbf3HYF$"
    "oJx3iR9VI6QQb+*@7C<2kA1yEf6c|DxGbbt)76Jhk5hN1|9xEm`0s#*J932z{4JtqdF%1$J1OWvU9vB=;H#iy>A_6`IF)$"
    "4{9X2g7EkP(iUIR8N1}6j}0yzW>9Ty@&NfZYb2@V=16CM-`C=(<I4IeQm0!KCfHvk4hMM^mdBMC4LDGMDFEC>}y2nrbu3I"
    "jr001E{ZO)o$x4Gs_*CJ+M_A_p=m4^9|32q_B%4mSk@DJ?1jG8zC3A1Evy"
)
FOUR_BITS = (
    "0S+7k7zsi?0tpHTA_o=^2qF_XB@+e#6j(?rBN1H)6ABCr00Iyo2?PTgBmx>B3{(#U8dNX{B``f3AQCe$0T2%eIy5LJ6ap#"
    "`7#$=>2L%HgObRsy3=9b+DF7J?5*HH+4k8Hw2|FMgEiEh}3=$UsRShC-5dj7c1Xvyh1PW#&JR}kuCoB&V1^@#p8z(RYIB^"
    "dy4geJdD+&^55Fa))4gxv_0U`h$0tFN&89yfrTP;{S4JJGl837DP3KaxAC>sz&7b`gx5iJ%=LJ|%LDKi!a84V8=W)lVxFD"
    "VQ*MhGM*D+wV21_uv49Y6~dBt0}iDG&oAD;@wES6(v}83Z9TBMm7B0~jnr1tuE@1PU!178wQ*83GF!OF#-83JOUQ5+fuh5"
    "-BPe10ER^9u6fJG7%aE1`!uKSs@P&4ILyD2?_@bO#~J+9sv_S5fLs01Yueh3laz#78M5*5fTOk6A(};A0ZD26EGGi5HcP{"
    "8(#q;H4XqV91%4g5(q*Y7Yh~)6&6GvED#JWPazHv3@<PPA|f9VMGYn$2}B4$4h9AdAu$*x3>PvL7z8>H6dxrJ1|J#-1{Vu"
    "U2O2LJ{|ZSQ4I?=W7#S}(6bAz_6B-N@G9L&d69Fkp04f413Md}~KMO+y6&z|j2{aloBsdriFeDNV77+;nI2tla2L}rQ9SK"
    "JPHW3Y84*?866b1$t5q=0U0Yf1d1TPF4Cjuod0|yBY4FoJO8y_ek9y1RW0})Xf8ypi6BUlDDCnFyaB2NwsPZ2#2IXwy*At"
    "?zAAsa4W2pkF@Dij?RDmVfGBp?$E6eAQZ5H>IqDj5Ye7)1j<Ko>I{2TlS6J01Ww8V?i`2rLK`87&<Q15pAX0|O)(4h|M18"
    "#Wym0u2BaKQ|0Bcqc6o6%;K~KQALf90DQ@9t;v58Wao(5e82*1}RkocMCNNAr?4NIVcYp0VV_%94QL}DkTLC0T%=wBpnGW"
    "J^uj)6)_+m3k5$X9~=!O25&b68yOiPNhKOG9tu1l1|1*;2MI6>3k)Lz4ImC06(I&MFd{S}2p}RQEfzNyLop8v84)T3HzX$"
    "oJVqTPA0;IQR!aW{6hR>hA1y8b6d6M#Gbkt)6#)Si5hoH09xNs`0RRsI8yyn_4JkhbFb)$H1OWsS85tZ*G&&j<BLO`LGA;"
    "}{9yu>GEj=hdX9YPf1ttX~133f^9vL4zMivJa3J)426do1{CKDtF4IM2g0!lLhHvt7kMocvcBMLAKCkh@ED+?1z1_>Dt1q"
    "DG|{|f^XM>Ibx3lI<(CJq7=AqX`q5l|U94JZl(5;z9~Dl01jFdG069Vsjy"
)
LOOKS = (  # by bits a weight, from 1 on
    Look(4, 111, 134, 0x1129E481, FOUR),
    Look(4, 111, 134, 0x1129E481, FOUR),
    Look(2, 91, 153, 0x476C5F7F, THREE_BITS),
    Look(2, 106, 135, 0x5232620F, FOUR_BITS),
)
WIDTHS = tuple(look.width for look in LOOKS)
