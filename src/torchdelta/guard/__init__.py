"""The guard: a torch.compile backend around another, which checks graphs on real calls in the user's own run.

The way of a call, one file after the other: `backend.py` gets each graph that is compiled and wraps the result in a
`GuardedGraph` (`graph.py`), which checks calls as its `config.py` says. `findings.py` collects the records of all
graphs and writes them to disk. `followup.py` names culprits in another process. For `torchdelta run`, `script.py` runs
the user's script and `compiles.py` guards everything that it compiles.
"""
