"""The formats and quantizers that the accuracy study compares, most important ones first."""

from anybit.core.scheme import parse_scheme

M2V8, M1V4, TABLE = (
    "codebook:m=2,v=8,b=8,group=128",
    "codebook:m=1,v=4,b=8,group=128",
    "codebook:m=1,v=1,b=4,group=64",
)
PLAN = "plan:4.5"  # a format for each layer, chosen for so many bits on average
FOLDED = "folded:"  # before a format: of a model rotated by `anybit.rotate_`
# A line is a spec and its cases, in order of importance. A method is "quantizer[/text][:samples]";
# "+" joins two, of which the second follows the first. Methods that a comma joins are one case: a
# process measures "additive,additive+pv" with one calibration. The longest cases begin early.
CORE = f"""
bf16 dense
{M2V8} additive,additive+pv
int4:group=128 rtn
int4:group=128@int8 rtn
liquid@int8 smooth
int4:group=128 gptq gptq/prose
int3:group=128 rtn gptq gptq/prose
fp6 rtn gptq
liquid@int8 smooth+gptq
int4 rtn gptq gptq/prose
int2:group=128 rtn gptq,gptq+pv
{PLAN} clip,gptq
int4:group=32 clip gptq
liquid@int8 rtn gptq
int4:group=128 clip hqq
int3:group=128 clip hqq
int4 clip hqq
fp6 clip hqq
int2:group=128 clip hqq
fp6:group=128 rtn gptq
liquid@int8 clip
int4:group=128@int8 smooth smooth+gptq
int4:group=128 smooth smooth+gptq
int8@int8 rtn smooth
{M2V8} rtn gptq
int2:group=128 gptq/prose
liquid@int8 hqq smooth+gptq/prose
fp6 smooth+gptq
{M2V8} additive/prose
"""
MORE = f"""
int4:group=64,zero rtn hqq gptq
int2:group=32,zero rtn hqq gptq
int3 rtn gptq gptq/prose
fp5 rtn gptq
fp5:group=128 rtn gptq
fp4 rtn gptq
fp4:group=128 rtn gptq
sparse rtn gptq
liquid rtn gptq
int8 rtn
{M1V4} rtn gptq additive
{TABLE} rtn gptq additive
{M2V8} additive:16 additive/train:512
"""
# What the front of KL against bits is made of, all on one model. The longest case begins first.
TRELLIS = f"""
{M2V8} additive
bf16 dense
trellis:rotate=kn additive gptq-gradients gptq
trellis:bits=3,rotate=kn gptq
trellis:bits=4,rotate=kn gptq
trellis:bits=3,rotate=kn@int8 gptq
int4:group=128 gptq
int3:group=128 gptq
int2:group=128 gptq
fp6 gptq
fp5 gptq
fp4 gptq
trellis:bits=3,rotate=kn gptq-gradients
trellis:bits=4,rotate=kn gptq-gradients
fp6 rtn
int4:group=128 rtn
int3:group=128 rtn
fp5 rtn
fp4 rtn
int6 rtn
trellis:rotate=kn additive-gradients
{M1V4} additive
trellis:bits=5,rotate=kn gptq
int2:group=128 rtn
int4 rtn
fp6:group=128 rtn
int4:group=64,zero rtn hqq
int2:group=32,zero rtn hqq
int4:group=128 hqq clip
int3:group=128 hqq clip
int4 gptq gptq/prose
int4:group=128 gptq/prose
sparse rtn gptq
int3:group=128 gptq-gradients
trellis:rotate=kn follow
trellis:bits=3,rotate=kn additive
trellis:bits=4,rotate=kn additive
folded:trellis gptq
folded:trellis:bits=3 gptq
int5:group=128 gptq
liquid@int8 rtn
int8@int8 rtn
nvfp4 gptq
int4:group=128 additive
trellis:bits=3,rotate=kn follow
int3:group=128 follow
trellis:code=pair8,rotate=kn gptq
trellis:rotate=k gptq
int4:group=128,rotate=k gptq
int3:group=128,rotate=k gptq
folded:int4:group=128 gptq
trellis:bits=3,rotate=k gptq
int4:group=32 gptq
int3:group=32 gptq
fp6 clip hqq
int4 clip hqq
fp6 gptq/prose
fp6:group=128 gptq
liquid@int8 smooth+gptq
trellis gptq
trellis:bits=3 gptq
trellis:rotate=kn gptq,gptq+tune
"""
# For models of hubs, whose widths groups of 64 divide. +pv: `anybit refine`; +tune: with the codes
# as they are.
PUBLISHED = """
bf16 dense
codebook:m=2,v=8,b=8,group=64 additive/mixed,additive+pv/mixed
trellis:rotate=kn gptq/mixed gptq-gradients/mixed,gptq-gradients+tune/mixed
int4:group=64,zero gptq-gradients/mixed,gptq-gradients+pv/mixed
fp:e2m3 gptq-gradients/mixed,gptq-gradients+pv/mixed
trellis:bits=4,rotate=kn gptq-gradients/mixed,gptq-gradients+tune/mixed
trellis:bits=3,rotate=kn gptq-gradients/mixed,gptq-gradients+tune/mixed
int3:group=64,zero gptq-gradients/mixed,gptq-gradients+pv/mixed
int2:group=32,zero gptq-gradients/mixed,gptq-gradients+pv/mixed
fp6 gptq-gradients/mixed,gptq-gradients+pv/mixed
int6 gptq-gradients/mixed,gptq-gradients+pv/mixed
nvfp4 gptq-gradients/mixed,gptq-gradients+pv/mixed
codebook:m=1,v=4,b=8,group=64 additive/mixed
liquid@int8 rtn smooth+gptq/mixed
int8 rtn gptq/mixed
int8:group=64 rtn
int8@int8 rtn smooth+gptq/mixed
fp:e2m3 rtn gptq/mixed
fp6 rtn gptq/mixed clip
int6 rtn gptq/mixed clip
int4:group=64,zero rtn gptq/mixed gptq/prose gptq/code clip hqq
plan:4.5 gptq/mixed
plan:3.5 gptq/mixed
trellis:bits=3,rotate=kn gptq/mixed
trellis:bits=4,rotate=kn gptq/mixed
int3:group=64,zero rtn gptq/mixed hqq
int2:group=32,zero rtn gptq/mixed hqq
liquid rtn gptq/mixed
nvfp4 rtn gptq/mixed clip
mxfp4 rtn gptq/mixed clip
int4:group=32 rtn gptq/mixed clip
int4:group=64 rtn gptq/mixed clip
int4 rtn gptq/mixed
fp5 rtn gptq/mixed clip
fp4 rtn gptq/mixed
int5:group=64 rtn gptq/mixed
fp6:group=64 rtn gptq/mixed
fp:e2m3,group=64 gptq-gradients/mixed,gptq-gradients+tune/mixed
"""
# The two codes of trellises, on a model of a hub.
LOOK = """
trellis:code=look,rotate=kn gptq/mixed
trellis:bits=3,rotate=kn gptq/mixed
trellis:bits=3,code=look,rotate=kn gptq/mixed
trellis:bits=4,rotate=kn gptq/mixed
trellis:bits=4,code=look,rotate=kn gptq/mixed
trellis:code=look,rotate=kn gptq-gradients/mixed
trellis:bits=3,code=look,rotate=kn gptq-gradients/mixed
trellis:bits=4,code=look,rotate=kn gptq-gradients/mixed
"""
# Which six bits.
SIX = """
bf16 dense
fp:e2m3 rtn
fp6 rtn
int6 rtn
fp:e2m3,group=64 rtn
int6:group=64 rtn
fp6:group=64 rtn
fp:e2m3 gptq/prose
fp6 gptq/prose
"""
# A model of billions of weights on a CPU (`study_large.py`); kv: a format of KV caches.
LARGE = """
bf16 dense
int8 rtn
int4:group=128 rtn
fp:e2m3 rtn
int4:group=64,zero rtn
int3:group=64,zero rtn
liquid@int8 rtn
int4 kv
k8v4 kv
int8 kv
int8@int8 rtn
fp6 rtn
nvfp4 rtn
int4:group=128 hqq
int4:group=64,zero hqq
mxfp4 rtn
fp8 rtn
int6 rtn
nf4 rtn
int4:group=32 rtn
int5:group=64 rtn
int4 rtn
int3:group=64,zero hqq
int2:group=32,zero rtn
int4:group=64,zero gptq/mixed
liquid@int8 smooth+gptq/mixed
int4:group=128 gptq/mixed
int3:group=64,zero gptq/mixed
fp:e2m3 gptq/mixed
"""
SMOKE = f"""
bf16 dense
{PLAN} clip
liquid@int8 smooth+gptq/prose
{M2V8} additive/train:4,additive+pv/train:4
"""


KINDS = {
    "all": CORE + MORE,
    "core": CORE,
    "light": CORE,  # the first method of each, which a CPU can do
    "trellis": TRELLIS,
    "published": PUBLISHED,
    "look": LOOK,
    "six": SIX,
    "large": LARGE,
    "smoke": SMOKE,
}


def cases(kind: str) -> list[tuple[str, str]]:
    """(spec, methods) of one of `KINDS`, in the order in which they are measured."""
    found = []
    for line in KINDS[kind].split("\n"):
        spec, *methods = line.split() or [""]
        weights = spec and spec != "bf16" and "kv" not in methods
        if weights and not spec.startswith("plan:"):
            parse_scheme(spec.removeprefix(FOLDED))
        found += [(spec, m.split(",")[0] if kind == "light" else m) for m in methods]
    return found
