"""Upper bounds of the histograms that the engine fills and the API servers show."""

from __future__ import annotations

from collections.abc import Sequence

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# The upper bounds of each histogram, in seconds for those whose names say so.
BOUNDS: dict[str, Sequence[float]] = {
    "time_to_first_token_seconds": (*SHORT, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    "inter_token_latency_seconds": (0.0005, *SHORT, 20.0, 40.0, 80.0),
    "request_time_per_output_token_seconds": (0.0005, *SHORT, 20.0, 40.0, 80.0),
    "e2e_request_latency_seconds": (*SHORT[:-3], *LONG[6:]),
    "request_queue_time_seconds": (*SHORT[:-3], *LONG[6:]),
    "request_prefill_time_seconds": (*SHORT[:-3], *LONG[6:]),
    "request_decode_time_seconds": (*SHORT[:-3], *LONG[6:]),
    "request_inference_time_seconds": (*SHORT[:-3], *LONG[6:]),
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "iteration_tokens_total": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (0, 1, 2, 5, 10, 20),
    "request_prefill_kv_computed_tokens": TOKENS,
}
