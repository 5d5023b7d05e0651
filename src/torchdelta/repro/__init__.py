"""Write a failure as a script that imports torch alone, and exits with 1 while the bug is there.

Start reading in `script.py`; `finding.py` has its input, and `confirm.py` runs the script in a clean process.
"""
