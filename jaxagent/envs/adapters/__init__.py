"""What runs inside a worker: one file per library, which imports that library and nothing of ours. See workers/program.py."""
