"""The verbs, a module for each noun."""
