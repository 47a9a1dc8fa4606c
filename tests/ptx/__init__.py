"""A PTX machine: runs a compiled kernel on the CPU, thread by thread, and checks what it does.

`machine` launches a kernel and decides whose turn it is: warps take turns at random, and copies and
WGMMAs end at a random moment between their issue and the wait for them. `parse` reads the text,
`state` is what runs, `races` knows who may see what in shared memory. Instructions are functions in
modules by subject, each with a table `HANDLERS`; `machine.HANDLERS` is all of them. A new subject
is a new module, and a line there.

What is an error, whatever the order of events was:

- a read or a write of shared memory that nothing orders behind another thread's or a copy's;
- a bulk copy or a WGMMA that meets a thread's store without `fence.proxy.async`, or a copy that
  counts at an mbarrier without `fence.mbarrier_init`;
- a register of a WGMMA in flight that is used, or one that is used without `wgmma.fence`;
- memory in use by the previous kernel (`state.InUse`) before `griddepcontrol.wait`, and a cluster
  that ends without it;
- another CTA's shared memory before the CTA is known to run, or after it has left;
- `setmaxnreg`, `bar.sync` and mbarrier counts that do not add up; deadlocks; work in flight at the
  end; addresses that are unaligned or belong to nothing; instructions that the machine lacks.

What it cannot see:

- what `ptxas` makes of the PTX: its spills, its moves, its order of loads;
- time, bank conflicts, and whether a hint (`prefetch`, `launch_dependents`) helps;
- races in global memory, where kernels write each output once;
- the scope of an operation: `.cta` orders as much as `.cluster`;
- reads before the last one of a word: a store is checked against the latest reader alone;
- lanes that stay apart: they meet again at the first instruction that all of them reach;
- rounding inside of a tensor core: products are summed exactly, and rounded once.
"""
