"""The example: a folder of texts becomes a searchable index, with measured quality."""

from pathlib import Path
from typing import Final

DEFINITION_FILE: Final = Path(__file__).with_name("definition.yaml")
GO_DEFINITION_FILE: Final = Path(__file__).with_name("definition_go.yaml")
"""The same with one step in Go."""

__all__ = ["DEFINITION_FILE", "GO_DEFINITION_FILE"]
