"""What travels on a signal channel's connections, without sockets: the handshake, and everything that must not pass."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.communication.signals.frames import FRAME_BYTES, KEY_BYTES, Identity, Kind, RefusedError, Session, seal

KEY = bytes(range(KEY_BYTES))
OTHER_KEY = KEY[::-1]


def caller(rank=0, generation=7, key=KEY, calls=1):
    return Session(Identity(rank, generation, key), calls=calls)


def listener(rank=1, generation=7, key=KEY, called_by=(0, 2)):
    return Session(Identity(rank, generation, key), called_by=frozenset(called_by))


def greeted():
    """Both ends of a connection whose handshake is done, and all frames that it took, in order."""
    a, b = caller(), listener()
    frames = []
    for speaks, hears in ((a, b), (b, a), (a, b)):
        frames.append(speaks.next_frame(0))
        hears.read(frames[-1])
    return a, b, frames


def test_handshake_and_signals_both_ways():
    """Three frames authenticate both ends; then each says each new state once, and nothing that the other told it."""
    a, b, frames = greeted()
    assert a.authenticated
    assert b.authenticated
    assert [len(frame) for frame in frames] == [FRAME_BYTES] * 3
    assert b.next_frame(0) is None
    b.read(a.next_frame(5))
    assert b.heard == 5
    assert a.next_frame(5) is None
    assert b.next_frame(5) is None
    a.read(b.next_frame(9))
    assert a.heard == 9
    assert a.next_frame(9) is None


def test_a_listener_says_nothing_before_a_valid_hello_and_no_signal_before_the_session_is_proved():
    """To strangers a listener is silent; to a HELLO it answers one WELCOME, whatever it has to tell."""
    b = listener()
    assert b.next_frame(3) is None
    b.read(caller().next_frame(0))
    assert b.next_frame(3)[4:8] == Kind.WELCOME.to_bytes(4, "big")
    assert b.next_frame(3) is None
    assert not b.authenticated


def test_any_portions():
    """Bytes may come one by one."""
    a, b, _ = greeted()
    for byte in a.next_frame(4):
        b.read(bytes([byte]))
    assert b.heard == 4


def test_older_state_changes_nothing():
    """A peer that knows of fewer rounds than it did before (never so, unless it errs) takes nothing back."""
    a, b, _ = greeted()
    b.read(a.next_frame(8))
    a._told = 0
    b.read(a.next_frame(3))
    assert b.heard == 8


WRONG = {
    "key": {"key": OTHER_KEY},
    "generation (another membership with the same key)": {"generation": 6},
    "receiver": {"calls": 3},
    "sender (not a neighbour that calls)": {"rank": 5},
    "sender (ourselves)": {"rank": 1},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_hello_refused(wrong):
    """A caller with the wrong key, membership, rank or peer is refused at its first frame, and gets no answer."""
    b = listener()
    with pytest.raises(RefusedError):
        b.read(caller(**wrong).next_frame(0))
    assert b.next_frame(5) is None
    assert b.peer is None


@pytest.mark.parametrize("frame", [0, 1, 2], ids=["HELLO", "WELCOME", "SIGNAL"])
def test_replay_in_another_connection(frame):
    """No recorded frame helps on a new connection of the same membership: a replayed HELLO is answered, to no avail."""
    _, _, recorded = greeted()
    if frame == 1:  # to a caller
        a = caller()
        a.next_frame(0)
        with pytest.raises(RefusedError):
            a.read(recorded[1])
        assert not a.authenticated
        return
    b = listener()
    if frame == 2:
        with pytest.raises(RefusedError):
            b.read(recorded[2])
        return
    b.read(recorded[0])
    assert b.next_frame(0) is not None
    with pytest.raises(RefusedError):
        b.read(recorded[2])
    assert not b.authenticated
    assert b.heard == -1


def test_replay_in_the_same_connection():
    """A frame played again, or before its turn, ends the connection."""
    a, b, _ = greeted()
    first, second = a.next_frame(1), a.next_frame(2)
    with pytest.raises(RefusedError, match="left out"):
        b.read(second)
    a, b, _ = greeted()
    first = a.next_frame(1)
    with pytest.raises(RefusedError, match="twice"):
        b.read(first + first)
    assert b.heard == 1


def test_reflection():
    """A rank's own frames, sent back to it, are refused: the header has the direction."""
    a, b, _ = greeted()
    with pytest.raises(RefusedError):
        a.read(a.next_frame(6))
    with pytest.raises(RefusedError):
        b.read(b.next_frame(6))
    assert a.heard == 0 or a.heard == -1


def test_frames_of_another_membership_in_a_running_connection():
    """A signal sealed with another membership's key, or for another generation, changes nothing and ends it."""
    for key, generation in ((OTHER_KEY, 7), (KEY, 6), (KEY, 8)):
        _, b, _ = greeted()
        frame = seal(key, Kind.SIGNAL, 0, 1, generation, (1).to_bytes(8, "big") + (99).to_bytes(8, "big"))
        with pytest.raises(RefusedError):
            b.read(frame)
        assert b.heard == 0


@settings(derandomize=True, max_examples=400, deadline=None)
@given(at=st.integers(0, FRAME_BYTES - 1), flip=st.integers(1, 255), which=st.integers(0, 3))
def test_every_bit_counts(at, flip, which):
    """One changed byte, anywhere in any frame, and it is refused."""
    a, b = caller(), listener()
    for index, (speaks, hears) in enumerate(((a, b), (b, a), (a, b), (a, b))):
        frame = bytearray(speaks.next_frame(index))
        if index == which:
            frame[at] ^= flip
            before = hears.heard
            with pytest.raises(RefusedError):
                hears.read(bytes(frame))
            assert hears.heard == before
            return
        hears.read(bytes(frame))


def test_ten_thousand_wrong_messages():
    """10,000 malformed, forged, recorded, mixed and cut messages: none is heard, and memory is bounded."""
    chance = random.Random(1)
    a, b, recorded = greeted()
    recorded += [a.next_frame(rounds) for rounds in range(1, 20)]
    recorded += [b.next_frame(rounds) for rounds in range(1, 20)]
    refused = 0

    def forged():
        key = chance.choice([OTHER_KEY, chance.randbytes(KEY_BYTES)])
        ranks = chance.choice([0, 1, 2, 2**32 - 1]), chance.choice([0, 1, 2])
        return seal(key, chance.choice(list(Kind)), *ranks, chance.choice([6, 7, 8]), chance.randbytes(16))

    def changed():
        frame = bytearray(chance.choice(recorded))
        frame[chance.randrange(FRAME_BYTES)] ^= chance.randrange(1, 256)
        return bytes(frame)

    makers = [
        lambda: chance.randbytes(chance.randrange(1, 300)),
        lambda: chance.choice(recorded)[: chance.randrange(1, FRAME_BYTES)] + chance.randbytes(chance.randrange(64)),
        lambda: chance.choice(recorded),
        forged,
        changed,
    ]
    ends = {"fresh listener": listener, "greeted": lambda: greeted()[1], "calling": caller}
    sessions = {name: make() for name, make in ends.items()}
    for _ in range(10_000):
        name = chance.choice(list(ends))
        session = sessions[name]
        authenticated, heard = session.authenticated, session.heard
        try:
            session.read(chance.choice(makers)())
        except RefusedError:
            refused += 1
            sessions[name] = ends[name]()
        assert session.authenticated == authenticated
        assert session.heard == heard
        assert len(session._unread) < FRAME_BYTES + 300
    assert refused > 5000
