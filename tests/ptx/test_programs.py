"""Small programs, each with one rule of the PTX ISA: kept, it runs; broken, the machine says so."""

from pathlib import Path

import numpy as np
import pytest

from tests.ptx import kept
from tests.ptx.machine import Machine
from tests.ptx.parse import PtxError
from tests.ptx.state import InUse

HEAD = """
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(.param .u64 x, .param .u64 y)
{
    mov.u32 %t, %tid.x;
    setp.eq.u32 %first, %t, 0;
    shl.b32 %at, %t, 2;
    mov.u32 %m, memory;
    add.s32 %mine, %m, %at;
    mul.wide.u32 %far, %t, 4;
    ld.param.b64 %x, [x];
    ld.param.b64 %y, [y];
    add.s64 %from, %x, %far;
    add.s64 %to, %y, %far;
"""


def run(body: str, threads: int = 64, seeds: int = 6, in_use: bool = False) -> np.ndarray:
    """Launch on x = 0, 1, 2, ... under some seeds; returns y."""
    machine, x = Machine(HEAD + body + "\nret;\n}"), np.arange(256, dtype=np.uint32)
    for seed in range(seeds):
        y = np.zeros(256, np.uint32)
        machine.launch([InUse(x) if in_use else x, y], 1, threads, 8192, seed=seed)
    return y[:threads]


SWAP = """
    st.shared.b32 [%mine], %t;
    {sync}
    xor.b32 %other, %at, {bit};
    add.s32 %other, %m, %other;
    ld.shared.b32 %v, [%other];
    st.global.b32 [%to], %v;
"""


def test_threads_meet() -> None:
    found = run(SWAP.format(sync="bar.sync 0;", bit=128))
    assert found.tolist() == [t ^ 32 for t in range(64)]
    with pytest.raises(PtxError, match=r"a race: warp . lane \d+ (reads|overwrites) what warp"):
        run(SWAP.format(sync="", bit=128))


def test_a_launch_is_run_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And again where its text, its numbers or its seed are others; never one that broke a rule."""
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    monkeypatch.setattr(kept, "EVERY_KERNEL", False)
    swap, race = (SWAP.format(sync=sync, bit=128) for sync in ("bar.sync 0;", ""))
    found = run(swap, seeds=2)
    for _ in range(2):
        with pytest.raises(PtxError, match="a race"):
            run(race)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(Machine, "_run", lambda *args: pytest.fail("run again"))
    assert run(swap, seeds=2).tolist() == found.tolist()
    for body, options in ((swap, {"seeds": 3}), (swap, {"threads": 32}), (swap + "// another", {})):
        with pytest.raises(pytest.fail.Exception, match="run again"):
            run(body, **options)


def test_lanes_meet() -> None:
    assert run(SWAP.format(sync="bar.warp.sync -1;", bit=4)).tolist() == [t ^ 1 for t in range(64)]
    for sync in ("", "shfl.sync.idx.b32 %z, %t, 0, 31, -1;"):
        with pytest.raises(PtxError, match="a race"):
            run(SWAP.format(sync=sync, bit=4))


@pytest.mark.parametrize(
    ("sync", "fact"),
    [
        ("bar.sync 0, 48;", "of barrier 0 and 48 threads"),
        ("bar.sync 16;", "of barrier 16"),
        ("bar.sync 1, 128;", "and 128 threads"),
        ("shr.u32 %w, %t, 5; add.s32 %n, %w, 1; shl.b32 %n, %n, 5; bar.sync 1, %n;", "is for"),
        ("@%first bar.sync 0;", "of a part of a warp"),
        ("setp.lt.u32 %p, %t, 32; @%p bar.sync 1, 64;", "deadlock"),
    ],
)
def test_barriers_count(sync: str, fact: str) -> None:
    with pytest.raises(PtxError, match=fact):
        run(SWAP.format(sync=sync + " bar.sync 0;", bit=128))


COPY = """
    add.s32 %bar, %m, 4096;
    setp.ne.u32 %others, %t, 0;
    @%others bra $LWAIT;
    mbarrier.init.shared.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    {before}
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%m], [%x], 256, [%bar];
$LWAIT:
    bar.sync 0;
    {{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%bar], 0;
    @p bra DONE; bra AGAIN; DONE: }}
    ld.shared.b32 %v, [%mine];
    st.global.b32 [%to], %v;
"""


def test_copies_see_stores_behind_a_proxy_fence() -> None:
    assert run(COPY.format(before="")).tolist() == list(range(64))
    store = "st.shared.b32 [%m+16], %t; "
    with pytest.raises(PtxError, match=r"without fence\.proxy\.async"):
        run(COPY.format(before=store))
    run(COPY.format(before=store + "fence.proxy.async.shared::cta;"))


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        ("fence.mbarrier_init.release.cluster;", "", "no fence has made visible"),
        ("[%bar], 256", "[%bar], 272", "deadlock"),
        ("[%bar], 256", "[%bar], 240", "a race|deadlock"),
        ("mbarrier.arrive.expect_tx", "mbarrier.arrive", "more arrivals"),
        ("b64 p, [%bar], 0", "b64 p, [%bar], 1", "a race|deadlock"),
        ("[%x], 256", "[%x+8], 256", "a bulk copy of 256 bytes"),
        ("[%x], 256", "[%x+784], 256", "belongs to nothing"),
        ("[%m], [%x]", "[%m+4096], [%x]", "an mbarrier is overwritten"),
        ("bar.sync 0;", "", "no mbarrier|a race"),
    ],
)
def test_copies_are_waited_for(old: str, new: str, fact: str) -> None:
    body = COPY.format(before="")
    assert old in body
    with pytest.raises(PtxError, match=fact):
        run(body.replace(old, new))


ASYNC = """
    add.s32 %bar, %m, 4096;
    @%first mbarrier.init.shared.b64 [%bar], 64;
    bar.sync 0;
    and.b32 %eight, %t, 15; shl.b32 %a, %eight, 4; add.s32 %a, %m, %a;
    shl.b32 %eight, %eight, 4; cvt.u64.u32 %source, %eight; add.s64 %source, %x, %source;
    setp.lt.u32 %some, %t, 16;
    @%some cp.async.cg.shared.global [%a], [%source], 16;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%bar];
    { .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%bar], 0;
    @p bra DONE; bra AGAIN; DONE: }
    ld.shared.b32 %v, [%mine];
    st.global.b32 [%to], %v;
"""


def test_small_copies_are_waited_for() -> None:
    assert run(ASYNC).tolist() == list(range(64))
    with pytest.raises(PtxError, match="deadlock"):
        run(ASYNC.replace("cp.async.mbarrier.arrive.noinc.shared.b64 [%bar];", ""))


READ = """
    griddepcontrol.launch_dependents;
    {wait}
    ld.global.b32 %v, [%from];
    st.global.b32 [%to], %v;
"""


GROUPS = """
    shl.b32 %piece, %t, 4;
    add.s32 %mine, %m, %piece;
    mul.wide.u32 %far, %t, 16;
    add.s64 %from, %x, %far;
    cp.async.cg.shared.global [%mine], [%from], 16;
    cp.async.commit_group;
    cp.async.ca.shared.global [%mine+1024], [%from+512], 8;
    cp.async.commit_group;
    {wait}
    {sync}
    xor.b32 %other, %piece, 16;
    add.s32 %other, %m, %other;
    ld.shared.b32 %v, [%other+{offset}];
    st.global.b32 [%to], %v;
    cp.async.wait_group 0;
"""


def test_groups_of_copies_are_waited_for() -> None:
    """By the thread that started them; others wait for that thread."""
    wait, sync = "cp.async.wait_group {};", "bar.warp.sync -1;"

    def found(wait: str, sync: str, offset: int = 0) -> list[int]:
        return run(GROUPS.format(wait=wait, sync=sync, offset=offset), threads=32).tolist()

    assert found(wait.format(1), sync) == [4 * (t ^ 1) for t in range(32)]
    assert found(wait.format(0), sync, 1024) == [4 * (t ^ 1) + 128 for t in range(32)]
    for bad in ((wait.format(2), sync), ("", sync), (wait.format(1), sync, 1024)):
        with pytest.raises(PtxError, match=r"a race: .* reads what a copy wrote"):
            found(*bad)
    with pytest.raises(PtxError, match=r"a race: warp 0 lane . reads what warp 0 lane . wrote"):
        found(wait.format(1), "")
    with pytest.raises(PtxError, match="left without waiting"):
        run("@%first cp.async.cg.shared.global [%m], [%x], 16; cp.async.commit_group;")


def test_ctas_count_together() -> None:
    body = "@%first atom.add.acq_rel.gpu.global.u32 %v, [%y], 3; @%first st.global.b32 [%y+4], %v;"
    assert run(body)[:2].tolist() == [3, 0]


def test_the_previous_kernel_is_waited_for() -> None:
    run(READ.format(wait="griddepcontrol.wait;"), in_use=True)
    with pytest.raises(PtxError, match=r"previous kernel may use, before griddepcontrol\.wait"):
        run(READ.format(wait=""), in_use=True)
    with pytest.raises(PtxError, match="launch_dependents, but nobody waits"):
        run(READ.format(wait=""))
    with pytest.raises(PtxError, match="left before the previous kernel had ended"):
        run("st.global.b32 [%to], %t;", in_use=True)
    # One warp waits, and tells the other.
    one = "setp.ge.u32 %p, %t, 32; @%p bra $LON; griddepcontrol.wait; $LON: bar.sync 0;"
    run(READ.format(wait=one), in_use=True)


REGISTERS = """
    setp.lt.u32 %p, %t, 128;
    @%p bra $LMORE;
    setmaxnreg.dec.sync.aligned.u32 {less};
    bra $LEND;
$LMORE:
    setmaxnreg.inc.sync.aligned.u32 {more};
$LEND:
    bar.sync 0;
"""


@pytest.mark.parametrize(
    ("less", "more", "fact"),
    [
        (40, 216, ""),
        (120, 216, "deadlock"),
        (136, 216, "dec.sync.aligned.u32 from 128 to 136"),
        (40, 120, "inc.sync.aligned.u32 from 128 to 120"),
        (36, 216, "36 registers: not a multiple of 8"),
    ],
)
def test_registers_are_given_before_they_are_taken(less: int, more: int, fact: str) -> None:
    """512 threads of 128: one warpgroup takes 88 more from three that give 88 each."""
    body = REGISTERS.format(less=less, more=more)
    if not fact:
        run(body, threads=512, seeds=2)
        return
    with pytest.raises(PtxError, match=fact):
        run(body, threads=512, seeds=2)


def test_clusters_meet_before_they_share() -> None:
    text = """
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(.param .u64 y)
{
    mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %m, memory;
    shl.b32 %at, %t, 2; add.s32 %mine, %m, %at; xor.b32 %peer, %c, 1;
    MEET
    mapa.shared::cluster.u32 %there, %mine, %peer;
    st.shared::cluster.b32 [%there], %c;
    barrier.cluster.arrive; barrier.cluster.wait;
    ld.shared.b32 %v, [%mine];
    ld.param.b64 %y, [y]; mul.wide.u32 %far, %c, 4; add.s64 %y, %y, %far;
    st.global.b32 [%y], %v;
    ret;
}
"""
    meet = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    for seed in range(4):
        y = np.full(2, 9, np.uint32)
        Machine(text.replace("MEET", meet)).launch([y], 2, 32, 1024, 2, seed)
        assert y.tolist() == [1, 0]
        with pytest.raises(PtxError, match="may not have started"):
            Machine(text.replace("MEET", "")).launch([y], 2, 32, 1024, 2, seed)
        twice = text.replace("MEET", meet.replace("wait", "arrive"))
        with pytest.raises(PtxError, match="twice, without a wait"):
            Machine(twice).launch([y], 2, 32, 1024, 2, seed)


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        ("bfind.u32 %a, %t;", r"does not know bfind\.u32"),
        ("add.s32 %a, %never, 1;", "%never is read before it is written"),
        ("add.s32 %a, %m, 2; ld.shared.b32 %v, [%a];", "shared address 1026 for 4 bytes"),
        ("ld.shared.b32 %v, [%m+8192];", "shared address 9216 for 4 bytes"),
        ("add.s64 %far, %x, 1024; ld.global.b32 %v, [%far];", "belongs to nothing"),
        ("div.u32 %v, 1, %t;", "division by zero"),
        ("cp.async.cg.shared.global [%m], [%x], 16;", "without waiting for cp.async|a race"),
    ],
)
def test_errors_name_the_instruction(body: str, fact: str) -> None:
    with pytest.raises(PtxError, match=rf"({fact})"):
        run(body)
