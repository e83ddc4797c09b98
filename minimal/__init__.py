"""The parts of the benchmark train_minimal.py: its options, its workload, what it measures, what it reports."""
