"""A minute of `tests/chaos.py`; `make test-chaos` plays ten."""

import sys

import pytest

import chaos

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("workers"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
]


def test_every_promise_holds_for_a_minute_of_disturbances():
    assert chaos.main(60.0, seed=20, tell=lambda _: None) >= 1


def test_a_round_depends_on_seed_and_number():
    assert chaos.Round.drawn(1, 2) == chaos.Round.drawn(1, 2)
    assert len({chaos.Round.drawn(1, number) for number in range(20)}) == 20


def test_a_process_that_is_left_is_found(tmp_path):
    process = chaos._start(["--version"], tmp_path, "TORCHDELTA_CHAOS=left")

    assert process.pid in chaos.family("TORCHDELTA_CHAOS=left")
    process.communicate()
    assert chaos.family("TORCHDELTA_CHAOS=left") == set()
