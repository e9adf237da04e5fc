"""A connection between leader and rank: what one thread does says nothing of how long another waits, and an end that
does not read is not an end that is gone."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from ridgeline.ranks import rank
from ridgeline.ranks.channel import Channel, Closed
from ridgeline.ranks.messages import Alive, Begin, decode_from_rank, encode

ROUNDS = 20
LIMIT = 0.02  # seconds; a wait that takes it over from a sending thread ends within a round


def test_a_wait_for_ever_is_not_ended_by_another_threads_send() -> None:
    """A rank's threads: one waits for plans, another sends a result as soon as there is a plan."""
    ours, theirs = socket.socketpair()
    leader, own = Channel(ours, 30.0), Channel(theirs, LIMIT)
    plans, received = threading.Semaphore(0), list[bytes | None]()

    def collect() -> None:
        for _ in range(ROUNDS):
            plans.acquire()
            own.send(b"result")

    def take() -> None:
        for _ in range(ROUNDS):
            received.append(own.receive(None))
            plans.release()

    threads = [threading.Thread(target=each, daemon=True) for each in (collect, take)]
    for thread in threads:
        thread.start()
    for _ in range(ROUNDS):
        leader.send(b"plan")
        assert leader.receive(10.0) == b"result"
        time.sleep(2 * LIMIT)
    for thread in threads:
        thread.join()
    assert received == [b"plan"] * ROUNDS


def test_a_frame_larger_than_the_sockets_buffer_arrives_whole() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, 10.0), Channel(theirs, None)
    frames = [os.urandom(size) for size in (0, 1, 3_000_000, 7)]
    thread = threading.Thread(target=lambda: [sender.send(frame) for frame in frames])
    thread.start()
    assert [receiver.receive(None) for _ in frames] == frames
    thread.join()
    assert receiver.receive(0) is None


def test_an_end_that_leaves_messages_unread_for_too_long_is_closed() -> None:
    ours, _theirs = socket.socketpair()
    with pytest.raises(Closed):
        Channel(ours, LIMIT).send(bytes(3_000_000))


def test_a_rank_waits_for_a_leader_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader reads when it wants a result. Until then signs of life fill the socket's buffer, in five minutes."""
    ended = threading.Event()

    def end(code: int) -> None:
        ended.set()
        threading.Event().wait()  # as the real one, it does not return

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(rank, "BEAT", 0.0001)
    monkeypatch.setattr(rank, "SEND_LIMIT", 0.2, raising=False)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    assembling = threading.Event()

    def assemble(*_: object) -> None:
        assembling.set()
        threading.Event().wait()  # for ever: a rank that goes on would end this process

    thread = threading.Thread(target=rank.run, args=(theirs.detach(), assemble), daemon=True)
    thread.start()
    leader = Channel(ours, 10.0)
    leader.send(encode(Begin(0, 2, "nowhere", 1.0, {})))
    assert assembling.wait(10.0)
    assert not ended.wait(1.0), "the rank takes an idle leader to be gone"
    for _ in range(100):
        frame = leader.receive(10.0)
        assert frame is not None
        assert decode_from_rank(frame) == Alive()
    leader.close()
    assert ended.wait(10.0), "the rank outlives its leader"
