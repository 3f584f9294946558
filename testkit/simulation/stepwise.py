"""An engine that makes one step after the other, in plain Python: the reference for the simulator's jumps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple


class Asked(NamedTuple):
    arrival_s: float
    prompt: int
    output: int
    variant: int = 0


class Machine(NamedTuple):
    """Seconds. `load_s`, `row_s` by variant; as many slots as variants. Variants' parts are others in steps
    of `wide_from` tokens or more, if there are any, where those of prompts have all of them."""

    base_s: float = 0.01
    each_s: float = 0.001
    token_s: float = 1e-4  # of a prompt
    cached_s: float = 1e-6
    launch_s: float = 2e-3
    row_s: tuple[float, ...] = (0.0,)
    prompt_s: tuple[float, ...] = (0.0,)
    load_s: tuple[float, ...] = (0.0,)
    wide_from: int = 0
    wide_launch_s: float = 0.0
    wide_variant_s: tuple[float, ...] = (0.0,)
    wide_prompt_s: tuple[float, ...] = (0.0,)
    budget: int = 64
    most_rows: int = 4
    kv_tokens: int = 400

    def prefill_s(self, tokens: float) -> float:
        return self.base_s + self.token_s * tokens

    def decode_s(self, rows: int) -> float:
        return self.base_s + self.each_s * rows


@dataclass
class Row:
    number: int
    asked: Asked
    made: int = 0  # tokens
    unfilled: int = 0
    chunk: int = 0

    @property
    def cached(self) -> int:
        return self.asked.prompt + self.made - self.unfilled


@dataclass
class Outcome:
    first_s: float = math.nan
    end_s: float = math.nan


@dataclass
class Engine:
    """`first_s` and `end_s` of each request. A step is made of what had come when the step `look_ahead`
    before it began; the first one after a pause of what is there."""

    machine: Machine
    look_ahead: int = 0
    begun_s: list[float] = field(default_factory=list)  # the steps
    outcomes: list[Outcome] = field(default_factory=list)
    running: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)
    ready_s: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    loads_end_s: float = 0.0
    preemptions: int = 0
    most_cached: int = 0

    def serve(self, requests: list[Asked]) -> None:
        self.outcomes = [Outcome() for _ in requests]
        coming = [Row(number, asked, unfilled=asked.prompt) for number, asked in enumerate(requests)]
        now_s = 0.0
        while coming or self.waiting or self.running:
            scheduled_s = self._scheduled_s(now_s)
            while coming and coming[0].asked.arrival_s <= scheduled_s:
                self.waiting.append(coming.pop(0))
            self._load(now_s)
            self._preempt()
            self._admit(now_s)
            if not self.running:
                loads = [at for at in self.ready_s.values() if at > now_s]
                later = loads + [row.asked.arrival_s for row in coming[:1]]
                now_s = min(later)
                continue
            self.begun_s.append(now_s)
            now_s += self._step()
            self._give_out(now_s)

    def _scheduled_s(self, now_s: float) -> float:
        """When the step that begins now was."""
        if not self.running or not self.look_ahead:
            return now_s
        return self.begun_s[-self.look_ahead] if len(self.begun_s) >= self.look_ahead else -math.inf

    def _held(self) -> int:
        """Cached at the end of a step; a prompt takes its room at once."""
        return sum(row.asked.prompt + row.made + 1 for row in self.running)

    def _load(self, now_s: float) -> None:
        for row in self.waiting:
            if row.asked.variant not in self.ready_s:
                begin_s = max(self.loads_end_s, now_s)
                self.loads_end_s = begin_s + self.machine.load_s[row.asked.variant]
                self.ready_s[row.asked.variant] = self.loads_end_s

    def _preempt(self) -> None:
        while len(self.running) > 1 and self._held() > self.machine.kv_tokens:
            youngest = max(self.running, key=lambda row: row.number)
            self.running.remove(youngest)
            youngest.unfilled = youngest.asked.prompt + youngest.made
            self.waiting.append(youngest)
            self.waiting.sort(key=lambda row: row.number)
            self.preemptions += 1

    def _admit(self, now_s: float) -> None:
        for row in list(self.waiting):
            if self.ready_s[row.asked.variant] > now_s:
                continue
            fits = self._held() + row.asked.prompt + row.made + 1 <= self.machine.kv_tokens
            if len(self.running) >= self.machine.most_rows or not (fits or not self.running):
                return
            self.waiting.remove(row)
            self.running.append(row)

    def _step(self) -> float:
        machine = self.machine
        decoding = [row for row in self.running if not row.unfilled]
        left = max(0, machine.budget - len(decoding))
        for row in sorted(self.running, key=lambda row: row.number):
            row.chunk = min(row.unfilled, left)
            left -= row.chunk
        tokens = sum(row.chunk for row in self.running)
        variants = [row.asked.variant for row in decoding if row.asked.variant]
        seconds = machine.cached_s * sum(row.cached for row in decoding)
        seconds += sum(machine.row_s[variant] for variant in variants)
        alone_s = machine.decode_s(len(decoding)) if decoding else 0.0
        if tokens and 0 < machine.wide_from <= tokens + len(decoding):
            seconds += self._wide_s(variants)
        else:
            seconds += machine.launch_s if variants else 0.0
            seconds += sum(row.chunk * machine.prompt_s[row.asked.variant] for row in self.running)
        return seconds + (max(machine.prefill_s(tokens + len(decoding)), alone_s) if tokens else alone_s)

    def _wide_s(self, decoding: list[int]) -> float:
        machine, filled = self.machine, [row for row in self.running if row.chunk and row.asked.variant]
        present = {*decoding, *(row.asked.variant for row in filled)}
        once_s = sum(machine.wide_variant_s[variant] for variant in present)
        each_s = sum(row.chunk * machine.wide_prompt_s[row.asked.variant] for row in filled)
        return once_s + each_s + (machine.wide_launch_s if present else 0.0)

    def _give_out(self, now_s: float) -> None:
        for row in list(self.running):
            filling = row.unfilled > 0
            row.unfilled -= row.chunk
            if row.unfilled:
                continue
            row.made += 1
            if filling and math.isnan(self.outcomes[row.number].first_s):
                self.outcomes[row.number].first_s = now_s
            if row.made == row.asked.output:
                self.outcomes[row.number].end_s = now_s
                self.running.remove(row)
        self.most_cached = max(self.most_cached, sum(row.asked.prompt + row.made for row in self.running))
