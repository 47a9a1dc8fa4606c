"""How often a multiprocessor starts an instruction: what decoders are counted with.

    python benchmarks/rates.py                 # needs a GPU of sm_90 and nvcc
    python benchmarks/rates.py --build rates   # writes the program, for another machine

Prints clocks that an instruction takes of a quarter of a multiprocessor (4 warps, 8 independent
chains each), alone and in mixes as decoders have them, and of products by `mma.sync` beside
`wgmma` of another warpgroup.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

CHAINS, ROUNDS = 8, 256
# PTX on registers: {d} is the chain's own, {s} one that never changes.
SINGLE = {
    "lop3": "lop3.b32 {d}, {d}, 0x8fff8fff, {s}, 0x6a;",
    "prmt": "prmt.b32 {d}, {d}, {s}, 0x6541;",
    "shl": "shf.l.wrap.b32 {d}, {d}, {s}, 5;",
    "mul": "mul.lo.u32 {d}, {d}, {s};",
    "dp4a": "dp4a.u32.u32 {d}, {d}, {s}, {s};",
    "dp2a": "dp2a.lo.u32.u32 {d}, {d}, {s}, {s};",
    "fma_bf16x2": "fma.rn.bf16x2 {d}, {d}, {s}, {s};",
    "fma_f16x2": "fma.rn.f16x2 {d}, {d}, {s}, {s};",
    "mul_wide": "{{ .reg .b64 w; .reg .b32 h; mul.wide.u32 w, {d}, {s}; "
    "mov.b64 {{{d}, h}}, w; add.u32 {d}, {d}, h; }}",
    "shfl": "shfl.sync.idx.b32 {d}, {d}, {s}, 31, -1;",
}
MIXES = {
    "prmt + mul": ("prmt", "mul"),
    "prmt + mul + fma": ("prmt", "mul", "fma_bf16x2"),
    "2 prmt + mul": ("prmt", "prmt", "mul"),
    "prmt + dp4a": ("prmt", "dp4a"),
    "mul + dp4a": ("mul", "dp4a"),
    # A fourth of what 8 weights of `trellis` take in 16 bits, about.
    "2 weights of sum8": (
        "prmt",
        "mul",
        "dp4a",
        "prmt",
        "fma_bf16x2",
        "mul",
        "dp4a",
        "prmt",
        "shl",
    ),
    "2 weights of pair8": ("prmt", "mul", "dp4a", "prmt", "dp4a", "fma_bf16x2"),
}
HEAD = """
#include <cstdio>
#include <cstdint>
typedef uint32_t u;
#define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
__device__ __forceinline__ void imma32(u *d, const u *a, u b) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
    "{%8,%8}, {%0,%1,%2,%3};" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
__device__ __forceinline__ void imma16(u *d, const u *a, u b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
    "{%0,%1,%2,%3};" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
    : "r"(a[0]), "r"(a[1]), "r"(b));
}
__device__ __forceinline__ void hmma16(u *d, const u *a, u b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
    "{%8,%8}, {%0,%1,%2,%3};" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
"""


def simple(name: str, parts: tuple[str, ...]) -> str:
    """A kernel of chains that go through one instruction after the other."""
    body = []
    for part in parts:
        for i in range(CHAINS):
            text = SINGLE[part].format(d="%0", s="%1")
            body.append(f'asm volatile("{text}" : "+r"(d[{i}]) : "r"(s));')
    return f"""
__global__ void {name}(u *out, u s) {{
  u d[{CHAINS}]; for (int i = 0; i < {CHAINS}; i++) d[i] = s * i + threadIdx.x;
  long long t = clock64();
  #pragma unroll {max(1, 32 // len(parts))}
  for (int r = 0; r < {ROUNDS}; r++) {{ {" ".join(body)} }}
  t = clock64() - t;
  u all = 0; for (int i = 0; i < {CHAINS}; i++) all += d[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = all;
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = (u)t;
}}"""


def product(name: str, call: str, chains: int, dependent: bool = False) -> str:
    """A kernel of `mma.sync` alone."""
    places = [0] * chains if dependent else range(chains)
    return turns(name, " ".join(f"{call}(d[{i}], a, s);" for i in places), chains)


def turns(name: str, body: str, chains: int) -> str:
    """A kernel that repeats products, or what else its body does to d and e."""
    return f"""
__global__ void {name}(u *out, u s) {{
  u d[{chains}][4] = {{}}; u a[4] = {{s, s + 1, s + 2, s + 3}}; u e[4] = {{threadIdx.x, 1, s, 3}};
  long long t = clock64();
  #pragma unroll 2
  for (int r = 0; r < {ROUNDS}; r++) {{ {body} }}
  t = clock64() - t;
  u all = 0;
  for (int j = 0; j < 4; j++) {{ all += e[j]; for (int i = 0; i < {chains}; i++) all += d[i][j]; }}
  out[blockIdx.x * blockDim.x + threadIdx.x] = all;
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = (u)t;
}}"""


def mixed() -> str:
    """Four `prmt`, four `mul` and a product in turns."""
    lines = []
    for i in range(4):
        lines.append(f"imma32(d[{i}], a, s);")
        for j, part in ((j, part) for j in range(4) for part in ("prmt", "mul")):
            text = SINGLE[part].format(d="%0", s="%1")
            lines.append(f'asm volatile("{text}" : "+r"(e[{j}]) : "r"(s));')
    return turns("mixed", " ".join(lines), 4)


def beside(tokens: int) -> str:
    """Warpgroup 0 runs `wgmma` (64 rows, A in registers), warpgroup 1 others; clocks of both."""
    n = tokens // 2
    sums = ", ".join(f"%{i}" for i in range(n))
    outs = ", ".join(f'"+r"(c[{i}])' for i in range(n))
    wgmma = (
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k32.s32.u8.s8 {{{sums}}}, '
        f'{{%{n},%{n + 1},%{n + 2},%{n + 3}}}, %{n + 4}, 1;" : {outs} '
        f': "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(where));'
    )
    each = {
        1: "for (int i = 0; i < 4; i++) imma32(d + 4 * i, a, s);",
        2: 'for (int i = 0; i < 16; i++) asm volatile("dp4a.u32.u32 %0, %0, %1, %1;" '
        ': "+r"(d[i]) : "r"(s));',
        3: 'for (int i = 0; i < 16; i++) asm volatile("prmt.b32 %0, %0, %1, 0x6541;" '
        ': "+r"(d[i]) : "r"(s));',
        4: 'for (int i = 0; i < 8; i++) asm volatile("dp4a.u32.u32 %0, %0, %2, %2; '
        'prmt.b32 %1, %1, %2, 0x6541;" : "+r"(d[i]), "+r"(d[i + 8]) : "r"(s));',
        5: 'for (int i = 0; i < 16; i++) asm volatile("fma.rn.bf16x2 %0, %0, %1, %1;" '
        ': "+r"(d[i]) : "r"(s));',
    }
    other = "".join(
        f"if (kind == {kind}) for (int r = 0; r < 512; r++) {text}\n" for kind, text in each.items()
    )
    return f"""
__global__ void __launch_bounds__(256) beside{tokens}(u *out, u s, int multiply, int kind) {{
  __shared__ alignas(1024) unsigned char tokens[32768];
  for (int i = threadIdx.x; i < 8192; i += 256) ((u *)tokens)[i] = 0;
  __syncthreads();
  u a[4] = {{s, s + 1, s + 2, s + 3}}; u all = 0; long long t = clock64();
  if (threadIdx.x < 128) {{
    if (multiply) {{
      u c[{n}] = {{}};
      uint64_t address = (uint64_t)(__cvta_generic_to_shared(tokens) & 0x3FFFF) >> 4;
      uint64_t where = address | (1ull << 16) | (64ull << 32) | (1ull << 62);
      for (int r = 0; r < 512; r++) {{
        FENCE;
        {wgmma} {wgmma} {wgmma} {wgmma}
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      }}
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      for (int i = 0; i < {n}; i++) all += c[i];
    }}
  }} else {{
    u d[16]; for (int i = 0; i < 16; i++) d[i] = s * i;
    {other}
    for (int i = 0; i < 16; i++) all += d[i];
  }}
  t = clock64() - t;
  out[512 + blockIdx.x * 256 + threadIdx.x] = all;
  if (blockIdx.x == 0 && threadIdx.x % 128 == 0) out[threadIdx.x / 128] = (u)t;
}}"""


def program() -> str:
    """The source of all kernels, and a main that prints what each takes."""
    names = {name: (name,) for name in SINGLE} | MIXES
    text, calls = [HEAD], []
    for i, (name, parts) in enumerate(names.items()):
        text.append(simple(f"k{i}", parts))
        calls.append(f'show("{name}", k{i}, {len(parts) * CHAINS});')
    products = {
        "imma m16n8k32": ("imma32", 8, False), "imma m16n8k16": ("imma16", 8, False),
        "hmma m16n8k16 bf16": ("hmma16", 8, False),
        "imma m16n8k32, each after the other": ("imma32", 8, True),
    }  # fmt: skip
    for i, (name, (call, chains, dependent)) in enumerate(products.items()):
        text.append(product(f"p{i}", call, chains, dependent))
        calls.append(f'show("{name}", p{i}, {chains}, {128 if dependent else 512});')
    text += [mixed(), beside(64), beside(128)]
    calls.append('show("4 prmt, 4 mul and an imma m16n8k32", mixed, 4);')
    shown = "\n  ".join(calls)
    text.append(f"""
u *out;
void show(const char *name, void (*kernel)(u *, u), int count, int threads = 512) {{
  u clocks; float per = (threads / 128) * (float)count * {ROUNDS};
  for (int i = 0; i < 2; i++) kernel<<<132, threads>>>(out, 0);
  cudaMemcpy(&clocks, out, 4, cudaMemcpyDeviceToHost);
  printf("%-40s %6.2f clocks  %s\\n", name, clocks / per, cudaGetErrorString(cudaGetLastError()));
}}
int main() {{
  cudaMalloc(&out, 1 << 22);
  {shown}
  const char *names[] = {{"nothing", "imma m16n8k32", "dp4a", "prmt", "dp4a + prmt", "fma"}};
  int counts[] = {{1, 2048, 8192, 8192, 8192, 8192}};
  for (int tokens = 0; tokens <= 128; tokens += 64) for (int kind = 0; kind < 6; kind++) {{
    u clocks[2];
    for (int i = 0; i < 2; i++)
      (tokens > 64 ? beside128 : beside64)<<<132, 256>>>(out, 0, tokens, kind);
    cudaMemcpy(clocks, out, 8, cudaMemcpyDeviceToHost);
    printf("wgmma 64x%-3dx32 beside %-14s", tokens, names[kind]);
    printf(" %7.1f, the other %6.2f clocks  %s\\n", clocks[0] / 2048.0,
           clocks[1] / (double)counts[kind], cudaGetErrorString(cudaGetLastError()));
  }}
}}""")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, help="write the program there, and do not run it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "rates.cu"), args.build or Path(folder, "rates")
        source.write_text(program())
        subprocess.run(
            ["nvcc", "-O3", "-gencode=arch=compute_90a,code=sm_90a", source, "-o", made], check=True
        )
        if not args.build:
            subprocess.run([made.resolve()], check=True)


if __name__ == "__main__":
    main()
