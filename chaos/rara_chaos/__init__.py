"""Seeded faults against a running stack under load, judged by the history checker afterwards."""
