"""A load generator for users: operations at a rate or in a closed loop, latencies by stage, and the verdict."""
