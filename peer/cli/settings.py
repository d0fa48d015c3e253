"""Find the value of each option, and where it comes from.

What there is to set is what argparse has. An option ``--min-trainers`` of any command with a
``--config`` is ``min-trainers`` in atoll.toml and ``ATOLL_MIN_TRAINERS`` in the environment. The
first that says something counts::

    a flag, ATOLL_*, atoll.toml, what `--from` finds in the environment of a job, the default

Of two options that say the same (an invite, and a file that holds it) the one counts that stands
further to the left here.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atoll.collectives.errors import ConfigError
from atoll.peer.cli.launchers import from_launcher
from atoll.peer.net.identity import default_home, refuse_wide_mode
from atoll.peer.net.invite import without_token
from atoll.peer.net.proxy import without_password

FILE: Final = "atoll.toml"
FILE_BYTES_MAX: Final = 64 << 10  # all options with a remark each are 8 KiB; more is another file
PREFIX: Final = "ATOLL_"
# How alike an unknown name and an option are, at least, to be called a slip. Of keys any is a
# mistake; variables may be another program's, so they have to be very much alike.
KEY_ALIKE: Final = 0.6
VARIABLE_ALIKE: Final = 0.8
SHOWN_CHARACTERS_MAX: Final = 80  # of a wrong value, in a message
HIDDEN: Final = "(secret)"

FLAG, ENVIRONMENT, IN_FILE, LAUNCHER, DEFAULT = "flag", "environment", "file", "launcher", "default"

_NOT_GIVEN: Final = object()
_PATHS = ("FILE", "DIR", "PATH")  # metavars of what is relative to the folder of the file
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class SecretAction(argparse.Action):
    """Take a secret, which is never shown, and as an option not from the command line.

    Every user of a machine can read the command lines of all processes. ``in_file``: the option
    that names a file with the same secret.
    """

    def __init__(self, *arguments: Any, in_file: str, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.in_file = in_file

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if option_string is not None:
            instead = f"set {variable_of(name_of(self))}, or give --{self.in_file} FILE"
            parser.error(f"every user of this machine can read {option_string} here: {instead}")
        if values is not self.default:  # argparse hands over the default of what is left out
            setattr(namespace, self.dest, values)


@dataclass(frozen=True, slots=True)
class Setting:
    """Hold the value of an option; ``origin`` is one of those above, ``where`` says it in words."""

    value: Any
    origin: str = DEFAULT
    where: str = DEFAULT
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold the value of each option of a command, and the file of which some are."""

    options: Mapping[str, Setting] = field(default_factory=dict)
    path: Path | None = None
    hints: tuple[str, ...] = ()  # about variables that look like a slip


class Parser(argparse.ArgumentParser):
    """Parse a command whose options may come from the environment or a file too.

    ``known``: the options that the file may have, of this command and of all others.
    ``commands``: which commands have each of them.
    """

    known: Mapping[str, argparse.Action] = {}
    commands: Mapping[str, Sequence[str]] = {}

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does, and add what is not given; ``settings`` says where it is from."""
        if not self.known:
            return super().parse_known_args(args, namespace)
        parsed, rest, settings = self._layered(args, namespace)
        self._refuse_options_of_others(rest)
        missing = [
            "/".join(action.option_strings)
            for name, action in settable(self).items()
            if action.required and settings.options[name].value is None
        ]
        if missing:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        parsed.settings = settings
        return parsed, rest

    def _refuse_options_of_others(self, rest: Sequence[str]) -> None:
        for word in rest:
            flag = word.partition("=")[0]
            if flag.startswith("--") and (others := self.commands.get(flag[2:])):
                self.error(f"{flag} is an option of {', '.join(others)}, not of `{self.prog}`")

    def settings_of(self, words: Sequence[str]) -> Settings:
        """Return what a line of this command would be started with, also where it lacks options."""
        _, rest, settings = self._layered(words, None)
        self._refuse_options_of_others(rest)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return settings

    def _layered(
        self, args: Iterable[str] | None, namespace: Any
    ) -> tuple[Any, list[str], Settings]:
        actions = settable(self)
        marked = argparse.Namespace() if namespace is None else namespace
        for action in actions.values():
            setattr(marked, action.dest, _NOT_GIVEN)
        required = [action for action in actions.values() if action.required]
        for action in required:
            action.required = False  # what the command line lacks may be in the file
        try:
            parsed, rest = super().parse_known_args(args, marked)
        finally:
            for action in required:
                action.required = True
        flags = {
            name: Setting(value, FLAG, shown_name(action), is_secret(action, value))
            for name, action in actions.items()
            if (value := getattr(parsed, action.dest)) is not _NOT_GIVEN
        }
        settings = find(actions, self.known, flags)
        for name, action in actions.items():
            setattr(parsed, action.dest, settings.options[name].value)
        return parsed, rest, settings


def let_settings(root: argparse.ArgumentParser, apart: Parser) -> None:
    """Let every command that has a ``--config``, but one, take its options from elsewhere too."""
    parsers = [p for p in _below(root) if "config" in settable(p) and p is not apart]
    known: dict[str, argparse.Action] = {}
    commands: dict[str, list[str]] = {}
    for parser in parsers:
        for name, action in settable(parser).items():
            known.setdefault(name, action)
            commands.setdefault(name, []).append(f"`{parser.prog}`")
    for parser in parsers:
        parser.known, parser.commands = known, commands


def _below(parser: argparse.ArgumentParser) -> Iterable[Parser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                if isinstance(command, Parser):
                    yield command
                yield from _below(command)


def settable(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options of a command, and a secret that it takes as an argument, by their name."""
    return {
        name_of(action): action
        for action in parser._actions
        if (action.option_strings or isinstance(action, SecretAction)) and action.dest != "help"
    }


def name_of(action: argparse.Action) -> str:
    """Return an option's name, as in the file: that of its flag, or of the argument."""
    long = [text for text in action.option_strings if text.startswith("--")]
    return long[0][2:] if long else str(action.metavar or action.dest).lower()


def shown_name(action: argparse.Action) -> str:
    return f"--{name_of(action)}" if action.option_strings else str(action.metavar)


def variable_of(name: str) -> str:
    """Return the environment variable of an option."""
    return PREFIX + name.upper().replace("-", "_")


def is_secret(action: argparse.Action, value: Any) -> bool:
    """Return whether a value must not be shown: a secret, or one that has one in it.

    Such are an invite, and a proxy with a password.
    """
    text = str(value)
    has_secret = without_token(text) != text or without_password(text) != text
    return isinstance(action, SecretAction) or has_secret


# ---------------------------------------------------------------- the layers


def find(
    actions: Mapping[str, argparse.Action],
    known: Mapping[str, argparse.Action],
    flags: Mapping[str, Setting],
) -> Settings:
    """Return the value of each of ``actions``, of which the command line gave ``flags``.

    Raises ConfigError for a value that an option does not take, and for a file that is not one.
    """
    found = dict(flags)
    _add(found, actions, _of_environment(actions))
    home = found["home"].value if "home" in found else None
    path = _file(found["config"].value if "config" in found else None, default_home(home))
    if path is not None:
        _add(found, actions, _of_file(path, actions, known))
        _check_home(path, found.get("home"), default_home(home))
    if "from" in found:
        given = {name: setting.value for name, setting in found.items()}
        _add(found, actions, _of_launcher(actions, given))
    rest = {name: Setting(_default(a)) for name, a in actions.items() if name not in found}
    return Settings(found | rest, path, _slips(known))


def _add(
    found: dict[str, Setting],
    actions: Mapping[str, argparse.Action],
    layer: Mapping[str, Setting],
) -> None:
    """Add what a layer says to what is ``found`` above it."""
    said = set(found)
    for name, action in actions.items():
        if isinstance(action, SecretAction) and said & {name, action.in_file}:
            said |= {name, action.in_file}
    found.update((name, setting) for name, setting in layer.items() if name not in said)


def _of_environment(actions: Mapping[str, argparse.Action]) -> dict[str, Setting]:
    found = {}
    for name, action in actions.items():
        variable = variable_of(name)
        if text := os.environ.get(variable, ""):  # an empty one is how compose files say "none"
            value = from_text(action, text, variable)
            found[name] = Setting(value, ENVIRONMENT, variable, is_secret(action, value))
    return found


def _slips(known: Mapping[str, argparse.Action]) -> tuple[str, ...]:
    """Return a line about each ATOLL_ variable that nobody reads, but is very like one."""
    variables = [variable_of(name) for name in known]
    hints = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in variables:
            bare = [variable.removeprefix(PREFIX) for variable in variables]
            alike = difflib.get_close_matches(
                name.removeprefix(PREFIX), bare, n=1, cutoff=VARIABLE_ALIKE
            )
            hints += [f"{name} is not read: did you mean {PREFIX}{alike[0]}?"] if alike else []
    return tuple(hints)


def _of_launcher(
    actions: Mapping[str, argparse.Action], given: Mapping[str, Any]
) -> dict[str, Setting]:
    """Return what the environment of a job says, see launchers.py."""
    return {
        name: Setting(from_text(actions[name], text, where), LAUNCHER, where)
        for name, (text, where) in from_launcher(given, os.environ).items()
        if name in actions
    }


# ---------------------------------------------------------------- the file


def _file(chosen: str | None, home: Path) -> Path | None:
    """Return the file of ``--config``, else ./atoll.toml, else that of the home, if there is one.

    Raises ConfigError for one that was found, not chosen, and that others can write.
    """
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    for path in (Path.cwd() / FILE, home / FILE):
        if os.path.isfile(path):  # not where this user may not look: `sudo -u atoll` in /root
            found = path.stat()
            if found.st_uid not in (0, os.getuid()) or found.st_mode & stat.S_IWOTH:
                what = f"{path} is another user's, or every user can write it"
                raise ConfigError(what, fix=f"if you trust it, give it: --config {path}")
            return path
    return None


def _of_file(
    path: Path, actions: Mapping[str, argparse.Action], known: Mapping[str, argparse.Action]
) -> dict[str, Setting]:
    """Return what the file has for this command. Raises ConfigError for what no command knows."""
    text, found = _read(path), {}
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for key, raw in document.items():
        where = f"{path}:{_line_of(key, text)}"
        if key not in known or key == "config":
            raise _unknown(key, raw, where, known)
        action = actions.get(key, known[key])
        value = from_toml(action, raw, where)
        if is_secret(action, value):
            refuse_wide_mode(path)
        if action.metavar in _PATHS and value != "-" and "://" not in value:
            value = str(path.parent / Path(value).expanduser())
        if key in actions:
            found[key] = Setting(value, IN_FILE, where, is_secret(action, value))
    return found


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {FILE_BYTES_MAX >> 10} KiB, so it is not a config")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8, so it is not TOML") from None


def _line_of(key: str, text: str) -> int:
    """Return the line on which a key stands, from 1; of a table its heading."""
    begins = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[\].=]""")
    lines = enumerate(text.splitlines(), start=1)
    return next((number for number, line in lines if begins.match(line)), 1)


def _unknown(key: str, raw: Any, where: str, known: Mapping[str, argparse.Action]) -> ConfigError:
    shown = key[:SHOWN_CHARACTERS_MAX]
    if isinstance(raw, dict):
        what = f"{where}: [{shown}] is a table, and there are none"
        return ConfigError(what, fix="put the options at the top of the file, without a heading")
    alike = difflib.get_close_matches(key, known, n=1, cutoff=KEY_ALIKE)
    fix = f"did you mean {alike[0]}?" if alike else "`atoll config` lists all options"
    return ConfigError(f"{where}: there is no option {shown}", fix=fix)


def _check_home(path: Path, home: Setting | None, folder: Path) -> None:
    """Raise ConfigError for a file in a home that says that the home is elsewhere."""
    if home is None or home.origin != IN_FILE or path.parent != folder:
        return
    if default_home(home.value) != folder:
        what = f"{home.where}: a file in the home {folder} says that the home is {home.value}"
        raise ConfigError(what, fix="remove that line, or move the file out of the home")


# ---------------------------------------------------------------- values


def _default(action: argparse.Action) -> Any:
    """Return the default of an option, which argparse takes as text too."""
    is_text = isinstance(action.default, str) and callable(action.type)
    return action.type(action.default) if is_text and callable(action.type) else action.default


def from_text(action: argparse.Action, text: str, where: str) -> Any:
    """Return the value of an option that is given as text. Raise ConfigError if it takes none."""
    if action.nargs == 0:
        word = text.strip().lower()
        if word not in (*_ON, *_OFF):
            raise _wrong(action, text, where)
        return _switched(action, word in _ON)
    if _takes_many(action):
        return [_converted(action, part, where) for part in text.split(",")]
    return _converted(action, text, where)


def from_toml(action: argparse.Action, raw: Any, where: str) -> Any:
    """Return the value of an option that a TOML file has. Raise ConfigError if it takes none."""
    if action.nargs == 0:
        if not isinstance(raw, bool):
            raise _wrong(action, raw, where)
        return _switched(action, raw)
    if isinstance(raw, list) and all(isinstance(part, str) for part in raw):
        if _takes_many(action):
            return [_converted(action, part, where) for part in raw]
        if "," in str(action.metavar):
            return _converted(action, ",".join(raw), where)
    is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
    if not isinstance(raw, str) and not (is_number and action.type is not None):
        raise _wrong(action, raw, where)
    value = _converted(action, str(raw), where)
    return [value] if _takes_many(action) else value


def _takes_many(action: argparse.Action) -> bool:
    return action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)


def _switched(action: argparse.Action, on: bool) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        return on
    return action.const if on else action.default


def _converted(action: argparse.Action, text: str, where: str) -> Any:
    try:
        value = action.type(text) if callable(action.type) else text
    except (TypeError, ValueError, argparse.ArgumentTypeError):
        raise _wrong(action, text, where) from None  # the cause may quote a secret
    if action.choices is not None and value not in action.choices:
        raise _wrong(action, text, where)
    return value


def _wrong(action: argparse.Action, raw: Any, where: str) -> ConfigError:
    # A URL that is not as it should be may have its password anywhere.
    shown = HIDDEN if is_secret(action, raw) or "://" in str(raw) else _toml(raw)
    what = f"{where}: {name_of(action)} is {shown}, and has to be {expected(action)}"
    return ConfigError(what, fix=(action.help or "") % (vars(action) | {"prog": "atoll"}))


def _toml(raw: Any) -> str:
    text = str(raw).lower() if isinstance(raw, bool) else repr(raw)
    return text[:SHOWN_CHARACTERS_MAX]


def expected(action: argparse.Action) -> str:
    """Return what an option takes, in words."""
    if action.nargs == 0:
        return "true or false"
    if action.choices is not None:
        return f"one of {', '.join(map(str, action.choices))}"
    metavar = str(action.metavar or action.dest.upper())
    if action.type is not None:
        return "a number" if metavar == "N" else metavar
    if _takes_many(action) or "," in metavar:
        return f"text, or a list of it: {metavar}"
    return f"text: {metavar}"
