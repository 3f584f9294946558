"""Deploys the peer of the gateway benchmark beside it: a Serve handler that answers at once.

python -m benchmarks.bare_app RAY_ADDRESS
"""

from __future__ import annotations

import sys

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

REHEARSED_BY = "benchmarks.gateway"
ANSWER = (
    b'{"id": "echo", "object": "chat.completion", "created": 0, "model": "smollm2-135m-instruct", "choices": '
    b'[{"index": 0, "finish_reason": "stop", "logprobs": null, '
    b'"message": {"role": "assistant", "content": "hello"}}],'
    b' "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}'
)


class Bare:
    async def __call__(self, request: Request) -> Response:
        await request.body()
        return Response(ANSWER, media_type="application/json")


DEPLOYMENT = serve.deployment(Bare, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})


if __name__ == "__main__":
    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
    serve.run(DEPLOYMENT.bind(), name="bare", route_prefix="/bare")
