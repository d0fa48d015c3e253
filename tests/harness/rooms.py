"""The house rules about imports: which room, and which module in it, may use what."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("collectives", "optim", "peer")
INTEGRATIONS = ROOT / "atoll" / "integrations"  # a room of the package itself


def _modules() -> dict[str, Path]:
    found = {"atoll": ROOT / "atoll" / "__init__.py", "atoll.data": ROOT / "atoll" / "data.py"}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[f"atoll.{name}".removesuffix(".__init__")] = path
    for path in sorted(INTEGRATIONS.glob("*.py")):
        found[f"atoll.integrations.{path.stem}".removesuffix(".__init__")] = path
    return found


MODULES = _modules()
FOLDERS = (*ROOMS, "examples", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES += [MODULES["atoll"], MODULES["atoll.data"], *sorted(INTEGRATIONS.glob("*.py"))]

# What a room may import beside the standard library and itself.
COLLECTIVES_MAY = {"blake3", "numpy", "xxhash"}
OPTIM_PURE = {
    f"atoll.optim.{name}"
    for name in (
        "deck",
        "footprint",
        "manifest",
        "methods.fragment_patterns",
        "methods.gossip",
        "outer_step",
        "pseudo_gradient",
        "run_spec",
    )
}
REPLAY = "checkpoint difference step_disclosure"
OPTIM_PURE |= {f"atoll.optim.replay.{name}" for name in REPLAY.split()}
OPTIM_PURE_MAY = {
    "numpy",
    "atoll.collectives.audit.sketch",
    "atoll.collectives.merkle",
    "atoll.collectives.chunks",
    "atoll.collectives.codecs",
    "atoll.collectives.counter_rng",
    "atoll.collectives.robust",
    "atoll.collectives.errors",
    "atoll.collectives.version",
    "atoll.collectives.native",
    "atoll.collectives.units",
} | OPTIM_PURE
# Arithmetic that trainers share, without torch.
COMPRESSORS = {n for n in MODULES if n.startswith("atoll.optim.compressors.")}
COMPRESSORS |= {"atoll.optim.compressors", "atoll.optim.every_step.exchange"}
COMPRESSORS_MAY = {f"atoll.collectives.{n}" for n in ("counter_rng", "codecs.scales", "feedback")}
COMPRESSORS_MAY |= COMPRESSORS | OPTIM_PURE_MAY
OPTIM_TORCH_MAY = {"torch", "atoll.optim", "atoll.peer.client"} | OPTIM_PURE_MAY
OPTIM_TORCH_MAY |= {
    f"atoll.collectives.{name}"
    for name in (
        "counter_rng",
        "engine.parts",
        "engine.reference",
        "engine.result",
        "feedback",
    )
}
PEER_MAY = {"cryptography", "msgpack", "numpy", "zmq", "atoll.collectives", "atoll.peer"}
PEER_MAY |= OPTIM_PURE | {"prometheus_client"}
# Only what draws may load it, so that commands start fast.
RICH = {"atoll.peer.demo.view", "atoll.peer.telemetry.top_screen", "atoll.peer.cli.top"}
# An extra, in C: the only module that may load it.
UPNP = {"atoll.peer.net.upnp"}
# The face of optim also names the demo's small model, for those who check types, and when it is
# asked for.
OPTIM_FACE_MAY = OPTIM_TORCH_MAY | {"atoll.peer.demo.byte_lm"}
# What trains in the demo: a process of its own, which loads torch. No other module imports it.
DEMO_TRAINER = {"atoll.peer.demo.byte_lm", "atoll.peer.demo.trainer"}
DEMO_TRAINER_MAY = {"torch", "atoll.optim"}
# The data's face, which loads torch: `import atoll` does not import it.
DATA_MAY = {"atoll.optim.shards"}
# Each integration may also import the library that it is named after; nothing imports it.
INTEGRATIONS_MAY = OPTIM_TORCH_MAY | {"atoll.integrations"}
# An extra, which says what a private run has spent.
PRIVACY = {"atoll.optim.experimental.private"}
LIBRARIES = {"accelerate", "lightning", "torchtitan", "transformers"}
# Methods only for those who check types, and when they are asked for.
ATOLL_MAY = {
    "atoll.collectives.errors",
    "atoll.collectives.version",
    "atoll.data",
    "atoll.optim",
    "atoll.peer.client",
}

# Sans-I/O: state machines and pure functions. They import each other and nothing that acts.
DECISIONS = (
    OPTIM_PURE
    | COMPRESSORS
    | {name for name in MODULES if name.startswith("atoll.peer.membership")}
    | {
        name
        for name in MODULES
        for package in ("planning", "robust", "schedule")
        if f"{name}.".startswith(f"atoll.collectives.{package}.")
    }
    | {
        f"atoll.collectives.{name}"
        for name in (
            "audit.checks",
            "audit.sketch",
            "chunks",
            "counter_rng",
            "errors",
            "digests",
            "merkle",
            "units",
        )
    }
    | {
        f"atoll.peer.{name}"
        for name in (
            "caps.budget",
            "caps.schedule",
            "caps.token_bucket",
            "verify.attempt_audit",
            "verify.ban_record",
            "verify.disclosure",
            "verify.evidence",
            "verify.inbox",
            "verify.statement",
            "verify.terms",
            "authority.grants",
            "authority.ledger",
            "checkpoint.format",
            "demo.figures",
            "demo.summary",
            "doctor.facts",
            "doctor.machine_checks",
            "doctor.report",
            "doctor.run_checks",
            "doctor.table",
            "vectors.messages",
            "links.estimates",
            "links.messages",
            "links.link_table",
            "links.probe_schedule",
            "links.tcp_info",
            "plan.advice",
            "plan.losses",
            "plan.model",
            "plan.report",
            "plan.sources",
            "durable.file_identity",
            "durable.ledger_format",
            "daemon.reach_lines",
            "daemon.reachability",
            "net.address_kind",
            "net.admission_policy",
            "net.connection_limits",
            "net.hello",
            "net.invite",
            "net.reach_messages",
            "streams.keys",
            "net.wire",
            "streams.frames",
            "rounds.entries",
            "streams.sealed",
            "membership.signatures",
            "state_sync.assembly",
            "state_sync.machine",
            "state_sync.messages",
            "state_sync.events",
            "state_sync.verification",
            "state_sync.sources",
            "supervisor.machine",
            "supervisor.notices",
            "telemetry.findings",
        )
    }
)
# Codecs are pure functions with scratch for each thread, hence their import of `threading`; and the
# kernels are found once, with `os` and `importlib`. Error feedback is built on them. The arithmetic
# of audits adds up as the engine does, and has a lock for the memory that it computes in.
DECISIONS_MAY = DECISIONS | {"atoll.collectives.codecs", "atoll.collectives.native"}
DECISIONS_MAY |= {"atoll.peer.verify.checks"}
DECISIONS_MAY |= COMPRESSORS_MAY
ACTS = {
    "asyncio",
    "concurrent",
    "ctypes",
    "fcntl",
    "mmap",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "torch",
    "zmq",
}
