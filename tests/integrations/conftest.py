"""vLLM's tests run in an environment of their own: `make test-vllm`."""

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_vllm*.py"]

if find_spec("vllm"):  # which reads these when it is imported
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
