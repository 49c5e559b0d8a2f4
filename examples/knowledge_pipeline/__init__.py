"""The example: a folder of texts becomes a searchable index, with measured quality."""

from pathlib import Path
from typing import Final

DEFINITION_FILE: Final = Path(__file__).with_name("definition.yaml")

__all__ = ["DEFINITION_FILE"]
