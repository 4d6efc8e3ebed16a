"""An estimate in a notebook: a self-contained picture and tables."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

import gradd
from gradd import picture
from gradd.estimating import CurvePoint, Estimate, Estimates, LiveSaving
from helpers.nets import Net, batch

MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


def made(points: list[tuple[float, float]], machine: float = 0, **more: Any) -> Estimate:
    """An estimate with 100 MiB beside the arena; points are MiB and percent."""
    first = points[0][0] if points else 0
    curve = tuple(
        CurvePoint(int(mib * MIB), int((first - mib) * MIB), percent) for mib, percent in points
    )
    activations = int(first * MIB)
    sizes = dict.fromkeys(
        ("parameters", "frozen", "gradients", "second_slot", "state", "constants", "ring"), 0
    )
    fields = {
        "batch": 4, "optimizer": "adamw", "activations": activations,
        "total": activations + 100 * MIB, "curve": curve, "live": None,
        "_lines": (("parameters", "1 B"), ("total", "2 B")), "_foot": "(optimizer adamw)",
        "_curve": (), "available": int(machine * MIB),
    }  # fmt: skip
    return Estimate(**{**sizes, **fields, **more})


LLAMA = [(187.5, 0), (177.5, 0.2), (157, 0.6), (137.8, 2.9), (121.6, 6.1), (100.1, 10.3),
         (83.9, 13.6), (66.1, 19.8)]  # fmt: skip


def parsed(estimates: Estimate | Estimates) -> ElementTree.Element:
    return ElementTree.fromstring(estimates._repr_html_())


def coordinates(root: ElementTree.Element) -> list[tuple[float, float]]:
    """Where the elements of the picture are."""
    found = []
    for tag, x, y in (("circle", "cx", "cy"), ("text", "x", "y"), ("line", "x1", "y1"),
                      ("line", "x2", "y2")):  # fmt: skip
        found += [(float(e.get(x)), float(e.get(y))) for e in root.iter(SVG + tag)]
    return found


@pytest.mark.parametrize("machine", [0, 20, 150, 287.5, 400, 1e6])
@pytest.mark.parametrize(
    "points",
    [LLAMA, [(5, 0), (5, 0)], [(0, 0), (0, 3)], [(1e-6, 0), (0, 1e-3)], [(9e6, 0), (1e6, 900.0)]],
)
def test_all_of_it_is_inside(points: list[tuple[float, float]], machine: float) -> None:
    root = parsed(made(points, machine))
    (svg,) = root.iter(SVG + "svg")
    assert svg.get("viewBox") == f"0 0 {picture._WIDTH} {picture._HEIGHT}"
    for x, y in coordinates(root):
        assert 0 <= x <= picture._WIDTH and 0 <= y <= picture._HEIGHT
    circles = list(root.iter(SVG + "circle"))
    assert len(circles) == len(points)
    across = [float(c.get("cx")) for c in circles]
    down = [float(c.get("cy")) for c in circles]
    assert across == sorted(across) and down == sorted(down)  # more time, less memory


def test_points_and_their_numbers() -> None:
    root = parsed(made(LLAMA, 24 * 1024))
    titles = [c.find(f"{SVG}title").text for c in root.iter(SVG + "circle")]
    assert titles[3] == (
        "planned peak 237.8 MiB; arena of a run 137.8 MiB, computed again 49.7 MiB, 2.9 % more time"
    )
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "287.5 MiB" in texts and "166.1 MiB, 19.8 %" in texts
    assert {"200.0 MiB", "250.0 MiB", "0 %", "10 %", "20 %"} <= set(texts)
    curve, parts = root.iter("table")
    assert len(list(curve)) == 1 + len(LLAMA)
    assert [cell.text for cell in list(curve)[-1]] == [
        "166.1 MiB", "66.1 MiB", "121.4 MiB", "19.8 %"]  # fmt: skip
    assert [[cell.text for cell in row] for row in parts] == [
        ["batch", "4"], ["parameters", "1 B"], ["total", "2 B"]]  # fmt: skip


@pytest.mark.parametrize(("machine", "shown"), [(0, 0), (20, 0), (200, 1), (400, 1), (1e5, 0)])
def test_the_machine_is_a_line_where_it_is_near(machine: float, shown: int) -> None:
    root = parsed(made(LLAMA, machine))
    assert sum(line.get("stroke") == picture._LIMIT for line in root.iter(f"{SVG}line")) == shown
    said = f"This machine has {picture.amount(machine * MIB)} left."
    assert [p.text for p in root.iter("p")][0] == said


def test_text_takes_the_colour_of_the_page() -> None:
    (svg,) = parsed(made(LLAMA, 200)).iter(SVG + "svg")
    assert svg.get("fill") == "currentColor"
    colours = {e.get(name) for e in svg.iter() for name in ("fill", "stroke")}
    assert colours == {None, "none", "currentColor", picture._LINE, picture._LIMIT}


def test_text_is_escaped() -> None:
    evil = "<script>alert('&\"')</script>"
    live = LiveSaving(8, 2, 4, 0, MIB, 50)
    one = made(LLAMA, _foot=evil, _lines=((evil, evil),), live=live)
    assert "<script" not in one._repr_html_()
    root = parsed(one)
    assert [p.text for p in root.iter("p")][-1] == evil
    assert list(root.iter("table"))[-1][1][0].text == evil
    assert "of 8 rows of this batch 4 are needed" in "".join(root.itertext())


@pytest.mark.parametrize("points", [[], [(5, 0)]])
def test_nothing_to_choose_is_no_picture(points: list[tuple[float, float]]) -> None:
    root = parsed(made(points))
    assert not list(root.iter(f"{SVG}svg")) and len(list(root.iter("table"))) == 1


def test_several_stand_side_by_side() -> None:
    root = parsed(Estimates((made(LLAMA), made(LLAMA, batch=8))))
    (table,) = root.iter("table")
    assert [[cell.text for cell in row] for row in table][0] == ["batch", "4", "8"]
    assert not list(root.iter(f"{SVG}svg"))
    assert len(list(root.iter("p"))) == 1


def test_marks_are_round() -> None:
    assert picture._steps(0, 20) == [0, 5, 10, 15, 20]
    assert picture._steps(0, 25.1) == [0, 5, 10, 15, 20, 25]
    assert picture._steps(3 * MIB, 8.5 * MIB, MIB) == [k * MIB for k in (3, 4, 5, 6, 7, 8)]
    for low, high in ((0, 1e-9), (0, 1e9), (5, 5.001), (0.3, 7)):
        assert 3 <= len(picture._steps(low, high)) <= 8


def test_an_estimate_of_a_model(daemon: Any) -> None:
    one = gradd.estimate(Net(width=256), batch(64))
    assert one.available > 0
    root = parsed(one)
    assert [row[0].text for row in list(root.iter("table"))[-1]][-1] == "total"
    several = gradd.estimate(Net(width=256), batch(4), batches=[1, 2])
    assert len(list(parsed(several).iter("table"))) == 1
