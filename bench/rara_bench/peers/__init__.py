"""Other systems on PostgreSQL, doing the same no-op jobs with their documented best settings."""
