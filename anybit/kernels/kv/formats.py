"""The formats of a KV cache that have a name; without one, it has the model's dtype."""

from anybit.kernels.kv.format import KvFormat
from anybit.kernels.kv.int4 import Int4
from anybit.kernels.kv.int8 import Int8

# Nats a token, of benchmarks/results/kv_accuracy.csv.
LOSS_OF_INT4 = (
    "4 bits for K cost SmolLM2-135M 0.062 nats a token and Gemma 3 270M, with heads of 256, 0.097; "
    "k8v4, with 8 bits for K, costs them 0.008 and 0.006"
)
KV_FORMATS: dict[str, KvFormat] = {
    f.name: f
    for f in (
        KvFormat("int8", Int8(), Int8()),
        KvFormat("k8v4", Int8(), Int4(32)),
        KvFormat(
            "int4", Int4(64, rotated=True), Int4(64), widest=128, loss=LOSS_OF_INT4, finer=Int8()
        ),
    )
}
