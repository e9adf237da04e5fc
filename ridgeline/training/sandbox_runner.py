"""The program of a worker's server: for each program it forks a process that runs it, and ends all that this began. It
imports nothing of this package.

    server                          first process of a namespace        the code
    ──────                          ────────────────────────────        ────────
    clones it with a new       ───► drops its capability, forks,   ───► limits, filter of system calls,
    process namespace               waits                               reads the source, answers calls
    kills it, waits: the kernel ends all processes of the namespace

Modules that programs often import are there before they are forked. A program cannot see its server: the server's
socket is closed, its memory is a copy, and its process is in no namespace of the program. Server and programs share
what cannot be written, and no IPC: its calls are refused.
"""

PROGRAM = r"""
import ctypes, gc, json, os, resource, signal, socket, struct, sys
import bisect, collections, copy, dataclasses, datetime, decimal, enum, fractions, functools, heapq, itertools, math
import operator, random, re, string, textwrap, time, typing, unicodedata

given = json.loads(sys.argv.pop())
libc = ctypes.PyDLL(None, use_errno=True)
NEWPID = 0x20000000


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def ends_with_parent():
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)


def drop_capabilities():
    header = struct.pack("Ii", 0x20080522, 0)
    check(libc.capset(ctypes.create_string_buffer(header, 8), ctypes.create_string_buffer(24)))


def filter_calls():
    # Classic BPF over (number, architecture, arguments): new processes end this one, other ways out fail
    #   ptrace, mount, umount2, unshare, setns, process_vm_*, socket*, pivot_root, chroot, keys, bpf, perf_event_open,
    #   userfaultfd, migrate_pages, move_pages, System V and POSIX queues, clone3; alike: io_uring, pidfd_*, process_*
    arch, forks, clone, denied = {
        "x86_64": (0xC000003E, (57, 58), 56, (
            101, 165, 166, 272, 308, 310, 311, 41, 53, 155, 161, 248, 249, 250, 321, 298, 323, 256, 279, 29, 30, 64, 68,
            240, 435,
        )),
        "aarch64": (0xC00000B7, (), 220, (
            117, 40, 39, 97, 268, 270, 271, 198, 199, 41, 51, 217, 218, 219, 280, 241, 282, 238, 239, 194, 196, 190,
            186, 180, 435,
        )),
    }[given["machine"]]
    denied += (425, 426, 427, 434, 438, 440, 448)
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


def limit(bounds):
    for name, value in (
        ("AS", bounds["memory"]), ("CPU", bounds["cpu_seconds"]), ("CORE", 0), ("FSIZE", 0),
        ("NOFILE", bounds["files"]), ("NPROC", 66 if given["isolated"] else None), ("STACK", 8 << 20),
        ("MSGQUEUE", 0), ("MEMLOCK", 0),
    ):
        if value is not None:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))


def tell(answers, number, value):
    data = (json.dumps({"number": number, "value": value}, allow_nan=False) + "\n").encode()
    while data:
        data = data[os.write(answers, data):]


def answer(bounds, source, answers):
    # What is printed goes nowhere: the first three descriptors are /dev/null of the launcher
    limit(bounds)
    check(libc.prctl(38, 1, 0, 0, 0))
    if given["isolated"]:
        filter_calls()
    questions = os.fdopen(source, "rb")
    first = json.loads(questions.readline())
    names = {"__name__": "solution", "__builtins__": __builtins__}
    exec(compile(first["source"], "solution", "exec"), names)
    function = names[first["entry"]]
    tell(answers, first["number"], True)
    for line in questions:
        asked = json.loads(line)
        tell(answers, asked["number"], function(*asked["arguments"]))


def begun(control, bounds, ends):
    if given["isolated"]:
        number = {"x86_64": 56, "aarch64": 220}[given["machine"]]
        child = libc.syscall(number, ctypes.c_long(NEWPID | signal.SIGCHLD), *[ctypes.c_long(0)] * 4)
        check(child)
    else:
        child = os.fork()
    if child:
        return child
    try:
        control.close()
        os.setsid()  # a signal to a program's own group must not reach the server and its launcher
        if given["isolated"]:
            drop_capabilities()
            ends_with_parent()
            if code := os.fork():
                for each in ends:
                    os.close(each)
                os.waitpid(code, 0)
                os._exit(0)
        ends_with_parent()
        answer(bounds, *ends)
    except BaseException:
        pass
    finally:
        os._exit(0)


def ended(child):
    if not given["isolated"]:
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def serve():
    control = socket.socket(fileno=given["control"])
    gc.collect()
    gc.freeze()
    child = None
    while True:
        message, ends, _, _ = socket.recv_fds(control, 4096, 2)
        if not message:
            os._exit(0)  # and with it all of its namespaces
        if child is not None:
            ended(child)
            child = None
        if ends:
            child = begun(control, json.loads(message), ends)
            for each in ends:
                os.close(each)
        control.send(b"done")


if given["isolated"]:
    ends_with_parent()
serve()
"""
