"""A series of checkpoints in one folder, by step, of which the last few are kept."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from shardwise.checkpoint.crew import current_crew
from shardwise.checkpoint.index import INDEX_NAME
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.saving import COPY_BYTES, Saving, save, save_async, wait_for_saves
from shardwise.errors import CheckpointError

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
        """`keep` is how many checkpoints stay; None keeps all."""
        if keep is not None and keep < 1:
            raise CheckpointError(f"At least one checkpoint is kept, found keep={keep}.")
        self.folder = Path(folder)
        self.keep = keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps with a whole checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        found = (_STEP.fullmatch(p.name) for p in self.folder.iterdir())
        names = [m for m in found if m and (self.folder / m[0] / INDEX_NAME).is_file()]
        return sorted(int(m[1]) for m in names)

    def latest(self) -> int | None:
        """The last step with a whole checkpoint, as rank 0 sees it, on every rank."""
        wait_for_saves()
        crew = current_crew()

        def look() -> list[int | None]:
            steps = self.steps() if crew.leads else []
            return [steps[-1] if steps else None] * len(crew.present)

        return crew.together(look)[0]

    def save(self, step: int, state: Any) -> None:
        """Save a step, then remove what is beyond `keep`."""
        save(state, self.path(step))
        self._trim()

    def save_async(self, step: int, state: Any, *, copy_bytes: int = COPY_BYTES) -> Saving:
        """Save a step in the background; the next save removes what is beyond `keep`."""
        wait_for_saves()
        self._trim()
        return save_async(state, self.path(step), copy_bytes=copy_bytes)

    def load(self, state: Any, step: int | None = None, *, strict: bool = True) -> Any:
        """Load a step, or the latest one."""
        chosen = self.latest() if step is None else step
        if chosen is None:
            raise CheckpointError(f"There is no checkpoint in {self.folder}.")
        return load(state, self.path(chosen), strict=strict)

    def _trim(self) -> None:
        if self.keep is not None:
            current_crew().once(self._remove_old)

    def _remove_old(self) -> None:
        assert self.keep is not None, "without a number, nothing is removed"
        for step in self.steps()[: -self.keep]:
            # Renamed first: a half removed folder must not look like a checkpoint.
            gone = self.folder / f".{self.path(step).name}.removed"
            self.path(step).rename(gone)
        for leftover in self.folder.glob(".step-*.removed"):
            shutil.rmtree(leftover)
