"""When a variant that runs alone is merged into the base's weights, so that its steps become the base's.

Merging costs once, and once more when another comes and the base is put back. Who comes next is not known.
So it waits until the variant has lost by waiting what that costs (ski rental). Where another's weights must
leave anyway, half of that is enough. In the worst case this costs three times what knowing would. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

BASE_UID = 0  # stands for the base among variants
# In units of what a step of few rows loses when its delta is not merged, measured on an H200.
COST = 7.0  # of merging, and of putting the base back
COST_IN_PLACE_OF_ANOTHER = 3.5
ROWS = 185  # of a prompt of 512 or more, that lose as much as such a step


@dataclass
class Alone:
    """One rank's account. `merged` is whose weights the base's are now, BASE_UID for its own."""

    merged: int = BASE_UID
    _uid: int = BASE_UID
    _lost: float = 0.0

    def step(self, uid: int, rows: int) -> int:
        """Whose the weights are to be in the next step, of `rows` rows; `uid` is alone in it, or BASE_UID."""
        if uid != self._uid:
            self._uid, self._lost = uid, 0.0
        if uid in (BASE_UID, self.merged):
            self.merged, self._lost = uid, 0.0
            return uid
        self._lost += 1 + rows / ROWS
        enough = COST if self.merged == BASE_UID else COST_IN_PLACE_OF_ANOTHER
        self.merged = uid if self._lost >= enough else BASE_UID
        return self.merged
