"""The formats of a KV cache that have a name; without one, it has the model's dtype."""

from anybit.engine.kv.format import KvFormat
from anybit.engine.kv.int4 import Int4
from anybit.engine.kv.int8 import Int8

LOSS_OF_INT4 = (
    "4 bits for K cost SmolLM2-135M 0.0XX nats a token, and Gemma 3 270M, whose heads have 256 "
    "channels, 0.1XX; k8v4, with 8 bits for K, cost them 0.0XX and 0.0XX"
)
KV_FORMATS: dict[str, KvFormat] = {
    f.name: f
    for f in (
        KvFormat("int8", Int8(), Int8()),
        KvFormat("k8v4", Int8(), Int4()),
        KvFormat("int4", Int4(rotated=True), Int4(), widest=128, loss=LOSS_OF_INT4),
    )
}
