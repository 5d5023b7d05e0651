"""The probes of an operator, as a table.

A probe asks one question, such as "does the operator do what its schema declares?". To add one, write a function of an
`OpSubject` in a file of this folder, and add one line to `PROBES`. The probes of compilers, one for each trace, are in
`traces.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchdelta.operators.probes import backward, derivative, eager, fake, layouts, traces
from torchdelta.operators.probes.base import (
    ProbeEntry,
    has_backward,
    has_input_with_grad,
    is_registered,
    wants_gradients,
)

_DIFFERENTIABLE = (wants_gradients, has_input_with_grad, has_backward)

PROBES = (
    ProbeEntry(name="schema", ask=eager.schema, needs=(is_registered,)),
    ProbeEntry(name="repeat", ask=eager.repeat),
    ProbeEntry(name="layout", ask=layouts.layout),
    ProbeEntry(
        name="registration", ask=eager.registration, needs=(wants_gradients, has_input_with_grad, is_registered)
    ),
    ProbeEntry(name="gradients", ask=eager.gradients, needs=(wants_gradients,)),
    ProbeEntry(name="backward", ask=backward.backward, needs=_DIFFERENTIABLE),
    ProbeEntry(name="derivative", ask=derivative.derivative, needs=_DIFFERENTIABLE),
    ProbeEntry(name="fake/given", ask=fake.fake_given, compares_values=False),
    ProbeEntry(name="fake/layout", ask=layouts.fake_layout, compares_values=False),
    ProbeEntry(name="fake/resized", ask=fake.fake_resized, compares_values=False),
    ProbeEntry(name="fake/symbolic", ask=fake.fake_symbolic, compares_values=False),
)
"""The probes that concern the operator itself, in the order in which they are asked."""


def probes_with(backends: Sequence[str]) -> tuple[ProbeEntry, ...]:
    """Return every probe in the order in which it is asked: those of the table, AOTAutograd's and the backends'."""
    return (*PROBES, *traces.trace_probes(backends))
