"""Formats that a command uses where the user names none."""

CANDIDATES = (  # of `anybit plan`
    "int2:group=32,zero",
    "int3:group=128",
    "int3:group=32",
    "int4:group=128",
    "int4:group=32",
    "int5:group=128",
    "fp5",
    "int6:group=128",
    "fp6",
    "int8",
)
HOPPER = (  # of `anybit build`
    "liquid@int8", "int8@int8", "int4@int8", "sparse@int8",
    "fp6", "fp5", "fp4", "fp8", "sparse", "fp6@fp8", "int4@fp8", "mxfp4@fp8", "mxfp4", "nvfp4",
    "mxfp8", "fp8:group=128", "fp8:group=128@fp8", "int4:group=128@fp8",
    "int8", "int4:group=128", "int4:group=64", "int4:group=128,zero", "int3:group=64",
    "int2:group=64", "codebook:m=1,v=4,group=128", "codebook:m=2,v=8,group=128",
)  # fmt: skip
