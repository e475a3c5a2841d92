"""A hook of mkdocs: the site's first page is README.md, with links as they are from docs/."""

from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"


def on_page_read_source(page: Any, **_: Any) -> str | None:
    return README.read_text().replace("](docs/", "](") if page.file.src_uri == "index.md" else None
