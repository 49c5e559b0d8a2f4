"""What can be chosen about a run of the benchmark."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Recorded as it is in latest.json.

    steps: of a drain. rounds: interleaved. tries: of a round's measurement that others disturbed.
    others: the share of all processors that others may use meanwhile. retry_s: for all further tries together.
    slots, jobs_per_runner, uvloop: settings of the product under test.
    """

    rounds: int = 7
    steps: int = 20_000
    tries: int = 3
    others: float = 0.08
    retry_s: float = 600.0
    slots: int = 1000
    jobs_per_runner: int = 1000
    uvloop: bool = True
    postgres: str = "any"

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("rounds", "tries", "slots", "jobs_per_runner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 1000 <= self.steps <= 1_000_000:
            raise ValueError("steps must be from 1,000 to 1,000,000")
        if not 0 < self.others <= 1:
            raise ValueError("others must be a share: above 0, at most 1")

    @property
    def product(self) -> dict[str, str]:
        """The product's settings that are not its defaults."""
        uvloop = str(self.uvloop).lower()
        return {
            "RARA_EXECUTOR_SLOTS": str(self.slots),
            "RARA_EXECUTOR_JOBS_PER_RUNNER": str(self.jobs_per_runner),
            "RARA_EXECUTOR_UVLOOP": uvloop,
            "RARA_UVLOOP": uvloop,
            "RARA_LOG_LEVEL": "warning",
        }

    def record(self) -> dict[str, object]:
        return asdict(self)
