"""Names that users give, and the nearest ones when there is no such thing."""

from importlib.metadata import EntryPoint

import pytest

from torchdelta import registry
from torchdelta.errors import EnvironmentUnfit, UsageError
from torchdelta.registry import Registry, nearest


@pytest.fixture
def colours(monkeypatch):
    installed = [
        EntryPoint(name="join", value="os.path:join", group="torchdelta.colours"),
        EntryPoint(name="red", value="os.path:split", group="torchdelta.colours"),
        EntryPoint(name="broken", value="no_such_package:thing", group="torchdelta.colours"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry for entry in installed if entry.group == group])
    made = Registry("colour")
    made.add("red", "#f00")
    made.add("green", "#0f0")
    return made


def test_gives_what_was_added(colours):
    assert colours.get("red") == "#f00"
    assert "red" in colours


def test_gives_what_an_installed_package_brings_and_never_in_place_of_ours(colours):
    import os.path

    assert colours.get("join") is os.path.join
    assert colours.get("red") == "#f00"
    assert list(colours) == ["broken", "green", "join", "red"]


def test_names_the_nearest(colours):
    with pytest.raises(UsageError, match=r"^unknown colour 'grene': did you mean green or broken or red\?$"):
        colours.get("grene")


def test_names_all_where_none_is_near(colours):
    with pytest.raises(UsageError, match=r"^unknown colour 'xyz': there are broken, green, join, red\.$"):
        colours.get("xyz")


def test_a_package_that_does_not_load_is_named_only_when_it_is_asked_for(colours):
    assert "broken" in colours
    with pytest.raises(EnvironmentUnfit, match="'broken' of an installed package does not load from no_such_package"):
        colours.get("broken")


def test_refuses_a_second_thing_of_the_same_name(colours):
    with pytest.raises(UsageError, match="two colours are called 'red'"):
        colours.add("red", "#e00")


def test_a_list_too_long_to_read_is_cut_and_says_so():
    assert nearest("?", [f"name{index}" for index in range(400)]).endswith("name39 and 360 more.")
