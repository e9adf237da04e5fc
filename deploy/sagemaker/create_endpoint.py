"""Make a SageMaker endpoint of the image, ask it once as a stream, and leave it running.

    pip install boto3
    python deploy/sagemaker/create_endpoint.py NAME IMAGE ROLE [s3://bucket/model.tar.gz]

IMAGE is the image's address in ECR, ROLE the execution role's ARN. The archive holds the model's files, with
ridgeline.yaml beside them if the server needs further settings.
"""

from __future__ import annotations

import json
import sys
from typing import Any

INSTANCE = "ml.g6e.xlarge"
STARTUP = 1200  # seconds until /ping must answer: the model loads, and kernels are compiled


def requests_for(name: str, image: str, role: str, model_data: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the arguments of SageMaker's three calls, by their names in boto3."""
    container = {"Image": image} | ({"ModelDataUrl": model_data} if model_data else {})
    variant = {
        "VariantName": "all",
        "ModelName": name,
        "InstanceType": INSTANCE,
        "InitialInstanceCount": 1,
        "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP,
    }
    return {
        "create_model": {"ModelName": name, "ExecutionRoleArn": role, "PrimaryContainer": container},
        "create_endpoint_config": {"EndpointConfigName": name, "ProductionVariants": [variant]},
        "create_endpoint": {"EndpointName": name, "EndpointConfigName": name},
    }


def invocation(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of invoke_endpoint, and of invoke_endpoint_with_response_stream."""
    return {"EndpointName": name, "ContentType": "application/json", "Body": json.dumps(body)}


def main(name: str, image: str, role: str, model_data: str | None = None) -> None:
    import boto3  # type: ignore[import-not-found, unused-ignore]  # of whoever deploys

    sagemaker = boto3.client("sagemaker")
    for call, arguments in requests_for(name, image, role, model_data).items():
        getattr(sagemaker, call)(**arguments)
    sagemaker.get_waiter("endpoint_in_service").wait(EndpointName=name)
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 32, "stream": True}
    answer = boto3.client("sagemaker-runtime").invoke_endpoint_with_response_stream(**invocation(name, body))
    for event in answer["Body"]:
        print(event["PayloadPart"]["Bytes"].decode(), end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
