"""What passes between the server and the engine's process: requests one way, new tokens the other.

Plain data: neither numpy nor an engine is imported here. Types are what :mod:`runtime.wire.codec` accepts. No message
holds a reading of a clock: the two ends may run on machines with different ones. Times are durations and ages.
Dataclasses have slots: without them msgspec leaves out what it has itself filled in by default.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from tapeout.errors import RequestError

Seconds = Annotated[float, Meta(ge=0, le=1e300)]  # neither NaN nor infinite
Times = Annotated[float, Meta(ge=0, le=1e300)]  # of how many times as much
Logprob = Annotated[float, Meta(le=1.0)]  # in nats; of a token that cannot come it is infinite, never NaN
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
Pool = Literal["mixed", "prefill", "decode"]  # all of a request, its prompt up to the first token, or what follows
ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
# Of the 32 of a sha256 that pass over the wire to route by. The engine itself finds state by whole keys, so two that
# begin alike could only mislead a choice; that any do in a fleet of 2**24 blocks has a chance of 2**-81.
KEY_BYTES = 16
MOST_KEYS = 4096  # that came, and as many that went, in one report
WHOLE_KEY_BYTES = 32  # where state is found by it
MOST_STATE_BYTES = 1 << 27  # of one block or snapshot
CHECKSUM_BYTES = 16
LARGEST = sys.float_info.max  # a whole number can be larger, and is no float then
REPETITION_PENALTIES = (1e-9, 1e9)  # beyond them logits overflow float32


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How one request turns logits into tokens. The defaults are greedy decoding.

    ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``repetition_penalty`` 1 and the other penalties 0 switch them off.
    ``logit_bias``: added to the logits of these tokens. ``seed`` None draws the seed from the operating system.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None

    def __post_init__(self) -> None:
        lowest, highest = REPETITION_PENALTIES
        valid = {
            "temperature": (0 <= self.temperature <= LARGEST, "a finite number of at least 0 (0 is greedy)"),
            "top_k": (0 <= self.top_k < 1 << 63, "at least 0 (0 keeps every token), and below 2**63"),
            "top_p": (0 <= self.top_p <= 1, "between 0 and 1 (0 is greedy)"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "between -2 and 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            "repetition_penalty": (lowest <= self.repetition_penalty <= highest, "1e-9 to 1e9 (1 is no penalty)"),
            "logit_bias": (all(-100 <= bias <= 100 for bias in self.logit_bias.values()), "between -100 and 100"),
            "seed": (self.seed is None or 0 <= self.seed < 1 << 64, "at least 0 and below 2**64"),
        }
        for name, (holds, expected) in valid.items():
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)}", expected=expected)


@dataclass(frozen=True, slots=True)
class Constraint:
    """The response must match. ``text``: a JSON schema, a regular expression, a JSON list of strings, or a grammar."""

    kind: ConstraintKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response to one prompt (token ids); ``n`` responses are ``n`` requests, which share the prompt's KV blocks.

    ``stop_tokens`` end the response once it has ``min_new_tokens``. ``logprobs``: so many of the likeliest tokens with
    each token of the response; ``prompt_logprobs`` the same of the prompt. Log-probabilities are those of the model,
    before penalties, temperature and filters. ``max_new_tokens`` 0 only scores the prompt.
    ``priority``: lower runs first. ``tenant``: step tokens are shared fairly among the tenants of one priority.
    ``cache_salt``: requests share a prefix only with those of the same salt. Timeouts are seconds from arrival: of
    leaving the queue, of the first token and of the last.
    ``answered``: tokens of the response that another engine has brought already. The response goes on after them as it
    would have there, to the bit where both engines have one digest and one level; deltas bring the rest. It needs the
    other engine's seed, and has no scores of its prompt.
    """

    id: str
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_tokens: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    queue_timeout: Seconds | None = None
    first_token_timeout: Seconds | None = None
    timeout: Seconds | None = None
    answered: Sequence[int] = ()


class TokenLogprobs(NamedTuple):
    """Of one token: its own log-probability in nats, and the likeliest tokens with theirs, from the likeliest on.

    The token itself is among ``top`` with the identical number if it is one of the likeliest.
    """

    token: int
    logprob: Logprob
    top: tuple[tuple[int, Logprob], ...] = ()


class Delta(NamedTuple):
    """What a step brought for one request. The last delta of a request has a ``finish_reason``.

    ``tokens``: new tokens of the response, the stop token included. ``logprobs``: one for each, if asked for.
    ``prompt_logprobs``: None for the first token of the prompt, once, with the first delta. ``cached_tokens``: prompt
    tokens that were found in KV blocks. ``error``: why, where the reason is "error". ``queue_seconds``: from arrival to
    the first step, with the first token.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    queue_seconds: Seconds | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Of an opened engine: what a server must know of it."""

    digest: str
    name: str
    max_tokens: int
    vocab_size: int
    block_tokens: int
    blocks: int
    block_bytes: int
    weight_bytes: int  # that a decode step of one request reads
    stop_tokens: frozenset[int]
    threads: int = 0  # of the processor that compute a step; 0: none
    server_cores: frozenset[int] = frozenset()  # see :mod:`runtime.engine.shared_cores`
    files: Mapping[str, str] = field(default_factory=dict[str, str])  # sha256 by name: of text files of the bundle
    level: str = ""  # of the processor, that the native kernels are built for; empty without such kernels
    notice: str = ""  # why the bundle that it was last told to open is not open
    moves_blocks: bool = False  # its blocks can be fetched by an engine of the same bundle and level
    slot_bytes: int = 0  # of the recurrent state of one sequence
    pool: Pool = "mixed"  # what a gateway of several engines gives it
    source: str = ""  # of the bundle: an absolute folder, or models:/NAME/VERSION; empty where that was not said
    mapped_bytes: int = 0  # of weights of experts that are left in their file
    cold_seconds: Seconds = 0.0  # from the start of a process until it has this bundle open; 0: nobody has measured it


class EngineStats(NamedTuple):
    """Counters since the engine was opened, and the state after its last step; what `/metrics` and the page show.

    While requests run, counts of stored and clipped values may be 15 steps old.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    blocks: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    steps: int = 0
    step_seconds: Seconds = 0.0  # of the last step
    step_tokens: int = 0  # fed in the last step
    step_requests: int = 0  # in the last step
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    preemptions: int = 0
    drafts: int = 0  # times that tokens were drafted
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kv_values: int = 0  # written to a cache in int8 or int4
    kv_values_clipped: int = 0
    activation_values: int = 0  # quantized to int8 with static scales
    activation_values_clipped: int = 0
    finished: Mapping[str, int] = {}  # requests by finish reason
    slots: int = 0  # of recurrent state
    slots_held: int = 0
    slots_cached: int = 0
    prefix_lost: int = 0  # prompt tokens that were computed for want of a snapshot
    blocks_fetched: int = 0  # from other engines
    blocks_sent: int = 0  # to other engines
    fetches_failed: int = 0  # that ended before all blocks came, which were computed then
    mapped_bytes: int = 0  # of weights that are left in their file, where the system tells what is in memory of them
    resident_bytes: int = 0  # of these, in memory: an estimate, some seconds old
    step_reads: Times = 1.0  # weights that the last step is expected to have read, over those of a step of one token
    page_faults: int = 0  # pages that were read from a disk while an engine waited that leaves weights in their file


class RefusedRequest(NamedTuple):
    """A request that was not admitted, or that lost its place in the queue before it ran."""

    id: str
    error: RequestError


class KeyChanges(NamedTuple):
    """Keys (:mod:`runtime.wire.block_keys`) by which state can be found from now on, and keys by which it cannot.

    Of each key the first :data:`KEY_BYTES`, one after another. No key is in both.
    """

    published: Annotated[bytes, Meta(max_length=MOST_KEYS * KEY_BYTES)] = b""
    evicted: Annotated[bytes, Meta(max_length=MOST_KEYS * KEY_BYTES)] = b""


class EngineLoad(NamedTuple):
    """From what the time to a first token can be predicted. ``backlog_tokens``: of prompts, that wait to be computed,
    those left out that the cache has. ``decodes``: running requests that feed one token a step.

    A step of ``chunk_tokens`` prompt tokens takes ``decode_seconds`` and ``prompt_seconds`` for each of them; all are 0
    until they were measured. ``answer_tokens``: of a usual response; 0 before any. ``fetch_seconds``: to fetch a block
    from another engine; 0 where it cannot. ``step_seconds``: until the step ends that follows this report, as expected;
    0 where there is nothing to do.

    ``large``: tenants with requests here that took a large part of the engine's work lately. Prompts of all others come
    before theirs; ``others_tokens``: of these, in the backlog.
    """

    backlog_tokens: int = 0
    decodes: int = 0
    waiting: int = 0
    running: int = 0
    most_running: int = 0
    chunk_tokens: int = 0
    prompt_seconds: Seconds = 0.0
    decode_seconds: Seconds = 0.0
    answer_tokens: int = 0
    fetch_seconds: Seconds = 0.0
    step_seconds: Seconds = 0.0
    large: tuple[str, ...] = ()
    others_tokens: int = 0


class RoutingReport(NamedTuple):
    """For a server that chooses among engines: where the engine's state can be resumed, and how busy the engine is.

    ``turn``: of the :class:`WatchBlocks` that it answers. ``number``: of the reports since then, from 0; after a gap
    the server asks again. ``whole``: what was known before is void, and a full list begins, which may take several
    reports. ``behind``: changes that did not fit into this one. ``blocks``: of paged state; a prompt resumes where its
    unbroken chain of them ends. Recurrent state resumes at ``snapshots``. ``received``: requests that have come over
    this connection since the first WatchBlocks on it.
    """

    turn: int
    number: int
    whole: bool
    behind: int
    blocks: KeyChanges
    snapshots: KeyChanges
    received: int
    load: EngineLoad


class StepReport(NamedTuple):
    """After each step, and twice a second while idle. ``routing``: for those that asked for it."""

    deltas: tuple[Delta, ...]
    stats: EngineStats
    refusals: tuple[RefusedRequest, ...] = ()
    routing: RoutingReport | None = None


class Add(NamedTuple):
    """Commands to the engine's process. ``age``: seconds from the request's arrival until this was sent.

    ``source``: the address of another engine that has blocks of the request's prompt and answer so far, which this one
    may fetch rather than compute; none if empty.
    """

    request: GenerateRequest
    age: Seconds
    source: str = ""


class Cancel(NamedTuple):
    id: str


class FetchAhead(NamedTuple):
    """Tells an engine to fetch blocks of these tokens from the one at ``source``, for a request that comes soon.

    Nothing answers it: reports say which blocks an engine has.
    """

    tokens: tuple[int, ...]
    cache_salt: bytes
    source: str


class WarmUp(NamedTuple):
    """Tells an engine that has no blocks to fetch those that the one at ``source`` has used last, so many at most."""

    source: str
    blocks: Annotated[int, Meta(ge=0)]


class Close(NamedTuple):
    """The server takes its leave; requests that still run are lost."""


class Reopen(NamedTuple):
    """Tells an engine that listens to open another bundle, as whoever started it could.

    ``source``: see `tapeout engine`; empty: the bundle that it had before this one. It says :class:`Leaving` to all its
    servers, goes on until no request is left, or for ``drain_seconds``, and closes its connections. If the bundle may
    not be served there, or does not open, it opens the old one again: :attr:`EngineInfo.notice` says why.
    """

    source: str
    drain_seconds: Seconds


class WatchBlocks(NamedTuple):
    """Asks for a :class:`RoutingReport` in each report from now on, the first of them with a full list.

    ``turn``: any number; that it comes back tells these reports from those that a WatchBlocks before has asked for.
    """

    turn: int


class ReadFile(NamedTuple):
    """Asks for a text file of the bundle from byte ``offset`` on. ``sha256``: one of :attr:`EngineInfo.files`."""

    sha256: str
    offset: Annotated[int, Meta(le=(1 << 63) - 1)]  # more is no place in a file


class FilePart(NamedTuple):
    """The answer: at most :data:`PART_BYTES`; none at the end of the file."""

    sha256: str
    offset: int
    data: bytes


class Leaving(NamedTuple):
    """From an engine that is about to open another bundle: send new requests elsewhere where that is possible."""


class Heartbeat(NamedTuple):
    """From an engine that has sent nothing for a while: its process runs, whatever its step is busy with."""


PART_BYTES = 1 << 20

# What passes between two engines. One that fetches connects to the other as a server does, and hears the same answer
# first, so it knows the bundle and the level of the other before it asks.

MovedKind = Literal["paged", "recurrent"]


SHARED_HEAD_BYTES = 4096


class SharedPlace(NamedTuple):
    """Memory of the engine that asks, for one that runs on the same machine: a ``memfd`` of the process ``pid``.

    It begins with the bytes ``mark``. There is room for whole blocks from the byte :data:`SHARED_HEAD_BYTES` on.
    """

    pid: int
    descriptor: int
    mark: Annotated[bytes, Meta(min_length=32, max_length=32)]


class FetchState(NamedTuple):
    """Asks for state by whole keys (:mod:`runtime.wire.block_keys`), one after another, those of one chain in order.

    ``kind``: blocks of paged state, or slots of recurrent state, which no engine sends yet: it refuses. ``place``: in
    shared memory, of the first key, counted in blocks.
    """

    kind: MovedKind
    keys: Annotated[bytes, Meta(max_length=MOST_KEYS * WHOLE_KEY_BYTES)]
    shared: SharedPlace | None = None
    place: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class FindState(NamedTuple):
    """Asks for the keys of the paged state that was used last, so many at most."""

    most: Annotated[int, Meta(ge=0, le=MOST_KEYS)]


class StateKeys(NamedTuple):
    """The answer: whole keys, the most recently used first, and of a chain the first block before the others."""

    keys: Annotated[bytes, Meta(max_length=MOST_KEYS * WHOLE_KEY_BYTES)]


class StatePart(NamedTuple):
    """The answer, one for each key, in order. ``found``: there is state of this key.

    ``checksum``: :func:`runtime.engine.moving.checksums.checksum`; empty where there is none. ``content``: empty where
    it was written to shared memory.
    """

    key: Annotated[bytes, Meta(min_length=WHOLE_KEY_BYTES, max_length=WHOLE_KEY_BYTES)]
    found: bool
    shared: bool = False
    checksum: Annotated[bytes, Meta(max_length=CHECKSUM_BYTES)] = b""
    content: Annotated[bytes, Meta(max_length=MOST_STATE_BYTES)] = b""


Command = Add | Cancel | Close | FetchAhead | FetchState | FindState | ReadFile | Reopen | WarmUp | WatchBlocks
