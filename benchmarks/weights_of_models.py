"""Weights (N, K) of published models, as engines multiply them: q, k and v as one, gate and up too.

`/2` and `/4` are what one of two or four GPUs holds. N are outputs, K inputs. Those that stand
first of a model are measured first.
"""

from itertools import zip_longest

Shape = tuple[int, int]

MODELS: dict[str, dict[str, Shape]] = {
    "Llama-3-8B": {
        "gate_up": (28672, 4096), "head": (128256, 4096), "down": (4096, 14336),
        "qkv": (6144, 4096), "o": (4096, 4096), "k": (1024, 4096),
    },
    "Llama-3-70B": {
        "gate_up": (57344, 8192), "down": (8192, 28672), "qkv": (10240, 8192), "o": (8192, 8192),
        "qkv/4": (2560, 8192), "down/4": (8192, 7168),
    },
    "Llama-2-7B": {
        "gate_up": (22016, 4096), "down": (4096, 11008), "qkv": (12288, 4096),
        "down/4": (4096, 2752), "gate_up/4": (5504, 4096),
    },
    "Llama-2-13B": {"gate_up": (27648, 5120), "down": (5120, 13824), "o": (5120, 5120)},
    "Mistral-7B": {"gate": (14336, 4096), "head": (32000, 4096)},
    "Mistral-Small-24B": {"gate_up": (65536, 5120), "down": (5120, 32768), "qkv": (6144, 5120)},
    "Qwen2.5-1.5B": {"gate_up": (17920, 1536), "down": (1536, 8960), "k": (256, 1536)},
    "Qwen2.5-7B": {
        "gate_up": (37888, 3584), "head": (152064, 3584), "down": (3584, 18944),
        "qkv": (4608, 3584), "o/2": (3584, 1792), "k": (512, 3584),
    },
    "Qwen3-0.6B": {"gate_up": (6144, 1024), "down": (1024, 3072), "o": (1024, 2048)},
    "Qwen3-14B": {"down": (5120, 17408), "gate_up": (34816, 5120), "qkv": (7168, 5120)},
    "Gemma-2-9B": {"gate_up": (28672, 3584), "down": (3584, 14336), "qkv": (8192, 3584)},
    "Gemma-3-4B": {"gate_up": (20480, 2560), "head": (262144, 2560), "down": (2560, 10240)},
    "Phi-3-mini": {"gate_up": (16384, 3072), "down": (3072, 8192), "qkv": (9216, 3072)},
    "OPT-30B": {"fc1": (28672, 7168), "fc2": (7168, 28672), "o": (7168, 7168)},
    "Yi-34B": {"down": (7168, 20480), "gate_up": (40960, 7168), "qkv": (9216, 7168)},
    "GPT-OSS-20B": {"qkv": (5120, 2880), "head": (201088, 2880), "o": (2880, 4096)},
    "DeepSeek-V3": {
        "o": (7168, 16384), "q_b": (24576, 1536), "kv_a": (576, 7168), "kv_b": (32768, 512),
        "shared_down": (7168, 2048),
    },
}  # fmt: skip


def weights(names: list[str] | None = None) -> list[Shape]:
    """Every shape of these models (default: all) once, one of each model in turn.

    A run that is stopped has then measured something of many models.
    """
    chosen = [MODELS[name].values() for name in names or MODELS]
    return list(dict.fromkeys(s for turn in zip_longest(*chosen) for s in turn if s))
