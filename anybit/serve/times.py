"""How long things take, as counts by buckets: filled in any process, added up in the engine's."""

from bisect import bisect_left
from itertools import accumulate

REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2, 5)
SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
PREPARE = "anybit:prepare_seconds"
DELIVERY = "anybit:delivery_seconds"
WRITING = "anybit:write_seconds"
CLIENT = "anybit:client_wait_seconds"
OWN = {  # of front ends
    PREPARE: ("In the front end before the queue: from text to tokens", FIRST),
    DELIVERY: ("From the end of a step of the engine to its texts in the front end", SHORT),
    WRITING: ("From these to the bytes of all streams of the step", SHORT),
    CLIENT: ("Of waits for a client that reads too slowly", BETWEEN),
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From the front end to the first token", FIRST),
    "vllm:inter_token_latency_seconds": ("Between tokens, in the engine", BETWEEN),
    "vllm:e2e_request_latency_seconds": ("From the front end to the last token", REQUEST),
    "vllm:request_queue_time_seconds": ("In the queue", REQUEST),
    "vllm:request_prefill_time_seconds": ("From the queue to the first token", FIRST),
    **OWN,
}


class Times:
    """A histogram. bounds: seconds, each the largest of its bucket."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.sum = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)

    def add(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += count
        self.sum += count * seconds

    def take(self) -> tuple[list[int], float]:
        """What was added since the last time."""
        out = self.counts, self.sum
        self.counts, self.sum = [0] * len(self.counts), 0.0
        return out

    def merge(self, counts: list[int], total: float) -> None:
        """Add what another process has taken."""
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.sum += total

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Counts up to each bound, as Prometheus has them, and the sum."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True)), self.sum
