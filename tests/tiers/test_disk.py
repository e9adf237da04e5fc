"""The disk tier's promises one by one: privacy, durability, sharing, eviction, a full or slow disk."""

from __future__ import annotations

import logging
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.tiers.disk import DiskTier
from ridgeline.tiers.options import DiskOptions
from ridgeline.tiers.sealed import BlockName

MIB = 1 << 20
BLOCK = 32 << 10
QUIET = DiskOptions(period=0, readers=1, writers=1, segment_bytes=256 << 10)
NAMES = [BlockName(number.to_bytes(16, "little")) for number in range(400)]


def opened(folder: Path, options: DiskOptions = QUIET, *, identity: bytes = b"model", capacity: int = MIB) -> DiskTier:
    return DiskTier(folder, identity, capacity, options)


def content(number: int) -> bytes:
    return number.to_bytes(4, "little") * (BLOCK // 4)


def write(tier: DiskTier, number: int, tenant: str = "", cost: float = 0.0) -> bool:
    return tier.submit_write(NAMES[number], tenant, [content(number)], cost=cost).result()


def read(tier: DiskTier, number: int, tenant: str = "") -> bool:
    into = bytearray(BLOCK)
    found = tier.submit_read(NAMES[number], tenant, [into]).result()
    assert not found or into == content(number)
    return found


# ---- privacy --------------------------------------------------------------------------------------------------------


def test_directory_and_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        tier = opened(tmp_path / "new" / "kv")
        write(tier, 1)
    finally:
        os.umask(old)
    assert (tmp_path / "new" / "kv").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "new" / "kv").iterdir()} == {0o600}
    tier.close()


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o720, 0o702])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(InvalidConfig, match=f"open to other users.*{mode:04o}.*chmod 700"):
        opened(tmp_path / "kv")


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "kv").symlink_to(tmp_path / "there")
    with pytest.raises(InvalidConfig, match="it is a link"):
        opened(tmp_path / "kv")


def test_a_linked_or_open_key_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "kv").close()
    (tmp_path / "kv" / "key").chmod(0o640)
    with pytest.raises(InvalidConfig, match="not a private file"):
        opened(tmp_path / "kv")
    (tmp_path / "kv" / "key").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / "kv" / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidConfig, match="is not a private file"):
        opened(tmp_path / "kv")


def test_a_linked_segment_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened(tmp_path / "kv")
    write(tier, 1)
    tier.close()
    (segment,) = (tmp_path / "kv").glob("*.seg")
    segment.rename(tmp_path / "elsewhere")
    segment.symlink_to(tmp_path / "elsewhere")
    tier = opened(tmp_path / "kv")
    assert not read(tier, 1)
    assert sum("is left alone" in record.message for record in caplog.records) == 1
    tier.close()


@pytest.mark.parametrize("name", ["0123456789abcdef.own", "0123456789abcdef-00000001.seg"])
def test_a_folder_with_a_files_name_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv" / name).mkdir()
    for _ in range(2):
        tier = opened(tmp_path / "kv")
        assert write(tier, 1)
        tier.tick()
        assert read(tier, 1)
        tier.close()
    assert (tmp_path / "kv" / name).is_dir()


@pytest.mark.parametrize("name", ["0123456789abcdef.own", "0123456789abcdef-00000001.seg"])
@pytest.mark.parametrize("kind", ["link", "pipe", "socket"])
def test_what_is_no_file_with_a_files_name_stops_nothing(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    path = tmp_path / "kv" / name
    if kind == "link":
        path.symlink_to(tmp_path / "none")
    else:
        os.mknod(path, 0o600 | (stat.S_IFIFO if kind == "pipe" else stat.S_IFSOCK))
    for _ in range(2):
        tier = opened(tmp_path / "kv")
        assert write(tier, 1)
        tier.tick()
        assert read(tier, 1)
        tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", [".", "key"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, name: str) -> None:
    opened(tmp_path / "kv").close()
    os.chown(tmp_path / "kv" / name, 12345, 12345)
    with pytest.raises(InvalidConfig, match=r"belongs to user 12345|not a private file") as refused:
        opened(tmp_path / "kv")
    assert str(refused.value).endswith(".")


def test_a_directory_that_is_exchanged_for_a_link_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    tier = opened(tmp_path / "kv")
    (tmp_path / "kv").rename(tmp_path / "moved")
    (tmp_path / "kv").symlink_to(tmp_path / "elsewhere")
    assert write(tier, 1)
    assert read(tier, 1)
    tier.close()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_nothing_of_an_evicted_block_is_left_behind_a_shorter_one(tmp_path: Path) -> None:
    """Else it would outlive its tenant's purge."""
    tier, secret = opened(tmp_path / "kv"), b"of a conversation"
    for number in range(40):
        tier.submit_write(NAMES[number], "old", [secret * (BLOCK // len(secret))]).result()
    for number in range(40, 200):
        assert tier.submit_write(NAMES[number], "new", [bytes(BLOCK - 4000)]).result()
    held = sum(tier.contains(NAMES[number], "old") for number in range(40))
    tier.close()
    left = sum(file.read_bytes().count(secret) for file in (tmp_path / "kv").glob("*.seg"))
    assert left == held * (BLOCK // len(secret))


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_makes_a_block_of_other_bytes(tmp_path: Path, seed: int) -> None:
    """Flipped bits, cut files, exchanged pieces, and pieces of noise: a block is as it was written, or is not there."""
    draw, tier = random.Random(seed), opened(tmp_path / "kv")
    assert all(write(tier, number) for number in range(20))
    tier.close()
    for file in (tmp_path / "kv").glob("*.seg"):
        octets = bytearray(file.read_bytes())
        used = len(octets.rstrip(b"\0")) - 300
        for _ in range(30):
            a, b = draw.randrange(used), draw.randrange(used)
            if seed == 0:
                octets[a] ^= 1 << draw.randrange(8)
            elif seed == 1:
                octets[a : a + 256], octets[b : b + 256] = octets[b : b + 256], octets[a : a + 256]
            else:
                octets[a : a + 64] = draw.randbytes(64)
        file.write_bytes(octets[: draw.randrange(used)] if seed == 3 else octets)
    tier = opened(tmp_path / "kv")
    found = sum(read(tier, number) for number in range(20))  # which compares them
    tier.close()
    assert found < 20


def test_nothing_of_names_or_tenants_is_in_the_files(tmp_path: Path) -> None:
    tier, name = opened(tmp_path / "kv", identity=b"identity-of-this"), BlockName(b"sixteen bytes...", 3, 1)
    tier.submit_write(name, "tenant-of-this", [bytes(BLOCK)]).result()
    tier.close()
    everything = b"".join(file.name.encode() + file.read_bytes() for file in (tmp_path / "kv").iterdir())
    assert not any(word in everything for word in (b"sixteen bytes...", b"tenant-of-this", b"identity-of-this"))


def test_blocks_of_others_are_not_found(tmp_path: Path) -> None:
    tier = opened(tmp_path / "kv")
    write(tier, 1, "a")
    assert read(tier, 1, "a")
    assert not read(tier, 1, "b")
    assert not tier.submit_read(NAMES[1]._replace(rank=1), "a", [bytearray(BLOCK)]).result()
    tier.close()
    tier = opened(tmp_path / "kv", identity=b"model with other weights")
    assert not read(tier, 1, "a")
    tier.close()


# ---- eviction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "survives"), [("lru", {2, 3}), ("lfu", {1, 2}), ("cost", {3, 1})], ids=str)
def test_the_policy_decides_what_goes(tmp_path: Path, policy: str, survives: set[int]) -> None:
    """Of 0 to 3, the block 0 is used once, 1 three times, 2 twice and last but one, 3 once and last; 1 costs some, 3
    most. Two of them go."""
    block = 400 << 10
    tier = opened(tmp_path / "kv", DiskOptions(period=0, eviction=policy, writers=1), capacity=4 * block + (64 << 10))
    names = NAMES[:6]
    for number, cost in enumerate([1.0, 2.0, 0.1, 9.0]):
        assert tier.submit_write(names[number], "", [bytes(block)], cost=cost).result()
    for number in (0, 1, 1, 1, 2, 2, 3):
        assert tier.submit_read(names[number], "", [bytearray(block)]).result()
    for number in (4, 5):
        assert tier.submit_write(names[number], "", [bytes(block)], cost=20.0).result()
        for _ in range(5):  # what is new is used most and dearest, so that the old ones go
            tier.submit_read(names[number], "", [bytearray(block)]).result()
    assert {number for number in range(4) if tier.contains(names[number])} == survives
    assert tier.figures().evicted == 2
    tier.close()


def test_sizes_that_are_in_use_displace_others(tmp_path: Path) -> None:
    tier = opened(tmp_path / "kv")
    small, large = [bytes(4096)], [bytes(60_000)]
    for name in NAMES[:200]:
        tier.submit_write(name, "small", small).result()
    for name in NAMES[:200]:
        tier.submit_write(name, "large", large).result()
    assert not any(tier.contains(name, "small") for name in NAMES[:100])
    assert all(tier.contains(name, "large") for name in NAMES[195:200])
    tier.close()


def test_unknown_policy_and_tiny_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="one of lru, lfu, cost, got 'mru'"):
        opened(tmp_path / "kv", DiskOptions(eviction="mru"))
    with pytest.raises(InvalidConfig, match="at least 1048576 bytes, got 5"):
        opened(tmp_path / "kv", capacity=5)


# ---- processes ------------------------------------------------------------------------------------------------------


def test_two_processes_share_and_neither_starves(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "kv"), opened(tmp_path / "kv")
    assert write(first, 1)
    second.tick()
    assert read(second, 1)
    for number in range(60):
        write(first, number)
    for _ in range(8):
        first.tick()
        second.tick()
        for number in range(100, 110):
            write(second, number)
    assert second.figures().own_bytes > 0
    assert first.figures().own_bytes <= MIB // 2 + QUIET.segment_bytes, (
        "its share, and a file less than the others need"
    )
    assert sum(file.stat().st_size for file in (tmp_path / "kv").glob("*.seg")) <= MIB
    assert second.purge() > 0
    first.tick()
    assert first.figures().blocks == 0
    first.close()
    second.tick()
    assert second.figures().own_bytes > MIB // 2, "it adopts what the other left"
    second.close()


def test_a_process_that_knows_old_blocks_of_another_leaves_the_new_ones_alone(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "kv"), opened(tmp_path / "kv")
    written = 0
    while not first.figures().evicted:
        write(first, written)
        written += 1
    second.tick()
    old, new = range(1, written), range(100, 99 + written)
    for number in new:
        write(first, number)
    assert all(second.contains(NAMES[number]) for number in old)  # it has not looked again
    assert not any(read(second, number) for number in old)
    assert all(read(first, number) for number in new)
    assert first.figures().corrupt == second.figures().corrupt == 0
    first.close()
    second.close()


def run_child(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


OPEN = """
import resource, sys
from pathlib import Path
from tests.tiers.test_disk import BLOCK, DiskOptions, DiskTier, MIB, NAMES, opened, read, write
"""


def test_a_killed_process_leaves_what_it_flushed_and_nothing_wrong(tmp_path: Path) -> None:
    code = """
tier = opened(Path(sys.argv[1]), capacity=64 * MIB)
for number in range(50):
    write(tier, number)
tier.flush()
print("flushed", flush=True)
while True:
    for number in range(50, 400):
        tier.remove(NAMES[number])
        write(tier, number)
"""
    child = run_child(OPEN + code, tmp_path / "kv")
    assert child.stdout is not None
    assert child.stdout.readline() == "flushed\n"
    threading.Event().wait(0.1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    tier = opened(tmp_path / "kv", capacity=64 * MIB)
    assert all(read(tier, number) for number in range(50))
    assert any(read(tier, number) for number in range(50, 400))
    assert tier.figures().corrupt == 0
    tier.close()


def test_a_full_disk_stops_writes_and_not_reads(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the system refuses to write more."""
    code = """
import logging
tier = opened(Path(sys.argv[1]), DiskOptions(period=0, retry=1000, segment_bytes=256 << 10))
logging.basicConfig(stream=sys.stdout, format="%(message)s")
assert write(tier, 1)
soft = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, soft[1]))
assert not write(tier, 2) and not write(tier, 3)
assert read(tier, 1) and tier.figures().stopped and tier.figures().failed == 1
resource.setrlimit(resource.RLIMIT_FSIZE, soft)
assert not write(tier, 4)
tier._retry_at = 1e-9
assert write(tier, 5) and read(tier, 5) and not tier.figures().stopped
tier.close()
"""
    child = run_child(OPEN + code, tmp_path / "kv")
    told, _ = child.communicate(timeout=120)
    assert child.returncode == 0, told
    assert told.count("cannot be written to") == 1


# ---- a slow disk ----------------------------------------------------------------------------------------------------


def test_a_slow_disk_never_blocks_the_caller(tmp_path: Path) -> None:
    tier = opened(tmp_path / "kv", DiskOptions(period=0, writers=1, queue_bytes=4 * BLOCK))
    goes_on, written = threading.Event(), tier.files.write

    def slow(*call) -> None:
        goes_on.wait()
        written(*call)

    tier.files.write = slow  # type: ignore[method-assign]
    done = [tier.submit_write(NAMES[number], "", [content(number)]) for number in range(10)]
    assert [future.done() for future in done] == [False] * 4 + [True] * 6
    assert tier.figures().dropped == 6
    assert tier.figures().queued_bytes == 4 * BLOCK
    assert not tier.flush(timeout=0.01)
    tier.remove(NAMES[2])
    goes_on.set()
    assert tier.flush()
    assert [future.result() for future in done[:4]] == [True, True, False, True]
    assert [tier.contains(name) for name in NAMES[:5]] == [True, True, False, True, False]
    tier.close()
    assert not write(tier, 7)


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_damage_is_said_once_and_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened(tmp_path / "kv")
    for number in range(3):
        write(tier, number)
    (file,) = (tmp_path / "kv").glob("*.seg")
    data = bytearray(file.read_bytes())
    for number in range(2):
        at = data.index(content(number)[:64] * 2) if number else 4096 * 3
        data[at + 5] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        found = [read(tier, number) for number in range(3)]
    assert 1 <= found.count(False) <= 2
    assert sum("is damaged" in record.message for record in caplog.records) == 1
    assert all(write(tier, number) and read(tier, number) for number in range(3))
    tier.close()


def test_another_key_or_format_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in ("one", "two"):
        tier = opened(tmp_path / folder)
        write(tier, 1)
        tier.close()
    (file,) = (tmp_path / "one").glob("*.seg")
    file.rename(tmp_path / "two" / file.name)
    tier = opened(tmp_path / "two")
    tier.tick()
    assert tier.figures().blocks == 1
    assert sum("is left alone" in record.message for record in caplog.records) == 1
    tier.close()
