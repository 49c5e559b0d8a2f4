"""Transcripts in documents: what counts as the same, and what does not."""

import pytest
from support.transcripts import commands, differences, typed

DOCUMENT = """\
```sh
make demo
```

```console
$ rara ps
RUN
...
$ rara run start x \\
    --watch
```
"""


def test_a_document_has_commands_with_what_they_show() -> None:
    first, second = typed(DOCUMENT)
    assert (first.command, first.shown) == ("rara ps", ("RUN", "..."))
    assert (second.command, second.shown) == ("rara run start x     --watch", ())
    assert commands(DOCUMENT) == ["make demo", "rara ps", "rara run start x     --watch"]
    with pytest.raises(ValueError, match="output of no command"):
        list(typed("```console\nRUN\n```\n"))


@pytest.mark.parametrize(
    ("shown", "printed", "is_same"),
    [
        ("step clean  succeeded  0.1s", "step clean   succeeded  12s", True),
        ("step clean  succeeded  0.1s", "step clean  succeeded  1m 5s", True),
        ("step clean  succeeded  0.1s", "step clean  failed  0.1s", False),
        ("attempt 1", "attempt 2", False),
        ("79 of 79 documents", "113 of 1,113 documents", True),
        ("index  728.0 KiB  16c83ac2b28d", "index  333 B  ff00ff00ff00", True),
        ("2026-11-30T04:19:41Z  run", "2027-01-01T00:00:00.123Z  run", True),
        ("5/5 steps", "4/5 steps", False),
        ("a\n...\nz", "a\nb\nc\nz", True),
        ("a\n...\nz", "a\nz", True),
        ("a\n...\nz", "a\nz\nend", False),
        ("a\n...", "a\nz\nend", True),
        ("a", "a\nb", False),
        ("a\nb", "a", False),
        ("", "anything", True),
    ],
)
def test_words_are_compared_and_figures_are_not(shown: str, printed: str, is_same: bool) -> None:
    assert (differences(tuple(shown.splitlines()), printed) == "") is is_same


def test_what_time_allowed_may_vary_by_one_digit_too() -> None:
    assert differences(("2 of 12 settings",), "9 of 12 settings")
    assert not differences(("2 of 12 settings",), "9 of 12 settings", figures_vary=True)
