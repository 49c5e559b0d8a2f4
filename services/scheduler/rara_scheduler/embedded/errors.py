"""What can keep an embedded PostgreSQL from serving. Each class has a stable code; the text is for people."""

from pathlib import Path


class EmbeddedPostgresError(Exception):
    """The embedded server cannot be used."""

    code = "POSTGRES_UNUSABLE"


class BinariesNotFound(EmbeddedPostgresError):
    """No PostgreSQL of a version that fits is on this machine."""

    code = "POSTGRES_NOT_FOUND"


class FolderInUse(EmbeddedPostgresError):
    """Another owner has the folder."""

    code = "POSTGRES_FOLDER_IN_USE"

    def __init__(self, directory: Path, owner: str) -> None:
        super().__init__(f"{directory} is in use by {owner or 'another process'}: two owners cannot share it")


class AccountUnusable(EmbeddedPostgresError):
    """PostgreSQL refuses to run as root, and there is no account that could run it."""

    code = "POSTGRES_ACCOUNT_UNUSABLE"


class StartFailed(EmbeddedPostgresError):
    """The server, or the making of its data directory, ended or did not answer. The text ends with its log."""

    code = "POSTGRES_START_FAILED"
