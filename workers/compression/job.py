"""From a base and a fine-tune to an artefact, layer by layer, continuing where an earlier process stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from profiler.errors import AdapterError, CheckpointError
from profiler.types import ModelSpec
from workers.compression import checks
from workers.compression.artefacts import Artefact
from workers.compression.checkpoint_artefact import CheckpointArtefact
from workers.compression.choose import OptionError
from workers.compression.delta_artefact import DeltaArtefact
from workers.compression.durable import Entry, write_tensors
from workers.compression.layers import Blocks, LayerCompressor, LayerContents
from workers.compression.methods import VERSION as METHODS
from workers.compression.recipe import ROWS, TOKENS
from workers.compression.records import PartRecord, mean_errors
from workers.compression.result import Result, result_of
from workers.compression.sources import open_source
from workers.compression.timing import Clock
from workers.compression.types import Method, Progress
from workers.compression.work_folder import CHECKED, RESULT, WorkFolder, file_digest, path_for, work_folder

if TYPE_CHECKING:
    from workers.compression.calibration.texts import Texts

VERSION = 2  # of a work folder's contents; 1 had no differences
REST = "rest"
SCAN_SHARE, LAYERS_SHARE = 0.05, 0.95  # of the progress


@dataclass(frozen=True)
class CalibrationOptions:
    """Texts for calibration: at most `rows` rows of at most `tokens` tokens of `file`, or of the bundled
    text.
    """

    file: Path | None = None
    rows: int = ROWS
    tokens: int = TOKENS


@dataclass(frozen=True)
class Job:
    """Compress `tuned` (a checkpoint, or an adapter on `base`) into the new folder `out`.

    A calibrated method without `calibration` uses the bundled text. With `calibration`, any method's errors
    are measured over the inputs of its layers. torch computes on `device`. `force`: continue even if the base
    seems to be another model. `plain`: write a checkpoint although engines could serve the method's delta.
    """

    base: Path
    tuned: Path
    out: Path
    method: Method
    calibration: CalibrationOptions | None = None
    device: str = "cpu"
    force: bool = False
    plain: bool = False


def compress(job: Job, progress: Progress | None = None) -> Result:
    """Do the job, or continue it. Meanwhile finished parts stay in a hidden folder next to `out`.

    Raises CheckpointError if files cannot be read or written, hold values that are not finite, `out` exists,
    or another process or job works on it. Raises AdapterError if the two do not belong together, or the
    method cannot code them. Raises OptionError for a missing device, and for groups that no engine loads.
    """
    require_device(job.device)
    out = job.out.absolute()
    if (out.exists() or out.is_symlink()) and not (path_for(out) / RESULT).is_file():
        raise CheckpointError(
            f"the folder {out} exists already; choose another folder, or remove this folder first"
        )
    run = _Run(job, progress or (lambda share, what: None))
    with work_folder(out) as work:
        work.begin(run.inputs())
        try:
            result = run.result_in(work) or run.work(work)
        except BaseException as error:
            if isinstance(error, AdapterError) or not work.has_parts:  # nothing that another run could use
                with suppress(OSError):
                    work.discard()
            raise
        work.discard()
    run.tell(1.0, "done")
    return result


class _Run:
    """One process's share of a job."""

    def __init__(self, job: Job, tell: Progress) -> None:
        self.job, self.tell, self.method = job, tell, job.method
        self.base = open_source(job.base)
        self.tuned = open_source(job.tuned, self.base)
        checks.check_groups(self.base.spec, self.method)
        self.warnings = checks.check_alike(self.base, self.tuned)
        self.artefact = self._artefact()
        self.texts = self._texts()
        if self.texts is not None:
            self.warnings += self.texts.warnings

    @property
    def spec(self) -> ModelSpec:
        return self.base.spec

    def inputs(self) -> dict[str, Any]:
        """Everything that determines the artefact's bytes."""
        return {
            "version": VERSION,
            "base": self.base.identity,
            "fine-tune": self.tuned.identity,
            "config": file_digest(self.tuned.folder / "config.json"),
            "method": self.method.name,
            "options": {**self.method.facts, **self.method.options},
            "methods": METHODS,
            "computed by": computed_by(self.job.device),
            "calibration": None if self.texts is None else self.texts.digest,
            "written as": "checkpoint" if isinstance(self.artefact, CheckpointArtefact) else "delta",
        }

    def result_in(self, work: WorkFolder) -> Result | None:
        """The result of a job that is done except for renaming."""
        document = work.earlier()
        if document is None:
            return None
        return Result(folder=work.out, spec=self.artefact.spec(work.out), **document)

    def work(self, work: WorkFolder) -> Result:
        checked = self._check(work)
        records = self._layers(work)
        self.tell(LAYERS_SHARE, "embedding, last norm and head")
        records.append(self._rest(work))
        work.sweep({record.file.name for record in records if record.file is not None})
        added_bytes = self.artefact.finish(work.artefact, records, self._notes(records))
        result = result_of(
            work.out,
            self.artefact.spec(work.artefact),
            self.tuned.spec,
            records,
            added_bytes,
            checked["seconds"] + sum(record.seconds for record in records),
            self.job.device,
        )
        warnings = (*self.warnings, *checked["warnings"], *_worse_than_base(records))
        result = replace(result, warnings=warnings)
        work.publish(result.as_json())
        return result

    def _check(self, work: WorkFolder) -> dict[str, Any]:
        """The figures of a pass over all values, or those of an earlier run."""
        checked = work.note(CHECKED)
        if checked is None:
            started = time.monotonic()

            def tell(share: float, what: str) -> None:
                self.tell(SCAN_SHARE * share, what)

            found = checks.scan(self.base, self.tuned, self.job.device, tell)
            adapted = self.tuned.folder == self.base.folder  # an adapter may be strong, and names no base
            warnings = checks.judge(found, self.base, self.tuned, self.job.force or adapted)
            checked = {"warnings": warnings, "seconds": time.monotonic() - started}
            work.write_note(CHECKED, checked)
        return checked

    def _layers(self, work: WorkFolder) -> list[PartRecord]:
        records = self._finished(work)
        layers = LayerCompressor(
            self.base, self.tuned, self.method, self.artefact, self._blocks(len(records)), self.job.device
        )
        for layer, record in enumerate(records):
            if len(records) < self.spec.num_layers:
                self.tell(self._share(layer), f"layer {layer} was finished earlier")
                layers.replay(layer, record, work.artefact)
        clock = Clock(self.spec.num_layers - len(records))
        for layer in range(len(records), self.spec.num_layers):
            records.append(self._layer(work, layers, layer, clock))
        return records

    def _layer(self, work: WorkFolder, layers: LayerCompressor, layer: int, clock: Clock) -> PartRecord:
        started, number = time.monotonic(), self.spec.num_layers

        def tell(share: float, what: str) -> None:
            self.tell(self._share(layer + share), f"layer {layer} of {number}: {what}{clock.left(share)}")

        contents = layers.compress(layer, tell)
        record = _write(work, self.artefact.file_name(layer), contents, started)
        work.finish(_part(layer), record)
        clock.tick()
        return record

    def _rest(self, work: WorkFolder) -> PartRecord:
        record = work.finished(REST)
        if record is None:
            started, entries = time.monotonic(), self.artefact.rest()
            whole = {name: entry.size_bytes for name, entry in entries.items()}
            contents = LayerContents(dict(entries), {}, whole)
            record = _write(work, self.artefact.file_name(self.spec.num_layers), contents, started)
            work.finish(REST, record)
        return record

    def _finished(self, work: WorkFolder) -> list[PartRecord]:
        """The layers before the first unfinished layer."""
        records: list[PartRecord] = []
        for layer in range(self.spec.num_layers):
            record = work.finished(_part(layer))
            if record is None:
                break
            records.append(record)
        return records

    def _share(self, layers: float) -> float:
        return SCAN_SHARE + (LAYERS_SHARE - SCAN_SHARE) * layers / self.spec.num_layers

    def _notes(self, records: list[PartRecord]) -> dict[str, Any]:
        """Notes in the artefact, for people, about how it was made."""
        notes: dict[str, Any] = {"layer_errors": mean_errors(records)}
        if self.texts is not None:
            rows, tokens = len(self.texts.rows), self.texts.tokens
            notes["calibration"] = {"rows": rows, "tokens": tokens, "sha256": self.texts.digest}
        return notes

    def _artefact(self) -> Artefact:
        if self.method.kind is None or self.job.plain:
            return CheckpointArtefact(self.tuned)
        return DeltaArtefact(self.base, self.tuned, self.method)

    def _texts(self) -> Texts | None:
        options = self.job.calibration
        if options is None and not self.method.calibrated:
            return None
        from workers.compression.calibration.texts import bundled_texts, read_texts

        options = options or CalibrationOptions()
        if options.file is None:
            return bundled_texts(self.tuned.folder, options.rows, options.tokens)
        return read_texts(options.file, self.tuned.folder, options.rows, options.tokens)

    def _blocks(self, finished: int) -> Blocks | None:
        if self.texts is None or finished == self.spec.num_layers:
            return None
        from workers.compression.calibration.blocks import open_blocks

        return open_blocks(self.tuned, self.texts, self.job.device, _activations(self.job.device))


def _write(work: WorkFolder, name: str, contents: LayerContents, started: float) -> PartRecord:
    entries: Mapping[str, Entry] = contents.entries
    file = write_tensors(work.artefact / name, entries) if entries else None
    return PartRecord(file, contents.modules, contents.whole, time.monotonic() - started)


def computed_by(device: str) -> str:
    """The conditions of rounding: the kind of device, and the type of calibration's activations there."""
    return f"{torch.device(device).type}, {str(_activations(device)).removeprefix('torch.')}"


def _activations(device: str) -> torch.dtype:
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def require_device(device: str) -> None:
    """Raises OptionError for a device that is missing or that torch does not know."""
    try:
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise OptionError("device", f"torch cannot compute on {device!r}: {reason}") from None


def _part(layer: int) -> str:
    return f"layer-{layer:05d}"


def _worse_than_base(records: list[PartRecord]) -> list[str]:
    """Warnings about layers whose outputs are further from the fine-tune's than the base's are."""
    bad = [name for r in records for name, m in r.modules.items() if m.error is not None and m.error >= 1]
    if not bad:
        return []
    return [
        f"{len(bad)} compressed layers differ more from the fine-tune than the base does, such as "
        f"{', '.join(bad[:3])}; give more bits or a larger ratio"
    ]
