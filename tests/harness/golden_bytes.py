"""Make the lines of `tests/golden/wire.txt`, of what goes over the wire and into files, and
those of `tests/golden/signed.txt`, of what is signed. Nothing in them is drawn at random.

Ed25519 signs one text with one key in one way, so that a grant with its signature pins the text as
well. Blobs are shown unpacked: two versions of zlib may pack one text differently.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.collectives.schedule.schedule import FrameKind as Reductions
from atoll.optim.manifest import FrozenTensor, Manifest, Parameter
from atoll.optim.replay.step_disclosure import Extent
from atoll.optim.run_spec import RunSpec, blob
from atoll.peer.authority.grants import Credential, Grant, Revocations
from atoll.peer.checkpoint.format import CheckpointManifest, render_manifest
from atoll.peer.links.messages import PROBE
from atoll.peer.membership.operations import object_digest, pack_objects
from atoll.peer.membership.signing import Signatures, Signed
from atoll.peer.membership.view import (
    Ballot,
    View,
    chain_after,
    forked,
    founded,
    genesis_chain,
    new_lineage,
)
from atoll.peer.net.hello import CONTROL, Hello
from atoll.peer.net.identity import Home, RunRecord
from atoll.peer.net.invite import Invite, fingerprint_of
from atoll.peer.net.wire import encode, frame
from atoll.peer.rounds.entries import EntryHead, EntryOrigin, entry_root
from atoll.peer.rounds.salvage import KEPT
from atoll.peer.state_sync.verification import part_head
from atoll.peer.streams.frames import DataHeader, pack_header
from atoll.peer.streams.keys import CIPHER_AES, CIPHERS, Handshake, StreamGranted
from atoll.peer.streams.sealed import RECORD_OVERHEAD_BYTES, RecordKind, Sealer, direction_secrets
from atoll.peer.streams.transfers import TransferKind
from atoll.peer.verify.evidence import Evidence
from atoll.peer.verify.statement import StatementPhase, draw_of, heard_of, seed_of, sign_statement
from atoll.peer.verify.terms import AuditTerms
from harness.samples import PEERS, VARIANTS, names, sample

__all__ = ["FRAMES", "SIGNED_HEAD", "WIRE_HEAD", "signed_lines", "wire_lines"]

WIRE_HEAD = (
    "Bytes on the wire and in files: name, variant, hexadecimal digits.",
    "Of messages bare is with required fields only, full with all (tests/harness/samples.py).",
    "make golden-rewrite writes it anew.",
)
SIGNED_HEAD = (
    "What is signed, and what signatures and later rounds rely on: name, variant, digits.",
    "make golden-rewrite writes it anew.",
)
# Every kind of data frame, by a name that says what it is for.
FRAMES = {
    "contribution": Reductions.CONTRIB,
    "result": Reductions.RESULT,
    "result-copy": TransferKind.RESULT_COPY,
    "state": TransferKind.STATE,
    "entry": TransferKind.ENTRY,
    "kept": KEPT,
    "probe": PROBE,
    "vector": TransferKind.VECTOR,
    "gram": Reductions.GRAM,
}
D32 = [bytes([number]) * 32 for number in range(0xA0, 0xB0)]
RUN = "demo"
SECRET = bytes(range(32))


def key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def public(number: int) -> bytes:
    return key(number).public_key().public_bytes_raw()


def line(name: str, variant: str, data: bytes | str) -> str:
    return f"{name} {variant} {data.hex() if isinstance(data, bytes) else data}"


# ---------------------------------------------------------------- wire


def wire_lines() -> Iterator[str]:
    for name in names():
        for variant in VARIANTS:
            yield line(name, variant, encode(sample(name, variant)))
    yield line("control-frame", "hello", frame(encode(hello())))
    for name, kind in FRAMES.items():
        header = DataHeader(int(kind), 1, 2, 3, D32[0][:8], 4, 5, 6, 7, 8)
        yield line("data-header", name, pack_header(header))
    yield from _stream()
    yield line("piece-head", "with-proof", part_head(D32[0] + D32[1], 5000, same=False))
    yield line("objects", "of-two", pack_objects([b"one", b"three"]))
    yield from _files()


def hello() -> Hello:
    return Hello(2, 2, RUN, CONTROL, 3, "203.0.113.7:29600", CIPHERS, b"", "replica", "0.2.0")


def _stream() -> Iterator[str]:
    """Yield the opening of a data stream with fixed keys, and its first records."""
    granted = StreamGranted(7, CIPHER_AES, bytes(range(16)), SECRET)
    dialler, acceptor = Handshake(granted), Handshake(granted)
    opening = dialler.opening(b"d" * 16)
    greeting = acceptor.greeting(opening, b"a" * 16)
    proof = dialler.answer(greeting)
    acceptor.finish(proof)
    assert dialler.secret() == acceptor.secret()
    for variant, said_by in (("opening", opening), ("greeting", greeting), ("proof", proof)):
        yield line("stream-handshake", variant, said_by)
    yield line("stream-handshake", "secret", dialler.secret())
    for side, secret in zip(("dialler", "acceptor"), direction_secrets(SECRET), strict=True):
        sealer = Sealer(secret, 0.0)
        for variant, kind, plain in (
            ("data", RecordKind.DATA, b"what is sealed"),
            ("next-key", RecordKind.KEY, b""),
            ("next-data", RecordKind.DATA, b"what is sealed"),
            ("end", RecordKind.END, b""),
        ):
            out = memoryview(bytearray(len(plain) + RECORD_OVERHEAD_BYTES))
            if kind is RecordKind.KEY:
                sealer.rekey(out, 0.0)
            else:
                sealer.seal(kind, memoryview(plain), out)
            yield line("sealed-record", f"{side}-{variant}", bytes(out))


def _files() -> Iterator[str]:
    for variant, (spec, manifest) in runs().items():
        yield line("run-blob", variant, zlib.decompress(blob(spec, manifest)))
        yield line("run-manifest-digest", variant, manifest.digest())
    fingerprint = fingerprint_of(PEERS[0])
    invite = Invite("203.0.113.7", 29600, RUN, fingerprint, SECRET)
    yield line("invite", "plain", str(invite))
    token, seed = grant(uses=3)
    granted = Invite("2001:db8::1", 1, RUN, b"", SECRET, public(1), token.encode(), seed)
    yield line("invite", "authority", str(granted))
    yield line("checkpoint-manifest", "full", render_manifest(checkpoint(), SECRET, key(2).sign))
    for variant in VARIANTS:
        evidence: Evidence = sample("Evidence", variant)
        yield line("evidence-file", variant, evidence.encoded)
    with tempfile.TemporaryDirectory() as folder, Home.open(Path(folder) / "home") as home:
        home.save_run(RunRecord(RUN, SECRET, ("203.0.113.7:29600",), public(1), b"credential"))
        yield line("home-run-record", "full", (home.path / "run.json").read_bytes())


def runs() -> dict[str, tuple[RunSpec, Manifest]]:
    """Return a run with the fields that it must have, and others that together have all."""
    plain = Manifest.of([Parameter("weight", (4, 3))])
    spec = RunSpec(
        method="streaming_diloco",
        sync_every=8,
        schedule="a schedule",
        outer="nesterov",
        outer_lr=0.4,
        outer_lr_by_peers=True,
        outer_momentum=0.8,
        outer_clip=0.25,
        submits="deltas",
        codec="int4",
        round_deadline_s=30.5,
        fragments=2,
        rounds_in_flight=2,
        aggregate="gm(f=1)",
        error_feedback=0.95,
        check_every=5,
        buffers="some buffers",
        gossip=0.5,
        group=2,
        probation=3,
        min_trainers=2,
    )
    parameters = [
        Parameter("a.weight", (64, 64), "bfloat16", 0),
        Parameter("b.weight", (64, 64), "float32", 1),
    ]
    frozen = (FrozenTensor("c", "4 float32", "0" * 16), FrozenTensor("d", "5 int64"))
    manifest = Manifest(Manifest.of(parameters).parameters, frozen)
    audited = RunSpec(sync_every=8, audit=True, validators=2, segment_steps=4)
    late = RunSpec(
        method="async_diloco",
        sync_every=9,
        outer_delay=3,
        momentum_codec="dynamic8",
        submits="deltas",
    )
    local = RunSpec(method="local_sgd", sync_every=8, outer="sgd")
    warm = RunSpec(sync_every=8, warm_rounds=100, warm_every=2)
    return {
        "bare": (RunSpec(sync_every=8), plain),
        "full": (spec, manifest),
        "audited": (audited, plain),
        "asynchronous": (late, plain),
        "plain-mean": (local, plain),
        "warm": (warm, plain),
    }


def grant(uses: int = 0) -> tuple[Grant, bytes]:
    """Return a token, or a pass for the peer of key 3, with the private key of its subject."""
    subject = public(4 if uses else 3)
    made = Grant(RUN, subject, "witness", uses, 1_900_000_000).signed(key(1))
    return made, bytes([4]) * 32 if uses else b""


def checkpoint() -> CheckpointManifest:
    return CheckpointManifest(
        run=RUN,
        lineage=D32[0],
        ancestors=(D32[1],),
        view=3,
        members=PEERS[:2],
        policy="majority",
        on_lost="halt",
        on_fork="auto",
        round=17,
        chain=D32[2],
        digest=D32[3],
        root=D32[4],
        chunks=5,
        blob=b"a blob",
        file_bytes=1000,
        file_sha256=D32[5],
        peer=public(2),
        incarnation=6,
        unix_s=1_800_000_000,
        version="0.2.0",
        min_trainers=2,
    )


# ---------------------------------------------------------------- signed


class Recording:
    """A signer that remembers the texts that it is given."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def sign(self, text: bytes) -> bytes:
        self.texts.append(text)
        return b"s" * 64

    def verify(self, peer: bytes, text: bytes, signature: bytes) -> bool:
        self.texts.append(text)
        return True


def signed_lines() -> Iterator[str]:
    yield from _membership()
    yield from _statements()
    yield from _authority()
    recording = Recording()
    text = json.loads(render_manifest(checkpoint(), SECRET, recording.sign))
    yield line("checkpoint-tag", "full", str(text["tag"]))
    yield line("checkpoint", "full", recording.texts[0])
    yield from _chains()


def _membership() -> Iterator[str]:
    for name in ("Promise", "Accepted", "Commit"):
        for variant in VARIANTS:
            recording = Recording()
            signatures = Signatures(PEERS[0], recording, lambda _: None)
            message: Signed = signatures.signed(sample(name, variant), 9)
            assert signatures.genuine(PEERS[1], message)
            assert recording.texts[0] == recording.texts[1]
            yield line(name, variant, recording.texts[0])
    recording = Recording()
    Signatures(PEERS[0], recording, lambda _: None).proven(sample("Install", "full"), None)
    for number, text in enumerate(recording.texts):
        yield line("vote-of-a-proof", str(number), text)


BODIES = {
    StatementPhase.COMMIT: "Commitment",
    StatementPhase.RESULT: "Resultant",
    StatementPhase.REVEAL: "Reveal",
    StatementPhase.CHECK: "Check",
    StatementPhase.VERDICT: "Verdict",
    StatementPhase.WITHHELD: "Withholding",
    StatementPhase.ELIMINATE: "Elimination",
    StatementPhase.REPLAYED: "Replayed",
}


def _statements() -> Iterator[str]:
    terms: AuditTerms = sample("AuditTerms", "full")
    yield line("audit-terms-digest", "full", terms.digest)
    heard = {}
    for phase in StatementPhase:
        for variant in VARIANTS:
            recording, body = Recording(), sample(BODIES[phase], variant)
            word = sign_statement(terms.digest, phase, D32[0], body, PEERS[0], recording)
            yield line(f"audit-statement-{int(phase)}", variant, encode(word.statement))
            yield line(f"audit-statement-{int(phase)}-digest", variant, recording.texts[0])
            heard[PEERS[VARIANTS.index(variant)]] = word
    yield line("audit-heard", "of-two", heard_of(heard))
    yield line("audit-draw", "of-one", draw_of(terms.digest, PEERS[0], D32[1]))
    yield line("audit-seed", "of-two", seed_of(terms, {PEERS[0]: D32[1], PEERS[1]: D32[2]}))
    yield line("local-steps-extent", "full", Extent(1, 20, 30, 7).pack())
    yield line("local-steps-commitment", "full", Extent(1, 20, 30, 7).commitment(D32[3]))


def _authority() -> Iterator[str]:
    for variant, uses in (("pass", 0), ("token", 3)):
        made, seed = grant(uses)
        yield line("grant", variant, made.encode())
        yield line("grant-digest", variant, made.digest)
        held = Credential.bind(made, public(1), key(3), seed)
        yield line("credential", variant, held.encode())
    lists = Revocations().with_more([D32[1], D32[0]], key(1))
    yield line("revocations", "first", lists.encode())
    yield line("revocations", "second", lists.with_more([D32[2]], key(1)).encode())


def _chains() -> Iterator[str]:
    """Yield what peers compare instead of states and histories."""
    view: View = sample("View", "full")
    yield line("chain", "genesis", genesis_chain(D32[0]))
    yield line("chain", "after-a-round", chain_after(D32[0], 7, 2, D32[1]))
    yield line("lineage", "new", new_lineage(D32[0], b"reason"))
    yield line("lineage", "forked", forked(view, Ballot(2, PEERS[0])).lineage)
    yield line("lineage", "founded", founded(view).lineage)
    origin: EntryOrigin = sample("Origin", "full")
    yield line("origin-digest", "full", origin.digest())
    head: EntryHead = sample("EntryHead", "full")
    roots = {
        "step": entry_root(head.origins, b"", D32[:3]),
        "kept": entry_root(head.origins, b"\0\1\1", D32[:3]),
        "init": entry_root(head.origins, b"", D32[:3], b"blob"),
        "gather": entry_root(head.origins, b"", (), b"objects"),
    }
    for variant, root in roots.items():
        yield line("entry-root", variant, root)
    yield line("object-digest", "full", object_digest(b"object"))
