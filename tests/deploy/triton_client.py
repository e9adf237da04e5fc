"""What NVIDIA's client (tritonclient) sees of the back end in a real tritonserver. The Python of that server runs this.

    python triton_client.py HTTP GRPC '{"prompts": [...], "parameters": {...}}'

It prints one JSON object. The models are `llm`, which streams, and `once`, which answers once.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.http as http

PATIENCE = 120


def tensors(kind: Any, text: str, parameters: dict[str, Any], *, stream: bool) -> list[Any]:
    values = {"text_input": text.encode(), "sampling_parameters": json.dumps(parameters).encode()}
    switches = {"stream": stream, "exclude_input_in_output": True}
    found = []
    for name, value in {**values, **switches}.items():
        array = np.array([value], dtype=object if isinstance(value, bytes) else bool)
        tensor = kind(name, [1], "BYTES" if isinstance(value, bytes) else "BOOL")
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def streams(url: str, prompts: list[str], parameters: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Texts of requests that run at once on one stream, and the order in which they began ("+0") and ended ("-0")."""
    heard: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    texts, order, going = [""] * len(prompts), list[str](), set(range(len(prompts)))
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: heard.put((result, error)))
        for number, prompt in enumerate(prompts):
            given = tensors(grpc.InferInput, prompt, parameters, stream=True)
            client.async_stream_infer("llm", given, request_id=str(number))
        while going:
            result, error = heard.get(timeout=PATIENCE)
            assert error is None, error
            answer = result.get_response()
            number = int(answer.id)
            if not texts[number]:
                order.append(f"+{number}")
            texts[number] += result.as_numpy("text_output")[0].decode()
            if answer.parameters["triton_final_response"].bool_param:
                going.remove(number)
                order.append(f"-{number}")
        client.stop_stream()
    return texts, order


def cancelled(url: str, prompt: str) -> int:
    """How many pieces of a long answer came before it was cancelled."""
    heard: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: heard.put((result, error)))
        long = {"max_tokens": 480, "ignore_eos": True}
        client.async_stream_infer("llm", tensors(grpc.InferInput, prompt, long, stream=True))
        assert heard.get(timeout=PATIENCE)[1] is None
        client.stop_stream(cancel_requests=True)
    return 1 + heard.qsize()


def refused(url: str) -> list[str]:
    with http.InferenceServerClient(url, network_timeout=PATIENCE) as client:
        try:
            client.infer("once", tensors(http.InferInput, "x", {"temperature": -1}, stream=False))
        except http.InferenceServerException as error:
            return [str(error.status()), error.message()]
    return []


def main() -> None:
    over_http, over_grpc = sys.argv[1:3]
    given = json.loads(sys.argv[3])
    prompts, parameters = given["prompts"], given["parameters"]
    with http.InferenceServerClient(over_http, network_timeout=PATIENCE) as client:
        inputs = tensors(http.InferInput, prompts[0], parameters, stream=False)
        once = client.infer("once", inputs).as_numpy("text_output").tolist()
        config = client.get_model_config("llm")
    texts, order = streams(over_grpc, prompts, parameters)
    told = {"texts": texts, "order": order, "once": [each.decode() for each in once], "refused": refused(over_http)}
    print(json.dumps({**told, "cancelled": cancelled(over_grpc, prompts[0]), "config": config}))


if __name__ == "__main__":
    main()
