"""The project's benchmark: product, physical limit and peers in turn on one PostgreSQL. bench/README.md tells how."""
