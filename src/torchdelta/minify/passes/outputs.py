"""Return less."""

from __future__ import annotations

from torchdelta.minify.edit import Edit
from torchdelta.minify.oracle import guilty_outputs
from torchdelta.minify.search import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose to return only what differs, then to leave outputs out."""
    returned = search.subject.outputs
    told = guilty_outputs(search.subject, search.answer, search.wanted)
    if told and len(returned) > 1 and (yield Edit(outputs=tuple(told[:1]))):
        return
    # something inside may be enough to return: what only its readers did then goes
    yield from merging([Edit(unreturned=frozenset({name})) for name in returned])
    for node in [node for node in search.subject.nodes if node.name in search.subject.outputs]:
        others = tuple(each for each in search.subject.outputs if each != node.name)
        inner = tuple(source.name for source in node.all_input_nodes if source.op != "placeholder")
        if inner:
            yield Edit(outputs=(*others, *inner))
