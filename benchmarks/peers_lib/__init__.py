"""The parts of benchmarks/peers.py: environments and converted weights, the systems themselves, the load, the report."""
