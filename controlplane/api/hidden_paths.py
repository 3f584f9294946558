"""Errors tell a client what is wrong, but hide the server's folders: a path is cut to the file's name.

Managers of the installation named the folders of models, and see their paths. Tenants see none.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from controlplane import errors
from controlplane.settings import Settings
from workers.vllm_environment import vllm_cache

Hide = Callable[[errors.OstinatoError], errors.OstinatoError]

# The rest of a path in a sentence. It ends at characters that our file names do not contain.
_REST = r"(?:/[^\s'\"`,;:()\[\]<>]*)?(?![\w-]|\.\w)"


def for_managers(settings: Settings) -> Hide:
    """Hides the installation's own folders: its home, its code and Python's packages."""
    return _hiding(_installation(settings))


def for_tenants(settings: Settings) -> Hide:
    """Hides the folders of models, too."""
    return _hiding({*_installation(settings), *map(str, settings.roots)})


def _installation(settings: Settings) -> set[str]:
    packages = (sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    own = Path(__file__).parents[2]
    return {str(settings.home), str(settings.artifacts_folder), str(own), vllm_cache(), *packages}


def _hiding(roots: Iterable[str]) -> Hide:
    longest_first = sorted((root for root in roots if root.strip("/")), key=len, reverse=True)
    below = re.compile("(?<![\\w/.-])(?:" + "|".join(map(re.escape, longest_first)) + ")" + _REST)

    def hide(error: errors.OstinatoError) -> errors.OstinatoError:
        message = below.sub(_name, error.message)
        return error if message == error.message else error.saying(message)

    return hide


def _name(found: re.Match[str]) -> str:
    return found[0].rstrip("/.").rpartition("/")[2] + ("." if found[0].endswith(".") else "")
