"""CTAs that share a product: which of them is the last to leave its sums in memory."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32

from anybit.kernels.cute.ptx import count_up, fence, load_shared, store_global, store_shared


@cute.jit
def arrives_last(flag: Any, counter: Any, ctas: Any, thread: Any) -> Any:
    """Whether all of `ctas` have stored their sums, which this one may read then.

    All threads of a CTA call it. The counter is left as a zero for the next launch.

    Args:
        flag: Address of a word of shared memory that nobody uses any more.
        counter: Address of a word of global memory for these CTAs.
        ctas: How many they are.
        thread: This thread's number.
    """
    fence()
    cute.arch.sync_threads()
    if thread == 0:
        store_shared(flag, [Uint32(count_up(counter))])
    cute.arch.sync_threads()
    last = Int32(load_shared(flag, 1, 0, True)[0]) == ctas - 1
    if last:
        fence()
        if thread == 0:
            store_global(counter, [Uint32(0)])
    return last
