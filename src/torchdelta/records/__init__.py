"""Frozen data without torch: the question, the evidence and the answer, and their JSON.

One module for each kind of record: `case` is the question, `report` the answer of a check, `comparison` its evidence
for one leaf. `codec` turns records into JSON, and `strict_json` has the text of JSON and the files. Start at `report`.
"""
