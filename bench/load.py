"""Puts a load on a Rara at any address, and says how it bore it: docs/how-to/load.md, `--help`."""

from rara_load.command import main

if __name__ == "__main__":
    main()
