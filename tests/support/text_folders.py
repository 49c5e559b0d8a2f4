"""Folders of real text for tests: passages of Python's own sources, many and small."""

import sysconfig
from pathlib import Path

HEAD_CHARS = 3_000


def write_library_heads(folder: Path, count: int) -> int:
    """The beginnings of `count` sources of Python and its packages, with all that a folder may hold beside.

    Returns how many documents a reader should find.
    """
    sources = [
        source
        for origin in ("stdlib", "purelib")
        for source in sorted(Path(sysconfig.get_path(origin)).rglob("*.py"))
        if source.stat().st_size > 500
    ]
    for number, source in enumerate(sources[:count]):
        target = (
            folder / f"part{number % 7}" / source.parent.name / f"{source.stem}.{('txt', 'md')[number % 2]}"
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(source.read_text("utf-8", "replace")[:HEAD_CHARS])
    found = sum(1 for path in folder.rglob("*") if path.is_file())
    (folder / "part0" / "latin.txt").write_bytes(
        "Schöne Grüße aus einer anderen Zeichentabelle".encode("latin-1")
    )
    (folder / "part0" / "empty.txt").touch()
    (folder / "part0" / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    (folder / "part0" / "round").symlink_to(folder)
    return found + 1
