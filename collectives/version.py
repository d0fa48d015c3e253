"""Hold the version of atoll; pyproject.toml, hellos of peers and checkpoints take it from here."""

from __future__ import annotations

VERSION = "0.2.0"
