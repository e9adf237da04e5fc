"""The program that makes namespaces, a root of its own and limits, and becomes the one that runs the code. It imports
nothing of this package, and knows nothing of what is expected.

The root is an empty file system in memory with Python's folders and the system's libraries bound to it. All of it is
read-only. There is no /proc, /dev, /tmp or home.
"""

PROGRAM = r"""
import ctypes, json, os, resource, signal, struct, sys

given = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
# User, mounts, network, processes, System V memory, host name
NAMESPACES = 0x10000000 | 0x20000 | 0x40000000 | 0x20000000 | 0x8000000 | 0x4000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
LOCKED = NOSUID | NODEV | 8 | 1024 | 2048 | (1 << 21)  # flags that a remount may not drop


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source, target, kind, flags):
    data = b"size=1m,mode=755" if kind == "tmpfs" else None
    check(libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data))


def bound(path, root):
    target = root + path
    os.makedirs(target, exist_ok=True)
    mount(path, target, None, BIND | REC)
    mount("none", target, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV | os.statvfs(target).f_flag & LOCKED)


def isolate():
    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(NAMESPACES))
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    mount("none", "/", None, REC | PRIVATE)
    root = given["root"]
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV)
    wanted = [path for path in given["prefixes"] if not path.startswith("/usr/") and path != "/usr"]
    for path in ("/usr", "/lib", "/lib64", "/lib32"):
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            bound(path, root)
    for path in wanted:
        if path != "/":
            bound(path, root)
    os.chdir(root)
    pivot = {"x86_64": 155, "aarch64": 41}[given["machine"]]
    check(libc.syscall(pivot, b".", b"."))
    check(libc.umount2(b".", 2))
    os.chdir("/")
    mount("none", "/", None, REMOUNT | RDONLY | NOSUID | NODEV)


def filter_calls():
    # Classic BPF over (number, architecture, arguments): new processes end this one, other ways out fail
    arch, forks, clone, denied = {
        "x86_64": (0xC000003E, (57, 58), 56, (101, 165, 166, 272, 308, 310, 311, 41, 53, 155, 161, 250, 435)),
        "aarch64": (0xC00000B7, (), 220, (117, 40, 39, 97, 268, 270, 271, 198, 199, 41, 51, 219, 435)),
    }[given["machine"]]
    load, jump, jset, give = 0x20, 0x15, 0x45, 0x06
    KILL, ERROR, ALLOW = 0x80000000, 0x50000 | 1, 0x7FFF0000
    program = [(load, 0, 0, 4), (jump, 1, 0, arch), (give, 0, 0, KILL), (load, 0, 0, 0)]
    for number in forks:
        program += [(jump, 0, 1, number), (give, 0, 0, KILL)]
    for number in denied:
        program += [(jump, 0, 1, number), (give, 0, 0, ERROR if number != 435 else 0x50000 | 38)]
    # Threads share the process; clone without CLONE_THREAD makes another one
    program += [(jump, 0, 4, clone), (load, 0, 0, 16), (jset, 1, 0, 0x10000), (give, 0, 0, KILL), (give, 0, 0, ALLOW)]
    program += [(jset, 0, 1, 0x40000000), (give, 0, 0, KILL)] if given["machine"] == "x86_64" else []
    program += [(give, 0, 0, ALLOW)]
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    kept = ctypes.create_string_buffer(described, len(described))
    check(libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(kept)), 0, 0))


def limit():
    for name, value in (
        ("AS", given["memory"]), ("CPU", given["cpu_seconds"]), ("CORE", 0), ("FSIZE", 0), ("NOFILE", given["files"]),
        ("NPROC", 64 if given["isolated"] else None), ("STACK", 8 << 20), ("MSGQUEUE", 0), ("MEMLOCK", 0),
    ):
        if value is not None:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))


def ends_with_parent():
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)


def run():
    ends_with_parent()
    limit()
    check(libc.prctl(38, 1, 0, 0, 0))
    if given["isolated"]:
        filter_calls()
    os.execve(given["python"], [given["python"], "-I", "-S", "-c", given["runner"]], {})


def waiting(child):
    os.close(0), os.close(1)
    os.waitpid(child, 0)
    os._exit(0)


if given["isolated"]:
    isolate()
    first = os.fork()
    if first:
        waiting(first)
    ends_with_parent()
    second = os.fork()
    if second:
        waiting(second)
run()
"""
