"""The models of the shared clusters: a base of few layers and tokens, and two LoRAs of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openai

from testkit.cluster.clusters import GIVE_UP_S, Cluster
from testkit.random_adapters import ATTENTION, RandomLora

BASE = "smol"
LAYERS = 3
TOKENS = 15_360  # of 49,152: with all of them the head takes as long as eight layers. Three ranks share them
MAX_OUTPUT = 512
LORAS = (
    RandomLora("forte", rank=4, seed=11),
    RandomLora("piano", rank=16, seed=12, modules=ATTENTION, strength=0.25),
)


def roots(base_folder: Path, adapters: dict[str, Path]) -> str:
    return f"{base_folder.parent}:{adapters['spare'].parent}"


def serving(cluster: Cluster, base_folder: Path, adapters: dict[str, Path]) -> Iterator[Cluster]:
    """The cluster with the base and both LoRAs deployed. It is ended afterwards, and no process is left."""
    try:
        print(f"\n{cluster.settings.engine} cluster up in {cluster.up():.1f} s")
        started = time.monotonic()
        cluster.serve_base(BASE, str(base_folder), MAX_OUTPUT)
        print(f"base registered and deployed in {time.monotonic() - started:.1f} s")
        for lora in LORAS:
            started = time.monotonic()
            cluster.serve_variant(lora.name, BASE, adapters[lora.name], MAX_OUTPUT)
            print(f"variant {lora.name} registered and deployed in {time.monotonic() - started:.1f} s")
        yield cluster
        print(f"\n{cluster.settings.engine} cluster down in {cluster.down():.1f} s, no process left")
    finally:
        cluster.discard()


def openai_client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    """The official client, with its defaults."""
    http, key = openai.DefaultHttpxClient(trust_env=False), cluster.settings.api_key or "unused"
    with openai.OpenAI(
        base_url=f"{cluster.url}/v1", api_key=key, max_retries=0, timeout=GIVE_UP_S, http_client=http
    ) as made:
        yield made
