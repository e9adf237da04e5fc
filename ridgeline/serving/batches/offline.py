"""A batch from one file to another, by the same store and runner as the server's. Beside the output lies a folder with
the state, so the same command goes on where it was ended."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.batches.lines import ENDPOINTS, check, custom_ids, raw_lines, read_line
from ridgeline.serving.stored.records import Batch, StoredFile, new_id
from ridgeline.serving.stored.store import Store

SHOWN = 5  # mistakes of a file
PIECE = 1 << 20


class OfflineBatch:
    """The batch of `source` to `target`. `folder` holds its state until it is done."""

    def __init__(self, source: Path, target: Path, longest: int) -> None:
        self.source, self.target, self._longest = source, target, longest
        self.folder = target.with_name(f"{target.name}.partial")

    def begin(self, names: Collection[str]) -> bool:
        """Check the input, and begin the batch or find the one that was begun. Return True if that has ended already.

        Raise InvalidRequest for an input that cannot be run.
        """
        digest = self._digest()
        known = (None, *names)
        _, _, mistakes = check(
            self.source, None, ENDPOINTS, self._longest, lambda model: model in known, one_model=False
        )
        if mistakes:
            told = "; ".join(
                (f"line {each.line}: " if each.line else "") + each.message.rstrip(".") for each in mistakes[:SHOWN]
            )
            more = f", and {len(mistakes) - SHOWN} more" if len(mistakes) > SHOWN else ""
            raise InvalidRequest(f"{self.source} cannot be run ({told}{more}).", param="input_file")
        self._store = Store(self.folder, 1 << 62)
        begun = list(self._store.list_batches(None))
        if any((batch.metadata or {}).get("input") != digest for batch in begun):
            raise InvalidRequest(
                f"{self.folder} has the state of a run of another input; remove it, or choose another output.",
                param="output_file",
            )
        self._begun = begun[0] if begun else self._create(digest)
        return self.state().final

    def state(self) -> Batch:
        return self._store.batch(self._begun.id, None)

    def finish(self) -> Batch:
        """Write the output, in the order of the input, and remove the state. Return the batch as it ended."""
        batch = self.state()
        assert batch.final
        files = [self._store.content(name) for name in (batch.output_file_id, batch.error_file_id) if name is not None]
        draft = self.folder / "output"
        opened = [path.open("rb") for path in files]
        try:
            places = {name: (file, at) for file in opened for name, at in custom_ids(file)}
            with draft.open("wb") as output:
                for number, line in raw_lines(self.source, self._longest):
                    file, at = places[read_line(number, line, None, ENDPOINTS, self._longest).custom_id]
                    file.seek(at)
                    output.write(file.readline())
        finally:
            for file in opened:
                file.close()
        os.replace(draft, self.target)
        shutil.rmtree(self.folder)
        return batch

    def _create(self, digest: str) -> Batch:
        size, now = self.source.stat().st_size, int(time.time())
        path = self._store.begin(size)
        shutil.copyfile(self.source, path)
        name = new_id("file-")
        self._store.add(path, StoredFile(id=name, bytes=size, created_at=now, filename=path.name, purpose="batch"))
        batch = Batch(
            id=new_id("batch_"),
            endpoint=None,
            input_file_id=name,
            completion_window="",
            created_at=now,
            metadata={"input": digest},
        )
        self._store.create(batch, self._store.content(name))
        self._store.delete_file(name, "")  # the batch has its own name for the content
        return batch

    def _digest(self) -> str:
        digest = sha256()
        try:
            with self.source.open("rb") as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
        except OSError as error:
            raise InvalidRequest(f"{self.source} cannot be read: {error.strerror}.", param="input_file") from error
        return digest.hexdigest()
