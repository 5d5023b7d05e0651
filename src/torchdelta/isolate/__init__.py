"""Run tasks that may crash, hang or eat memory in worker processes, and return a typed outcome for each.

Start reading in `pool.py` (queries in, outcomes out). Then, by question:

- Where do a query's files lie? `directories.py`.
- How is a worker started, on systems with and without `fork`? `starters.py`; the forking itself is in `zygote.py`.
- What does a worker do? `worker.py`.
- What decides that a worker is too slow or too large, and ends it? `supervisor.py`; the signals are sent in
  `process_groups.py`.
- What do these processes send each other? `protocol.py`.
"""
