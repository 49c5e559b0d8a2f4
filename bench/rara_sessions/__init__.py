"""Many executors in one process, to see what sessions cost a scheduler."""
