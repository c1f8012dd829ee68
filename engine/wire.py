"""The frames between server and engine: what each says, and how it becomes bytes.

One local stream socket carries both directions. A frame is a little-endian uint32 length and a msgpack body; the
body is an array whose first item names the frame. The payload types are those of engine.types, encoded as they are:
measured, one update costs about 0.3 µs to encode and 0.4 µs to decode, so a second, compact form of each type would
save less than one per cent of a core at 400 frames of 64 updates a second.
"""

from __future__ import annotations

import signal
import struct
from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.constraints.vocabulary import Vocabulary
from engine.core.plan import SeqId
from engine.errors import EngineError
from engine.types import CacheBranch, EngineInfo, GenerationRequest, LoadProgress, RequestUpdate, StepStats

MAX_FRAME_BYTES = 1 << 30
DUMP_SIGNAL = signal.SIGUSR1  # makes the engine write the stacks of its threads to stderr, even while it hangs

_LENGTH = struct.Struct("<I")


class WireError(EngineError):
    """The other side sent bytes that are no frame."""


# --- server → engine -------------------------------------------------------------------------------------------------


class Configure(msgspec.Struct, frozen=True, array_like=True, tag="configure"):
    """The first frame: what to load. `life` counts the engine processes of this client from 1."""

    config: EngineConfig
    life: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Take this request; each of its choices will end in exactly one terminal update."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End one choice, or all choices of a request; those that have ended already are none of this frame's business."""

    request_id: int
    choice_index: int | None = None  # None = all


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answer with a Pong of this number between two steps."""

    number: int


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag="reset_prefix_cache"):
    """Forget all cached prefixes that nobody references."""


class LookAtCache(msgspec.Struct, frozen=True, array_like=True, tag="look_at_cache"):
    """Answer with CacheBranches between two steps."""

    max_branches: int


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag="start_profile"):
    """Note what the next so many steps do; what has been noted so far is forgotten."""

    max_steps: int


class StopProfile(msgspec.Struct, frozen=True, array_like=True, tag="stop_profile"):
    """Answer with a Profiled between two steps."""


class UseVocabulary(msgspec.Struct, frozen=True, array_like=True, tag="use_vocabulary"):
    """The tokenizer by which constraints are matched; before the first request that has one."""

    vocabulary: Vocabulary


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Exit 0 after the step that runs."""


Command = (
    Configure
    | Submit
    | Abort
    | Ping
    | ResetPrefixCache
    | LookAtCache
    | StartProfile
    | StopProfile
    | UseVocabulary
    | Shutdown
)


# --- engine → server -------------------------------------------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """News of the start; each one restarts the clock of the start's time limit."""

    progress: LoadProgress


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Requests may be sent."""

    info: EngineInfo


class StepBegun(msgspec.Struct, frozen=True, array_like=True, tag="step_begun"):
    """A step starts to run. If no StepDone follows, these sequences are the suspects."""

    step_id: int
    seq_ids: tuple[SeqId, ...]
    num_tokens: tuple[int, ...]  # that each of them runs
    admitted: tuple[SeqId, ...] = ()  # of them, those that are new or have come back
    forgotten: tuple[SeqId, ...] = ()  # those that have ended or were preempted since the step before
    blocks_copied: int = 0  # on write
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag="step_done"):
    """A step has run: all its news in one frame."""

    updates: tuple[RequestUpdate, ...]
    stats: StepStats


class News(msgspec.Struct, frozen=True, array_like=True, tag="news"):
    """What changed without a step: refusals, aborts, a cache that was reset; the state after it, in `stats`."""

    updates: tuple[RequestUpdate, ...]
    stats: StepStats


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    number: int


class CacheBranches(msgspec.Struct, frozen=True, array_like=True, tag="cache_branches"):
    """The largest branches of the prefix cache's tree, parents before children."""

    branches: tuple[CacheBranch, ...]


class Profiled(msgspec.Struct, frozen=True, array_like=True, tag="profiled"):
    """What has been noted since StartProfile: Chrome's Trace Event JSON."""

    trace: bytes


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The last frame: the engine cannot go on, and why."""

    kind: Literal["config", "model", "internal"]
    message: str


Event = Loading | Ready | StepBegun | StepDone | News | Pong | CacheBranches | Profiled | Fatal


# --- bytes -----------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_event_decoder = msgspec.msgpack.Decoder(Event)


def encode(frame: Command | Event) -> bytes:
    """A frame with its length in front."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def decode_command(body: bytes) -> Command:
    """Raises WireError."""
    try:
        return _command_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a command: {error}") from error


def decode_event(body: bytes) -> Event:
    """Raises WireError."""
    try:
        return _event_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not an event: {error}") from error


class FrameSplitter:
    """Cuts a stream of bytes into frame bodies, however the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The bodies completed by these bytes, in order. Raises WireError if a length cannot be true."""
        buffer = self._buffer
        buffer += data
        bodies = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return bodies
