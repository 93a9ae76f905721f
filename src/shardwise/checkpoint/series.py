"""A series of checkpoints in one folder, by step; only the last few are kept."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path
from typing import Any

from shardwise.checkpoint.claim import remove_dead_halves
from shardwise.checkpoint.crew import current_crew
from shardwise.checkpoint.index import INDEX_NAME
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.read import verify_together
from shardwise.checkpoint.saving import COPY_BYTES, Saving, save, save_async, wait_for_saves
from shardwise.errors import CheckpointError, CheckpointWarning

_STEP = re.compile(r"step-(\d{8,})")


class Checkpoints:
    """The checkpoints of one training, `step-00000010` and so on.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = Checkpoints(folder, keep=2)
    ...     for step in (10, 20, 30):
    ...         checkpoints.save(step, {"x": torch.ones(2), "step": step})
    ...     checkpoints.steps()
    [20, 30]
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = None) -> None:
        """`keep` is the number of checkpoints to keep; None keeps all.

        The first completed are removed first, whatever their steps, but never the one just saved,
        nor the one loaded before it.
        """
        if keep is not None and (type(keep) is not int or keep < 1):
            raise CheckpointError(f"At least one checkpoint is kept, found keep={keep!r}.")
        self.folder = Path(folder)
        self.keep = keep
        self._saved: int | None = None
        #: The step that was loaded last, until the second save after it.
        self._loaded: int | None = None

    def path(self, step: int) -> Path:
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = -1
        if number < 0:
            raise CheckpointError(f"A step is a number from 0 on, found {step!r}.")
        return self.folder / f"step-{number:08d}"

    def steps(self) -> list[int]:
        """The steps with a whole checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        found = (_STEP.fullmatch(p.name) for p in self.folder.iterdir())
        names = [m for m in found if m and (self.folder / m[0] / INDEX_NAME).is_file()]
        return sorted(int(m[1]) for m in names)

    def latest(self) -> int | None:
        """The last step with a whole checkpoint, as rank 0 sees it, on every rank."""
        steps = self._agreed_steps()
        return steps[-1] if steps else None

    def _agreed_steps(self) -> list[int]:
        """`steps()` as rank 0 sees them."""
        crew = current_crew()

        def list_steps() -> list[int]:
            wait_for_saves()
            return self.steps() if crew.leads else []

        return crew.alike(list_steps)[0]

    def _agreed_path(self, step: int) -> Path:
        """`path(step)`; an invalid step on one rank is an error on all ranks."""
        crew = current_crew()

        def name_step() -> Path:
            wait_for_saves()
            return self.path(step)

        return crew.alike(name_step)[crew.present[0]]

    def save(self, step: int, state: Any) -> None:
        """Save a step, then remove checkpoints beyond `keep`."""
        save(state, self._agreed_path(step))
        self._note_saved(step)
        self._tidy()

    def save_async(self, step: int, state: Any, *, copy_bytes: int = COPY_BYTES) -> Saving:
        """Save a step in the background; the next save removes checkpoints beyond `keep`."""
        path = self._agreed_path(step)
        self._tidy()
        saving = save_async(state, path, copy_bytes=copy_bytes)
        self._note_saved(step)
        return saving

    def _note_saved(self, step: int) -> None:
        if self._saved is not None:
            self._loaded = None
        self._saved = step

    def load(self, state: Any, step: int | None = None, *, strict: bool = True) -> Any:
        """Load a step, or the latest one."""
        chosen = self.latest() if step is None else step
        if chosen is None:
            raise CheckpointError(f"There is no checkpoint in {self.folder}.")
        found = load(state, self._agreed_path(chosen), strict=strict)
        self._loaded, self._saved = chosen, None
        return found

    def load_latest(self, state: Any, *, fallback: bool = False, strict: bool = True) -> Any:
        """Load the latest step; with `fallback`, the latest one that is not damaged.

        Then all ranks together read and check each candidate as a whole before loading it. A
        `CheckpointWarning` names the skipped ones.
        """
        damaged: list[str] = []
        for step in reversed(self._agreed_steps()) if fallback else ():
            faults = verify_together(self.path(step), current_crew())
            if not faults:
                found = self.load(state, step, strict=strict)
                if damaged and current_crew().leads:
                    text = " ".join([f"Step {step} was loaded.", *damaged])
                    warnings.warn(text, CheckpointWarning, stacklevel=2)
                return found
            more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
            damaged.append(f"Step {step} is damaged: {faults[0]}{more}")
        if damaged:
            raise CheckpointError(f"Every checkpoint in {self.folder} is damaged. {damaged[0]}")
        return self.load(state, strict=strict)

    def _tidy(self) -> None:
        def tidy() -> None:
            if self.folder.is_dir():
                self._remove_old()
                remove_dead_halves(self.folder, "step-")

        current_crew().once(tidy)

    def _remove_old(self) -> None:
        steps = self.steps()
        # Another job may remove the same: what is gone is gone.
        with contextlib.suppress(FileNotFoundError):
            kept = (self._saved, self._loaded)
            old = sorted((self._completed_ns(step), step) for step in steps if step not in kept)
            num_old = len(steps) - (len(steps) if self.keep is None else self.keep)
            for _, step in old[: max(num_old, 0)]:
                # Renamed first: a half removed folder must not look like a checkpoint.
                path = self.path(step)
                path.rename(self.folder / f".{path.name}.removed-{secrets.token_hex(6)}")
        for leftover in self.folder.glob(".step-*.removed*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _completed_ns(self, step: int) -> int:
        """When a checkpoint was completed: its index is written last."""
        return (self.path(step) / INDEX_NAME).stat().st_mtime_ns
