#!/bin/sh
# usage: types_of_tests.sh MYPY
# Type-checks tests/ with pyproject.toml's settings, which has no place for this: helpers are imported by bare
# names, as pytest finds them, so each folder is searched; kernels' and packages have longer names. A second
# module named conftest is an error to mypy, so each is checked in a run of its own, a second with the cache.
set -eu
MYPYPATH=$(find tests -type d ! -name __pycache__ ! -path 'tests/kernels*' ! -exec test -e '{}/__init__.py' ';' -print | paste -sd:)
export MYPYPATH
failed=0
"$1" --explicit-package-bases $(find tests -name '*.py' ! -name conftest.py) || failed=1
for conftest in $(find tests -name conftest.py); do
  "$1" --no-error-summary --explicit-package-bases "$conftest" || failed=1
done
exit $failed
