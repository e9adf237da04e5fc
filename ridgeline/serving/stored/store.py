"""Files and batches in a folder that survives the server. Any number of processes may use it at once.

    files/file-…/    content, file.json
    batches/batch_…/ batch.json, input (another name of the file), cancel, output.jsonl, errors.jsonl, note
    partial/         whatever is being made: a folder moves to its place once it is complete
    runner           locked by the process that runs the batches, which alone writes to those there are

Nothing is read into memory but records of a few kilobytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.lacking import READ_ONLY
from ridgeline.serving.errors import BadRequest, NoRoom
from ridgeline.serving.stored.records import Batch, Mistake, StoredFile, new_id

MOST_ENTRIES = 20_000  # files, and batches
KEPT = 30 * 86_400  # seconds that files are kept by default, and batches that have ended
NOTE = 1 << 10  # bytes for a note that a batch's runner leaves, which are there before the disk is full
PROBE = 64 << 10  # bytes that can be written where there is room again
ABANDONED = 3_600  # seconds without a change after which a folder counts as abandoned by its maker

OFF = "this server takes no files and batches; start it with --batch-dir FOLDER."

_Record = TypeVar("_Record")


class NoSuchEntry(BadRequest):
    status, code = 404, "not_found"


class StoreFull(NoRoom):
    """Files have as many bytes as they may."""


class Store:
    """The files and batches of one server. `limit` bounds the bytes of all files together."""

    def __init__(self, root: Path, limit: int) -> None:
        """Open the folder, or make it. Raise InvalidConfig if it cannot be used."""
        self.root, self._limit = root, limit
        self.files, self.batches, self._partial = (root / name for name in ("files", "batches", "partial"))
        try:
            for folder in (root, self.files, self.batches, self._partial):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._partial / new_id("probe-")
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InvalidConfig(f"the folder of batches {root} cannot be used ({error}); name another.") from error

    def lock(self) -> int | None:
        """Return the descriptor of the runner's lock, or None while another process has it."""
        descriptor = os.open(self.root / "runner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    # ---- files ------------------------------------------------------------------------------------------------

    def begin(self, size: int) -> Path:
        """Return the path of a new file of `size` bytes in a folder of its own, to be written, `add`ed or `drop`ped.
        Its bytes count at once. Raise StoreFull if there is no room."""
        entries = self._check_room(size)
        if entries >= MOST_ENTRIES:
            raise StoreFull(f"there are {entries} files, of at most {MOST_ENTRIES}; delete some.")
        with self._made() as folder:
            path = folder / "content"
            with open(path, "xb") as file:
                file.truncate(size)
        return path

    @contextmanager
    def _made(self) -> Iterator[Path]:
        """Make a folder, of which nothing is left if the body fails."""
        folder = self._partial / new_id("new-")
        folder.mkdir()
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def check_disk(self) -> None:
        """Raise OSError while the disk has no room."""
        probe = self._partial / new_id("probe-")
        try:
            with open(probe, "xb", buffering=0) as file:
                file.write(bytes(PROBE))
                os.fsync(file.fileno())
            if probe.stat().st_size < PROBE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            probe.unlink(missing_ok=True)

    def reserve(self, path: Path, size: int) -> None:
        """Let a file that was begun have `size` bytes, which count at once. Raise StoreFull if there is no room."""
        self._check_room(size - path.stat().st_size)
        os.truncate(path, size)

    def _check_room(self, more: int) -> int:
        """Return the number of files. Raise StoreFull if there is no room for so many bytes more."""
        used, entries = self.used()
        if used + more > self._limit:
            raise StoreFull(f"files have {used} bytes, of at most {self._limit} (--batch-dir-bytes); delete some.")
        return entries

    def add(self, path: Path, record: StoredFile) -> StoredFile:
        """Give a file that is complete its place."""
        _write(path.parent / "file.json", record)
        _settle(path)
        os.rename(path.parent, self.files / record.id)
        _settle(self.files)
        return record

    def drop(self, path: Path) -> None:
        """Forget a file that was begun."""
        shutil.rmtree(path.parent, ignore_errors=True)

    def file(self, name: str, owner: str) -> StoredFile:
        """Return a client's file. Raise NoSuchEntry."""
        found = _read(self.files / name / "file.json", StoredFile)
        if found is None or found.owner != owner or _expired(found):
            raise NoSuchEntry(f"No such File object: {name}", param="id")
        return found

    def content(self, name: str) -> Path:
        return self.files / name / "content"

    def opened(self, name: str, owner: str) -> tuple[StoredFile, BinaryIO]:
        """Return a client's file with its content to be read, which stays there if it is deleted meanwhile. Raise
        NoSuchEntry."""
        found = self.file(name, owner)
        try:
            return found, open(self.content(name), "rb")
        except FileNotFoundError:
            raise NoSuchEntry(f"No such File object: {name}", param="id") from None

    def list_files(self, owner: str) -> Iterator[StoredFile]:
        """Yield a client's files, the newest first."""
        for name in _names(self.files):
            found = _read(self.files / name / "file.json", StoredFile)
            if found is not None and found.owner == owner and not _expired(found):
                yield found

    def delete_file(self, name: str, owner: str) -> None:
        self.file(name, owner)
        self._remove(self.files / name)

    def used(self) -> tuple[int, int]:
        """Return the bytes on the disk of all files, those under way and those that only batches still have among them,
        and how many files there are."""
        sizes, count = dict[int, int](), 0  # by inode: a batch's input and its results are files by other names
        for parent, names in (
            (self.files, ("content",)),
            (self._partial, ("content",)),
            (self.batches, ("input", "output.jsonl", "errors.jsonl")),
        ):
            for entry in os.scandir(parent):
                for name in names:
                    with suppress(OSError):
                        found = os.stat(os.path.join(entry.path, name))
                        sizes[found.st_ino] = found.st_size
                        count += name == "content"
        return sum(sizes.values()), count

    # ---- batches ----------------------------------------------------------------------------------------------

    def create(self, batch: Batch, content: Path) -> Batch:
        """Add a batch with this input, which stays there for it even if the file is deleted."""
        if len(os.listdir(self.batches)) >= MOST_ENTRIES:
            raise StoreFull(f"there are {MOST_ENTRIES} batches, as many as are kept; try again in some days.")
        with self._made() as folder:
            try:
                os.link(content, folder / "input")
            except FileNotFoundError:
                raise NoSuchEntry(f"No such File object: {batch.input_file_id}", param="input_file_id") from None
            (folder / "note").write_bytes(b" " * NOTE)
            _write(folder / "batch.json", batch)
            os.rename(folder, self.batches / batch.id)
        _settle(self.batches)
        return batch

    def kept(self, name: str) -> Batch | None:
        """Return a batch as its runner left it."""
        return _read(self.batches / name / "batch.json", Batch)

    def batch(self, name: str, owner: str | None) -> Batch:
        """Return a client's batch, or any client's if `owner` is None. Raise NoSuchEntry."""
        found = self.kept(name)
        if found is None or owner not in (None, found.owner):
            raise NoSuchEntry(f"No such Batch object: {name}", param="id")
        when = self.cancelled(name)
        if when is not None and not found.final:
            found.cancelling_at = when
            found.status = "cancelling"
        if not found.final and (note := self._note(name)) is not None:
            found.errors = [*found.errors, note]
        return found

    def tell(self, batch: Batch, note: Mistake | None) -> None:
        """Let a batch's client know what keeps it from going on, or that nothing does. That takes no room on the disk,
        because the note is as long as it was."""
        said = b"" if note is None else msgspec.json.encode(note)
        with suppress(OSError), open(self.batches / batch.id / "note", "r+b", buffering=0) as file:
            file.write(said.ljust(NOTE))

    def _note(self, name: str) -> Mistake | None:
        if os.statvfs(self.root).f_flag & os.ST_RDONLY:  # where no note can be written
            return waiting(READ_ONLY)
        return _read(self.batches / name / "note", Mistake)

    def names(self) -> list[str]:
        """Return the ids of all batches, the newest first."""
        return _names(self.batches)

    def list_batches(self, owner: str | None) -> Iterator[Batch]:
        """Yield a client's batches, or all clients', the newest first."""
        for name in _names(self.batches):
            with suppress(NoSuchEntry):
                yield self.batch(name, owner)

    def save(self, batch: Batch) -> None:
        """Replace what is known of a batch. Only the runner does."""
        _write(self.batches / batch.id / "batch.json", batch)

    def cancel(self, name: str) -> None:
        """Ask the runner to end a batch."""
        with suppress(FileExistsError):
            _write(self.batches / name / "cancel", int(time.time()), new=True)

    def cancelled(self, name: str) -> int | None:
        """Return the time at which the batch was cancelled, or None if it was not."""
        return _read(self.batches / name / "cancel", int)

    def publish(self, batch: Batch, lines: Path, record: StoredFile) -> None:
        """Make a batch's lines a file of its client's. It may be done twice, as after a death in between."""
        if not (self.files / record.id).exists():
            with self._made() as folder:
                os.link(lines, folder / "content")
                self.add(folder / "content", record)

    def clear(self, batch: Batch) -> None:
        """Remove what a batch that has ended needs no more."""
        for name in ("input", "output.jsonl", "errors.jsonl", "note"):
            (self.batches / batch.id / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove files and batches whose time is over, and what dead processes left half made."""
        now = time.time()
        for name in _names(self.files):
            found = _read(self.files / name / "file.json", StoredFile)
            if found is not None and _expired(found):
                self._remove(self.files / name)
        for name in _names(self.batches):
            batch = _read(self.batches / name / "batch.json", Batch)
            if batch is not None and batch.final and batch.created_at + KEPT < now:
                self._remove(self.batches / name)
        for entry in list(os.scandir(self._partial)):
            with suppress(OSError):
                folder = Path(entry.path)
                inside = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
                if max(inside) + ABANDONED < now:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def _remove(self, folder: Path) -> None:
        """Remove a folder at once for all others. Those that read its content read on."""
        gone = self._partial / new_id("gone-")
        with suppress(FileNotFoundError):
            os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def waiting(lacks: str) -> Mistake:
    """Return the mistake that a batch shows while the server cannot write. lacks: as `core.lacking` has it."""
    return Mistake("storage_full", f"The batch waits, because the server has no room: {lacks}. It goes on by itself.")


def _expired(record: StoredFile) -> bool:
    return record.expires_at is not None and record.expires_at <= time.time()


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder), reverse=True)


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def _write(path: Path, value: object, *, new: bool = False) -> None:
    """Write a file that is there whole or not at all, whenever the machine stops. `new` raises FileExistsError if it is
    there already."""
    draft = path.with_name(new_id(f".{path.name}-"))
    try:
        with open(draft, "xb") as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            os.fsync(file.fileno())
        if new:
            os.link(draft, path)
        else:
            os.rename(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    _settle(path.parent)


def _settle(path: Path) -> None:
    """Wait until what was written to a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
