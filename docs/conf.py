"""Settings of the documentation site: `make docs` builds it into build/site.

Its pages are the Markdown files of the repository, as they lie: the source folder is the root, so
that a link between two files is the same link here and on a code host.
"""

from __future__ import annotations

import argparse
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from atoll.collectives.version import VERSION
from atoll.peer.cli import main

project, release, author = "atoll", VERSION, "The atoll developers"
project_copyright = "The atoll developers, Apache License 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]

root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/convergence/*.md",
    "docs/convergence/*/*.md",
    "docs/robust/*.md",
    "docs/studies/*.md",
]
# What is written for those who change atoll, and is no use without its history.
exclude_patterns = ["docs/log.md", "docs/progress.md", "docs/renames.md", "**/.venv*", ".venv*"]
exclude_patterns += ["build", "dist", "tests", "atoll", "peer", "collectives", "optim", ".*"]

myst_heading_anchors = 3  # the anchors that code hosts make
myst_enable_extensions = ["attrs_block"]
highlight_language = "text"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88
add_module_names = False
# Docstrings are plain English with ``code``, and quote a parameter's default as the code has it.
nitpicky = False

html_theme = "furo"
html_title = f"atoll {VERSION}"
html_favicon = "../peer/telemetry/page/icon.svg"
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]
html_copy_source = html_show_sphinx = False
html_theme_options: dict[str, Any] = {"navigation_with_keys": True}


class Commands(SphinxDirective):
    """List every command with its options, as the program's own parser has them."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for parser in _leaves(main.command_parser()):
            lines += [f"## {parser.prog}", "", *_described(parser), ""]
        within = nodes.section()
        within.document = self.state.document
        self.state.nested_parse(
            StringList(lines, "commands"), self.content_offset, within, match_titles=True
        )
        return within.children


def _leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of all commands that have no commands below them."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        return [parser]
    return [
        leaf for action in below for child in action.choices.values() for leaf in _leaves(child)
    ]


def _described(parser: argparse.ArgumentParser) -> list[str]:
    """Return a command's usage, and a definition for each of its arguments and options."""
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    lines = [parser.description, ""] if parser.description else []
    lines += ["```text", usage, "```", "", "| argument | |", "|---|---|"]
    rows = len(lines)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        named = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        one_of = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        value = f" {action.metavar or one_of or action.dest.upper()}"
        takes = action.option_strings and action.nargs != 0
        shown = f"`{named}{value if takes else ''}`".replace("|", "\\|")
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        lines.append(f"| {shown} | {text.replace('|', chr(92) + '|').replace('<', '&lt;')} |")
    return lines if len(lines) > rows else lines[:-2]


def setup(app: Any) -> None:
    app.add_directive("atoll-commands", Commands)
