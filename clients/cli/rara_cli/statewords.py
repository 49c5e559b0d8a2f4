"""The words of states, for options: here without gRPC, and held to the contract by a test."""

RUN_STATES = ("pending", "running", "cancelling", "succeeded", "failed", "cancelled")
STEP_STATES = (
    "pending",
    "leased",
    "running",
    "retryable_failed",
    "succeeded",
    "terminal_failed",
    "cancelled",
)
EXECUTOR_STATES = ("connected", "silent", "draining", "lost")
