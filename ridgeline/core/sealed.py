"""A filter of system calls for a process that needs nothing more of the system than memory and the files it has open.

The filter is a list of the calls that are left (seccomp of Linux, in classic BPF). Every other call fails with EPERM:
there is no network, no file is opened, and no process or thread starts. The filter cannot be taken off.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

# Numbers of the kernel's tables for x86_64 and for aarch64; None: the architecture has no such call.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "close": (3, 57), "fstat": (5, 80), "newfstatat": (262, 79), "lseek": (8, 62), "fcntl": (72, 25), "dup": (32, 23),
    "poll": (7, None), "ppoll": (271, 73), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "madvise": (28, 233), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "futex": (202, 98), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "getpid": (39, 172), "gettid": (186, 178), "getrusage": (98, 165),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261), "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "gettimeofday": (96, 169), "times": (100, 153),
    "getrandom": (318, 278), "sysinfo": (99, 179), "uname": (63, 160), "restart_syscall": (219, 128),
    "exit": (60, 93), "exit_group": (231, 94), "membarrier": (324, 283), "rseq": (334, 293),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, GIVE = 0x20, 0x15, 0x06
KILL, REFUSE, ALLOW = 0x80000000, 0x50000 | 1, 0x7FFF0000  # REFUSE with EPERM


def seal() -> None:
    """Leave this process the system calls of CALLS alone. Raise OSError if the kernel refuses, and RuntimeError on
    another system or architecture than those known here."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        raise RuntimeError(f"processes cannot be sealed on {sys.platform} with {platform.machine()}")
    program = filter_of(platform.machine())
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    kept = ctypes.create_string_buffer(described, len(described))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0), (SET_SECCOMP, FILTER, ctypes.c_void_p(ctypes.addressof(kept)))):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def filter_of(machine: str) -> bytes:
    """Return the filter for a machine, eight bytes an instruction."""
    column, architecture = ARCHITECTURES[machine]
    numbers = sorted(number for row in CALLS.values() if (number := row[column]) is not None)
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        program.append((EQUAL, left, 0, number))  # to ALLOW, which stands behind REFUSE
    program += [(GIVE, 0, 0, REFUSE), (GIVE, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *each) for each in program)
