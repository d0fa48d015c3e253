"""Make a wide-area network on one machine: ``atoll lab``, and the same for tests and benchmarks."""
