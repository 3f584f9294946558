"""A compression as requested by a user: search the best method, measure the quality, pack the files.

Finished parts stay in the hidden folder of `work_folder`, next to the target. A repeated command continues
where it stopped:

    .OUT.compressing/tried/NAME          a candidate's artefact, compressed by a job of its own
                     tried/NAME.json     its size, or why it was refused
                     outcomes/*.json     the outcomes of the tasks for the fine-tune and the candidates
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.evaluation.tasks import Task, read_tasks
from profiler.files import is_file, read_json
from profiler.variants.delta import DELTA, FULL_FILE
from profiler.variants.reading import read_variant
from profiler.variants.types import VariantLimits
from workers.compression.auto import CANDIDATES, Candidate, LossTooLarge, Refused, Sizes, smallest
from workers.compression.choose import MethodName, Options, method_of
from workers.compression.durable import rename
from workers.compression.evaluated import Evaluation, Open, torch_answerer
from workers.compression.job import VERSION, Job, compress, computed_by, require_device
from workers.compression.lossless import compress_files
from workers.compression.methods import VERSION as METHODS
from workers.compression.quality import Loss, described, worst, write_quality
from workers.compression.request import Report, Request, check_request
from workers.compression.result import HALF_BYTES, Result
from workers.compression.sources import open_source
from workers.compression.types import Progress
from workers.compression.work_folder import RESULT, WorkFolder, file_digest, path_for, work_folder
from workers.deltas.merge import side_files

TRIED, OUTCOMES, BEFORE = "tried", "outcomes", "fine-tune"
WORDS = frozenset({".json", ".jinja", ".model", ".txt"})
EVALUATED_SHARE = 0.6  # the part of a candidate's progress that is compression; the rest is evaluation


def run(request: Request, progress: Progress | None = None, open_answerer: Open | None = None) -> Report:
    """Carry out the request, or continue it.

    Raises OptionError for options that do not go together, TaskError for tasks that cannot be read,
    LossTooLarge if no candidate of auto is within the limit, and CheckpointError and AdapterError like
    `compress`.
    """
    check_request(request)
    require_device(request.device)
    if request.evaluation is None and not request.lossless:
        return Report(compress(_job(request, request.options, request.out), progress), request.options)
    out = request.out.absolute()
    if (out.exists() or out.is_symlink()) and not is_file(path_for(out) / RESULT):
        raise CheckpointError(
            f"the folder {out} exists already; choose another folder, or remove this folder first"
        )
    tasks = read_tasks(request.evaluation) if request.evaluation is not None else ()
    tell = progress or (lambda share, what: None)
    with work_folder(out) as work:
        running = _Run(request, tasks, work, tell, open_answerer or torch_answerer(request.device))
        work.begin(running.inputs)
        try:
            report = running.earlier() or running.work_on()
        except AdapterError as error:
            if not isinstance(error, LossTooLarge):  # its outcomes are useful for another limit
                with suppress(OSError):
                    work.discard()
            raise
        work.discard()
    tell(1.0, "done")
    return report


class _Run:
    """One process's share of a request."""

    def __init__(
        self,
        request: Request,
        tasks: Sequence[Task],
        work: WorkFolder,
        tell: Progress,
        open_answerer: Open,
    ) -> None:
        self.request, self.tasks, self.work, self.tell = request, tasks, work, tell
        self.spec = read_model(request.base)
        self.inputs = self._inputs()
        self.evaluation = Evaluation(
            request.base, request.tuned, tasks, work.path / OUTCOMES, str(self.inputs), open_answerer
        )

    def earlier(self) -> Report | None:
        """The report of a run that is done except for renaming."""
        document = self.work.earlier()
        if document is None:
            return None
        options, result = document.pop("options"), document
        more = {name: result.pop(name) for name in ("quality", "tried", "lossless")}
        options["method"] = MethodName(options["method"])
        return Report(self._result(self.work.out, result), Options(**options), **more)

    def work_on(self) -> Report:
        (self.work.path / TRIED).mkdir(exist_ok=True)
        auto = self.request.options.method is MethodName.auto
        candidates = CANDIDATES if auto else (Candidate(self.request.options, 0.0),)
        compressed, measured = self._told(candidates)
        tried: tuple[Mapping[str, Any], ...] = ()
        if auto:
            assert self.request.max_loss is not None
            chosen = smallest(candidates, compressed, measured, self.request.max_loss)
            best, losses = chosen.best.candidate, chosen.best.losses
            tried = tuple(each.as_json() for each in chosen.tried)
        else:
            best = candidates[0]
            compressed(best)
            losses = measured(best) if self.tasks else ()
        return self._publish(best, losses, tried)

    def _told(self, candidates: Sequence[Candidate]) -> tuple[Any, Any]:
        """`_compress` and `_measure`, with their progress as a part of the whole search."""
        number = {candidate.name: i for i, candidate in enumerate(candidates)}

        def at(candidate: Candidate, share: float, what: str) -> None:
            prefix = f"{candidate.name}: " if len(candidates) > 1 else ""
            self.tell((number[candidate.name] + share) / len(candidates), f"{prefix}{what}")

        def compressed(candidate: Candidate) -> Sizes:
            def tell(share: float, what: str) -> None:
                if share < 1:  # "done" is not for a user who waits for the evaluation
                    then = ", then the evaluation" if self.tasks and what.endswith(" left") else ""
                    at(candidate, share * EVALUATED_SHARE, f"{what}{then}")

            return self._compress(candidate, tell)

        def measured(candidate: Candidate) -> tuple[Loss, ...]:
            def tell(share: float, what: str) -> None:
                at(candidate, EVALUATED_SHARE + share * (1 - EVALUATED_SHARE), what)

            return self._measure(candidate, tell)

        return compressed, measured

    def _compress(self, candidate: Candidate, tell: Progress) -> Sizes:
        note = f"{TRIED}/{candidate.name}.json"
        known = self.work.note(note)
        if known is None:
            try:
                known = asdict(self._made(candidate, tell))
            except AdapterError as error:
                if not isinstance(error.__cause__, ValueError):  # not caused by the method
                    raise
                known = {"refused": str(error)}
            self.work.write_note(note, known)
        if "refused" in known:
            raise Refused(known["refused"])
        return Sizes(**known)

    def _made(self, candidate: Candidate, tell: Progress) -> Sizes:
        """Compress the candidate; returns its sizes."""
        result = self._folder(candidate, tell)
        if result.spec is None:
            return Sizes(result.size_bytes, result.size_bytes, result.finetune_bytes)
        modules = read_json(result.folder / DELTA)["modules"]
        shapes = (self.spec.linear_shapes[name.rpartition(".")[2]] for name in modules)
        code_bytes = result.spec.weight_bytes - result.spec.full_bytes
        return Sizes(result.size_bytes, code_bytes, HALF_BYTES * sum(map(math.prod, shapes)))

    def _folder(self, candidate: Candidate, tell: Progress) -> Result:
        """The candidate's result, compressed now or before."""
        folder = self.work.path / TRIED / candidate.name
        note = f"{TRIED}/{candidate.name}.result.json"
        known = self.work.note(note)
        if known is not None and folder.is_dir():
            return self._result(folder, known)
        if not is_file(path_for(folder) / RESULT):  # otherwise it is done except for renaming
            shutil.rmtree(folder, ignore_errors=True)
        result = compress(_job(self.request, candidate.options, folder), tell)
        self.work.write_note(note, result.as_json())
        return result

    def _measure(self, candidate: Candidate, tell: Progress) -> tuple[Loss, ...]:
        """The candidate's losses; its folder is removed if they are too large."""
        folder = self.work.path / TRIED / candidate.name
        if not self.evaluation.knows(candidate.name):
            self._folder(candidate, lambda share, what: None)
        losses = self.evaluation.losses((self.request.tuned, BEFORE), (folder, candidate.name), tell)
        if self.request.max_loss is not None and worst(losses).value > self.request.max_loss:
            shutil.rmtree(folder, ignore_errors=True)
        return losses

    def _publish(self, best: Candidate, losses: Sequence[Loss], tried: Sequence[Mapping[str, Any]]) -> Report:
        """Move the best candidate to the target, with its report."""
        result, lossless = self._folder(best, self.tell), {}
        folder = result.folder
        if losses and is_file(folder / DELTA):
            write_quality(folder, losses)
        if self.request.lossless:
            packed = compress_files(folder, self.request.storage_mb_per_s)
            result = result.packed(packed.saved_bytes(), packed.saved_bytes(FULL_FILE))
            lossless = packed.facts()
        shutil.rmtree(self.work.artefact, ignore_errors=True)
        rename(folder, self.work.artefact)
        report = Report(result, best.options, described(losses), tried, lossless)
        self.work.publish(report.as_json())
        return replace(report, result=self._result(self.work.out, result.as_json()))

    def _result(self, folder: Path, known: Mapping[str, Any]) -> Result:
        spec = read_variant(folder, self.spec, VariantLimits(0)) if is_file(folder / DELTA) else None
        return Result(folder=folder, spec=spec, **known)

    def _inputs(self) -> dict[str, Any]:
        """Everything that determines the outcomes, except the candidates."""
        request, base = self.request, open_source(self.request.base)
        tuned = open_source(request.tuned, base)
        calibration = request.calibration
        return {
            "version": VERSION,
            "base": base.identity,
            "fine-tune": tuned.identity,
            "config": file_digest(tuned.folder / "config.json"),
            "tokenizer": _words_digest(tuned.folder),
            "own words": _words_digest(tuned.origin),
            "options": asdict(request.options),
            "methods": METHODS,
            "computed by": computed_by(request.device),
            "calibration": calibration
            and [
                None if calibration.file is None else file_digest(calibration.file),
                calibration.rows,
                calibration.tokens,
            ],
            "evaluation": [task.digest for task in self.tasks],
        }


def _words_digest(folder: Path) -> str:
    """The digest of the tokenizer, the chat template and the other files that shape the tasks' prompts."""
    digest = hashlib.sha256()
    for path in side_files(folder):
        if path.suffix in WORDS:
            digest.update(f"{path.name} {file_digest(path)} ".encode())
    return digest.hexdigest()


def _job(request: Request, options: Options, out: Path) -> Job:
    return Job(
        request.base,
        request.tuned,
        out,
        method_of(options),
        request.calibration,
        request.device,
        request.force,
    )
