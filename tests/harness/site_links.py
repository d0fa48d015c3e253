"""Check every link and anchor within a built site: ``python site_links.py build/site``.

Sphinx checks those that it makes; this reads pages as a browser does, pictures and style included.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Collect where a page leads, and the anchors that lead into it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and not urlsplit(value).scheme:
                self.links.append(value)


def broken(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere; those to other hosts are not followed."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: there is no page"]
    for page in pages.values():
        for link in page.links:
            parts = urlsplit(link)
            if parts.netloc:
                continue
            target = (
                (page.path.parent / unquote(parts.path)).resolve()
                if parts.path
                else page.path.resolve()
            )
            where = f"{page.path.relative_to(site)}: {link}"
            if not target.is_file():
                found.append(f"{where}: there is no such file")
                continue
            anchors = pages[target].anchors | {"top"} if target in pages else None
            if parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors:
                found.append(f"{where}: there is no such anchor")
    return found


if __name__ == "__main__":
    lines = broken(Path(sys.argv[1]))
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))
