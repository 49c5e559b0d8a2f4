"""The executor's ready file, and the health check that looks at it."""

import os
import time
from pathlib import Path

import pytest
from rara_executor.ready import STALE_S, ReadyFile, is_ready, main


def test_it_is_there_and_new_while_ready_and_gone_when_not(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    file = ReadyFile(path)
    assert not is_ready(path)
    file.show(is_ready=True)
    assert is_ready(path)
    past = time.time() - STALE_S - 1
    os.utime(path, (past, past))  # nobody has touched it: the executor hangs
    assert not is_ready(path)
    file.show(is_ready=True)
    assert is_ready(path)
    file.show(is_ready=False)
    file.show(is_ready=False)
    assert not path.exists()


def test_a_folder_that_is_not_there_costs_the_health_check_alone(tmp_path: Path) -> None:
    file = ReadyFile(tmp_path / "nowhere" / "ready")
    file.show(is_ready=True)
    file.show(is_ready=False)
    ReadyFile(None).show(is_ready=True)


def test_the_command_exits_0_while_ready_and_says_why_when_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RARA_EXECUTOR_READY_FILE", raising=False)
    with pytest.raises(SystemExit, match="RARA_EXECUTOR_READY_FILE names no file"):
        main()
    monkeypatch.setenv("RARA_EXECUTOR_READY_FILE", str(tmp_path / "ready"))
    with pytest.raises(SystemExit, match="not ready"):
        main()
    (tmp_path / "ready").touch()
    main()
