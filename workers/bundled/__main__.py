"""`python -m workers.bundled NAME DIR`: convert a bundled model into DIR and print its folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from workers.bundled import MODELS, ensure


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Convert a bundled model into a Hugging Face folder, unless it exists."
    )
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("cache_dir", type=Path, metavar="DIR")
    given = parser.parse_args()
    print(ensure(given.name, given.cache_dir, lambda message: print(message, flush=True)))


if __name__ == "__main__":
    main()
