"""Certificates for tests, as files that can be replaced while they are in use."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path

    def replace_by(self, authority: trustme.CA, *names: str) -> None:
        issued = authority.issue_cert(*(names or ("127.0.0.1",)))
        write(self.certificate, b"".join(part.bytes() for part in issued.cert_chain_pems))
        write(self.key, issued.private_key_pem.bytes())


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority, and the file that others trust it by."""

    ca: trustme.CA
    file: Path

    @classmethod
    def new(cls, folder: Path, name: str = "ca") -> "Authority":
        made = cls(trustme.CA(), folder / f"{name}.pem")
        write(made.file, made.ca.cert_pem.bytes())
        return made

    def pair(self, name: str, *names: str, is_expired: bool = False) -> Pair:
        """A new pair for names or addresses; for 127.0.0.1 where none is given."""
        folder = self.file.parent
        pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        if not is_expired:
            pair.replace_by(self.ca, *names)
            return pair
        issued = self.ca.issue_cert(
            *(names or ("127.0.0.1",)), not_after=datetime.now(UTC) - timedelta(days=1)
        )
        write(pair.certificate, issued.cert_chain_pems[0].bytes())
        write(pair.key, issued.private_key_pem.bytes())
        return pair


def write(path: Path, data: bytes) -> None:
    """Put a file in place in one move, as those who renew certificates do."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(data)
    fresh.replace(path)
