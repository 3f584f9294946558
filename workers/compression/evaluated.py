"""The user's evaluation set, answered by a fine-tune and its compressed artefacts; nothing is asked twice."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from profiler.errors import CheckpointError, TaskError
from profiler.evaluation.tasks import Task
from profiler.evaluation.types import Answerer
from profiler.files import is_file, read_json
from profiler.variants.reading import is_variant
from profiler.variants.side_files import GENERATION, generation_file
from workers.compression.durable import write_json
from workers.compression.quality import Loss, Outcome, losses_between, outcome, outcomes_of
from workers.compression.types import Progress
from workers.deltas.merge import merge, side_files

Open = Callable[[Path], Answerer]
"""From a folder with a plain checkpoint to a model that answers."""


class Evaluation:
    """`tasks` answered by models of one base, with the tokenizer and template of the fine-tune `tuned`.

    Their outcomes are kept in `folder`, so that a killed process can continue. `identity` distinguishes these
    models from others that used the folder before.
    """

    def __init__(
        self,
        base: Path,
        tuned: Path,
        tasks: Sequence[Task],
        folder: Path,
        identity: str,
        open_answerer: Open,
    ) -> None:
        self._base, self._tuned, self._tasks = base, tuned, tasks
        self._folder, self._open = folder, open_answerer
        parts = " ".join((identity, *(task.digest for task in tasks)))
        self._key = hashlib.sha256(parts.encode()).hexdigest()

    def outcomes(self, model: Path, name: str, progress: Progress | None = None) -> tuple[Outcome, ...]:
        """The outcomes of the model in a folder, a checkpoint or a variant of the base.

        `name` distinguishes it from the others. Errors: those of merging and answering.
        """
        tell = progress or (lambda share, what: None)
        kept = self._folder / f"{name}.json"
        if self.knows(name):
            return tuple(map(outcome, read_json(kept)["outcomes"]))
        self._folder.mkdir(parents=True, exist_ok=True)
        tell(0.0, f"loading {name}, to evaluate it")
        found: list[Outcome] = []
        with self._plain(model) as checkpoint:
            answerer = self._open(checkpoint)
            try:
                for number, task in enumerate(self._tasks, start=1):
                    part = f"{number} of {len(self._tasks)}, {task.name} ({len(task.items)} items)"
                    tell(number / (len(self._tasks) + 1), f"evaluating {name}: task {part}")
                    found += outcomes_of([task], answerer)
            except ValueError as error:
                raise TaskError(f"the tasks cannot be run on {model}: {error}") from error
        write_json(kept, {"key": self._key, "outcomes": [each.as_json() for each in found]})
        return tuple(found)

    def knows(self, name: str) -> bool:
        """Whether the outcomes of the model called `name` are kept."""
        kept = self._folder / f"{name}.json"
        return is_file(kept) and read_json(kept).get("key") == self._key

    def losses(
        self, before: tuple[Path, str], after: tuple[Path, str], progress: Progress | None = None
    ) -> tuple[Loss, ...]:
        """The losses from one model to another, each given as a folder and a name.

        Raises TaskError if the two read the tasks' texts as different tokens, in addition to the errors of
        `outcomes`.
        """
        tell = progress or (lambda share, what: None)
        had = self.outcomes(*before, lambda share, what: tell(share / 2, what))
        has = self.outcomes(*after, lambda share, what: tell((1 + share) / 2, what))
        try:
            return losses_between(had, has)
        except ValueError as error:
            raise TaskError(
                f"{before[0]} and its compressed delta cannot be compared: {error}; give base and fine-tune "
                "the same tokenizer (tokenizer.json, tokenizer_config.json), or compress without an "
                "evaluation"
            ) from error

    @contextmanager
    def _plain(self, model: Path) -> Iterator[Path]:
        """A folder with the model as a plain checkpoint, for the duration of the context."""
        if not is_variant(model):
            yield model
            return
        merged = self._folder / "merged"
        shutil.rmtree(merged, ignore_errors=True)  # left by a killed process
        try:
            merge(self._base, model, merged)
            if not is_variant(self._tuned):  # otherwise the fine-tune itself uses the base's
                replace_side_files(self._tuned, merged)
            yield merged
        finally:
            shutil.rmtree(merged, ignore_errors=True)


def replace_side_files(source: Path, target: Path) -> None:
    """Replace a checkpoint's tokenizer, chat template and generation defaults by another's."""
    for path in side_files(target):
        path.unlink()
    for path in side_files(source):
        shutil.copyfile(path, target / path.name)
    if (generation := generation_file(source, target)) is not None:
        write_json(target / GENERATION, generation)


def torch_answerer(device: str | None) -> Open:
    """Opens models with transformers on `device`; None: on a GPU if there is one."""

    def open_answerer(folder: Path) -> Answerer:
        from transformers.utils.logging import disable_progress_bar

        from workers.evaluation.torch_answerer import TorchAnswerer

        disable_progress_bar()  # our own progress is shown already
        try:
            return TorchAnswerer.open(folder, device)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the model and tokenizer in {folder} cannot be loaded for the evaluation: {error}; copy the "
                "missing files there, or compress without an evaluation"
            ) from error

    return open_answerer
