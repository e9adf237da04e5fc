"""`ridgeline kv`: the blocks that a directory on a disk holds, listed, checked and purged."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import typer

from ridgeline.core.errors import InvalidConfig
from ridgeline.progress import counted
from ridgeline.tiers.offline import Inspected
from ridgeline.tiers.sealed import BlockRecord

ANSWER = 10.0  # seconds
HELD = ("none", "one", "two", "more")
SHOWN = 20  # models and tenants of `stats`

app = typer.Typer(help="Look into the KV cache: that of a running server (--url), or a directory on a disk.")
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Directory that servers keep blocks in.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@app.callback(invoke_without_command=True)
def live(
    context: typer.Context,
    *,
    url: Annotated[str | None, typer.Option(help="A running server, as http://HOST:PORT.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="RIDGELINE_ADMIN_KEY", help="Key of that server's operator.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look into the KV cache: that of a running server (--url), or a directory on a disk."""
    if context.invoked_subcommand is not None:
        return
    if url is None:
        print(context.get_help())
        raise typer.Exit
    caches = _asked(url, admin_key)
    if as_json:
        print(json.dumps({"caches": caches}))
        return
    try:
        print("\n".join(line for number, cache in enumerate(caches) for line in _told(number, cache)))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidConfig(f"{url} answers as another version of Ridgeline ({error!r}).") from error


class _NoRedirects(HTTPRedirectHandler):
    """A redirect is an error: another server would get the admin key."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _asked(url: str, key: str | None) -> list[dict[str, Any]]:
    try:
        known = urlsplit(url).scheme in ("http", "https")
    except ValueError:
        known = False
    if not known:
        raise InvalidConfig(f"--url must be as http://HOST:PORT, got {url!r}.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with build_opener(_NoRedirects).open(
            Request(url.rstrip("/") + "/kv", headers=headers), timeout=ANSWER
        ) as answer:
            found: list[dict[str, Any]] = json.load(answer)["caches"]
            return found
    except HTTPError as error:
        why = "; give its --admin-key" if error.code in (401, 403) else ""
        raise InvalidConfig(f"{url} answered {error.code} {error.reason}{why}.") from error
    except (OSError, ValueError, KeyError, TypeError, HTTPException) as error:
        raise InvalidConfig(f"{url} does not answer as a server of Ridgeline ({error}).") from error


def _told(number: int, cache: dict[str, Any]) -> Iterator[str]:
    yield (
        f"cache {number}: pages of {_size(cache['page_bytes'])}: {cache['busy']} busy, {cache['idle']} idle, "
        f"{cache['fresh']} fresh; {cache['hit_tokens']} of {cache['queried_tokens']} prompt tokens were found"
    )
    for group in cache["groups"]:
        yield (
            f"  {group['name']}: blocks of {_size(group['bytes'])}: {group['held']} held, {group['kept']} kept, "
            f"{group['empty']} empty, {100 * group['waste']:.1f} % waste; {group['hit_tokens']} tokens found"
        )
    yield f"  prefix tree: {cache['nodes']} blocks, of which {cache['sampled']} were looked at"
    for depth, count in enumerate(cache["depths"]):
        yield f"    {1 << depth} to {(2 << depth) - 1} blocks deep: {count}"
    for held, count in zip(HELD, cache["heat"], strict=True):
        yield f"    held by {held} of the requests: {count}"
    for root, count in cache["roots"].items():
        yield f"    root {root}: {count}"
    for owner, blocks in cache["owners"].items():
        yield f"  owner {owner or '(none)'}: {blocks} blocks held"
    for tier in cache["tiers"]:
        yield from _told_below(tier)


def _told_below(tier: dict[str, Any]) -> Iterator[str]:
    where = "in the host's memory" if tier["name"] == "host" else "on the disk"
    blocks = ", ".join(f"{count} {name}" for name, count in tier["blocks"].items())
    room = f"{_size(tier['used'])} of {_size(tier['bytes'])}"
    yield f"  below, {where}: {room}; blocks: {blocks}; {tier['held']} on their way"
    for held, count in zip(HELD, tier["heat"], strict=False):
        yield f"    held by {held} of the requests: {count}"
    for root, count in tier["roots"].items():
        yield f"    root {root}: {count}"
    for owner, count in tier["owners"].items():
        yield f"    owner {owner or '(none)'}: {count} blocks come up"


@app.command("list")
def list_blocks(
    directory: Folder,
    *,
    limit: Annotated[int, typer.Option(min=0, help="Blocks listed, the newest first (0: all).")] = 100,
    as_json: AsJson = False,
) -> None:
    """List blocks: when each was written, its bytes, and keyed names of block, tenant and model. Nothing of what they
    hold is shown."""
    inspected = Inspected(directory)
    found = sorted((block.record for block in inspected.blocks()), key=lambda record: -record.written)
    inspected.close()
    rows = [_row(record) for record in found[: limit or None]]
    if as_json:
        print(json.dumps({"blocks": rows, "of": len(found)}))
        return
    print(f"{'written':20} {'bytes':>12} {'expires':20} {'model':8} {'tenant':8} block")
    for row in rows:
        written, expires = (_date(row[name]) for name in ("written", "expires"))
        print(f"{written:20} {row['bytes']:12} {expires:20} {row['model']:8} {row['tenant']:8} {row['block']}")
    print(f"{len(rows)} of {len(found)} blocks.")


def _row(record: BlockRecord) -> dict[str, float | int | str]:
    return {
        "written": record.written,
        "bytes": record.length,
        "expires": record.expires,
        "model": record.identity.hex()[:8],
        "tenant": record.tenant.hex()[:8],
        "block": record.tag.hex(),
    }


def _date(seconds: float | int | str) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(seconds))) if seconds else "never"


@app.command()
def stats(directory: Folder, *, as_json: AsJson = False) -> None:
    """Count blocks and bytes, by model and by tenant, and the processes that use the directory now."""
    inspected = Inspected(directory)
    found = inspected.contents(time.time())
    inspected.close()
    if as_json:
        print(json.dumps(vars(found)))
        return
    print(f"{found.blocks} blocks of {_size(found.bytes)} in {found.files} files of {_size(found.file_bytes)}")
    print(f"on the disk: {_size(found.disk_bytes)}; expired: {found.expired}; damaged records: {found.damaged}")
    print(f"processes that use it now: {found.servers}")
    for title, sizes in (("model", found.models), ("tenant", found.tenants)):
        for name, size in sizes.most_common(SHOWN):
            print(f"{title} {name}: {_size(size)}")
    for name, why in found.foreign.items():
        print(f"{name} is no file of this store: {why}")


@app.command()
def verify(directory: Folder, *, as_json: AsJson = False) -> None:
    """Read every block and check that it is what was written. Exit code 1 if one is damaged; a server would compute
    that again."""
    inspected, sound, size, bad = Inspected(directory), 0, 0, list[str]()
    total = sum(1 for _ in inspected.blocks())
    with counted() as progress:
        task = progress.add_task("checking", total=total)
        for (segment, slot, record), holds in inspected.verify():
            sound, size = sound + holds, size + record.length
            bad += [] if holds else [f"{segment.name} slot {slot}"]
            progress.advance(task)
    bad += [f"{name}: {why}" for name, why in inspected.foreign.items()]
    damaged = inspected.damaged
    inspected.close()
    if as_json:
        print(json.dumps({"sound": sound, "bytes": size, "damaged": bad, "damaged_records": damaged}))
    else:
        for text in bad:
            print(f"damaged: {text}")
        print(f"{sound} blocks are sound, {len(bad) + damaged} damaged; {_size(size)} were read.")
    if bad or damaged:
        raise typer.Exit(1)


@app.command()
def purge(
    directory: Folder,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All blocks, of all tenants and models.")] = False,
    tenant: Annotated[
        str | None, typer.Option(help='Blocks of this tenant (a cache salt; "" is that of none).')
    ] = None,
    expired: Annotated[bool, typer.Option("--expired", help="Blocks whose time is over.")] = False,
    older: Annotated[float | None, typer.Option(min=0, help="Blocks written more than so many seconds ago.")] = None,
) -> None:
    """Erase blocks, and give their bytes back to the disk. Servers may run meanwhile: they compute these blocks
    again."""
    if (everything, tenant is not None, expired, older is not None).count(True) != 1:
        raise InvalidConfig("name what to purge: one of --all, --tenant, --expired and --older.")
    inspected, now = Inspected(directory, writes=True), time.time()
    owner = None if tenant is None else inspected.keys.tenant(tenant)

    def wanted(record: BlockRecord) -> bool:
        if owner is not None:
            return record.tenant == owner
        return everything or (record.expired(now) if older is None else record.written < now - older)

    count, size = inspected.purge(wanted)
    files = inspected.remove_files() if everything else 0
    inspected.close()
    print(f"{count} blocks of {_size(size)} were erased" + (f", and {files} files removed." if everything else "."))


def _size(size: float) -> str:
    units = iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
