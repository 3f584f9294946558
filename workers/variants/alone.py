"""When to merge a variant that runs alone into the base's weights, so that its steps become the base's.

Merging has a cost, and restoring the base for another variant has a cost, too. The next variant is not known.
So a variant is merged once its unmerged steps have lost as much time as that costs (ski rental). If another
variant's weights must leave in any case, half of the cost is enough. In the worst case this costs three times
as much as with knowledge of the future. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

BASE_UID = 0  # the uid of the base among variants
# In units of the time that a step of few rows loses without merging, measured on an H200.
COST = 7.0  # of merging, and of restoring the base
COST_IN_PLACE_OF_ANOTHER = 3.5
ROWS = 185  # of a prompt of 512 rows or more: this many rows lose as much as one such step


@dataclass
class Alone:
    """One rank's account. `merged`: the variant whose weights are in the base's place, BASE_UID for the
    base's own.
    """

    merged: int = BASE_UID
    _uid: int = BASE_UID
    _lost: float = 0.0

    def step(self, uid: int, rows: int) -> int:
        """The variant whose weights the next step, of `rows` rows, needs; `uid` runs alone in it, or is
        BASE_UID.
        """
        if uid != self._uid:
            self._uid, self._lost = uid, 0.0
        if uid in (BASE_UID, self.merged):
            self.merged, self._lost = uid, 0.0
            return uid
        self._lost += 1 + rows / ROWS
        enough = COST if self.merged == BASE_UID else COST_IN_PLACE_OF_ANOTHER
        self.merged = uid if self._lost >= enough else BASE_UID
        return self.merged
