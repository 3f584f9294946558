#!/bin/sh
# usage: types_of_tests.sh MYPY
# Type-checks tests/ with pyproject.toml's settings. Tests are no package: each file is named after its path, and
# several have the same name.
set -eu
"$1" --explicit-package-bases tests
