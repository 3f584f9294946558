"""Deploys the peer of the gateway benchmark in the same cluster: a Serve handler that does what the echo
engine does.

It writes no access log, for our gateway writes none.

python -m benchmarks.bare_app RAY_ADDRESS
"""

from __future__ import annotations

import json
import sys

import ray
from ray import serve
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import Response

from workers.engine.echo_forms import whole_answer

REHEARSED_BY = "benchmarks.gateway"


class Bare:
    async def __call__(self, request: Request) -> Response:
        asked = json.loads(await request.body())
        answer = whole_answer(asked["model"], asked["messages"][-1]["content"], is_chat=True)
        return Response(answer, media_type="application/json")


DEPLOYMENT = serve.deployment(
    Bare,
    max_ongoing_requests=1000,
    ray_actor_options={"num_cpus": 0.1},
    logging_config=LoggingConfig(enable_access_log=False),
)


if __name__ == "__main__":
    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
    serve.run(DEPLOYMENT.bind(), name="bare", route_prefix="/bare")
