"""The program that makes namespaces, a root of its own, and becomes the server of a worker. It imports nothing of this
package, and knows nothing of what is expected.

The root is an empty file system in memory with Python's folders and the system's libraries bound to it. All of it is
read-only. There is no /proc, /dev, /tmp or home. The server keeps one capability, with which it makes the process
namespace of each program; programs have none.
"""

PROGRAM = r"""
import ctypes, json, os, signal, struct, sys

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


def keep_one_capability():
    kept = 1 << 21  # CAP_SYS_ADMIN, in the new user namespace alone
    header, sets = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, kept, 0, 0, 0)
    check(libc.capset(ctypes.create_string_buffer(header, 8), ctypes.create_string_buffer(sets, 24)))
    check(libc.prctl(47, 2, 21, 0, 0))  # it outlives the next program's start


def serve():
    python, told = given["python"], {name: given[name] for name in ("isolated", "machine", "control")}
    os.execve(python, [python, "-I", "-S", "-c", given["server"], json.dumps(told)], {})


if given["isolated"]:
    isolate()
    keep_one_capability()
    if first := os.fork():
        os.close(given["control"])
        os.waitpid(first, 0)
        os._exit(0)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # it ends with this process
os.set_inheritable(given["control"], True)
serve()
"""
