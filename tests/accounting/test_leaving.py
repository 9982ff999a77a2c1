"""What leaving a part out saves: all parts at once, against each composition by itself."""

import math
import sys

import pytest
from dp_accounting.pld import privacy_loss_distribution as reference

from privtune.accounting import (
    ZCDP,
    Adjacency,
    ApproximateDP,
    Composed,
    Gaussian,
    Geometric,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    epsilon,
    explain,
)
from privtune.accounting.events import flatten
from privtune.accounting.pld import (
    _epsilons,
    epsilons_on_one_lattice,
    event_pair,
    pairs_on_one_lattice,
)
from privtune.accounting.pmf import GridError
from tests.accounting.helpers import steps

MIXED = (
    *(steps(0.002 * i, 0.8 + 0.1 * i, 40 + i) for i in range(1, 9)),
    *(Laplace(30.0), Laplace(80.0), Gaussian(25.0), Gaussian(60.0)),
    *(ApproximateDP(0.02, 1e-15), PoissonSampled(0.1, Laplace(8.0))),
)
COARSE = (Laplace(2.0), Laplace(3.0), ApproximateDP(0.3, 1e-14), Gaussian(4.0), ZCDP(0.02))
ONCE = tuple(PoissonSampled(0.1 + 0.02 * i, Gaussian(1.0 + 0.05 * i)) for i in range(12))
DEAR = tuple(PoissonSampled(0.3, Gaussian(0.4 + 0.02 * i)) for i in range(8))
WIDE = (Repeated(30, PoissonSampled(0.5, Gaussian(1.5))), *[Laplace(4.0)] * 20, Laplace(3.0))


def without(parts):
    """The whole, and what is left without each part, once."""
    rests = [(*parts[:i], *parts[i + 1 :]) for i in range(len(parts))]
    return [flatten(Composed(events)) for events in (parts, *rests)]


@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-12])
@pytest.mark.parametrize("parts", [MIXED, COARSE, ONCE, DEAR, WIDE])
def test_all_at_once_is_each_by_itself(parts, delta):
    compositions = without(parts)
    near = epsilon(Composed(parts), delta).epsilon
    pairs, _ = pairs_on_one_lattice(compositions, delta, near, 2.0)
    found = epsilons_on_one_lattice(compositions, delta, near)
    for left, value in zip(compositions, found, strict=True):
        alone = event_pair(left, pairs[0].remove.step).epsilon(delta)
        if math.isnan(value):  # at the tilt of the whole, rounding hides what is far cheaper
            assert delta < 1e-9
            assert alone < 0.5 * near
            continue
        # A composition by itself adds an allowance for rounding, which at 1e-12 is felt.
        assert value == pytest.approx(alone, abs=(1e-7 if delta > 1e-9 else 1e-6) * near)


def test_each_direction_is_that_of_each_composition():
    parts = (*[PoissonSampled(0.2, Laplace(1.0))] * 5, Laplace(5.0))
    compositions = without(parts)
    near = epsilon(Composed(parts), 1e-5).epsilon
    pairs, counts = pairs_on_one_lattice(compositions, 1e-5, near, 2.0)
    for way in ("remove", "add"):
        found = _epsilons([getattr(pair, way) for pair in pairs], counts, 1e-5)
        for left, value in zip(compositions, found, strict=True):
            pair = event_pair(left, pairs[0].remove.step)
            assert value == pytest.approx(getattr(pair, way).epsilon(1e-5), rel=1e-7)
    assert abs(pair.remove.epsilon(1e-5) - pair.add.epsilon(1e-5)) > 0.1


def test_the_difference_is_known_to_a_thousandth_of_the_whole():
    parts = MIXED[1::2]
    tree = explain(Composed(parts), 1e-5)
    compositions = without(parts)
    pairs, _ = pairs_on_one_lattice(compositions, 1e-5, tree.epsilon, 8.0)
    whole, *left = (event_pair(c, pairs[0].remove.step).epsilon(1e-5) for c in compositions)
    for part, value in zip(tree.children, left, strict=True):
        assert part.saved == pytest.approx(whole - value, abs=1e-3 * tree.epsilon)
        assert part.saved == pytest.approx(whole - value, rel=0.05)
        assert 0.0 < part.saved < tree.epsilon


def test_another_library_finds_the_same_difference():
    fine = {"value_discretization_interval": 2e-4}
    kinds = [(0.01, 1.0, 60), (0.02, 1.5, 40), (0.005, 0.8, 90)]
    one = [reference.from_gaussian_mechanism(s, sampling_prob=q, **fine) for q, s, _ in kinds]
    laplace = reference.from_laplace_mechanism(12.0, **fine)

    def composed(counts, releases):
        total = laplace.self_compose(releases)
        for pld, count in zip(one, counts, strict=True):
            total = total.compose(pld.self_compose(count))
        return total.get_epsilon_for_delta(1e-5)

    releases = [PoissonSampled(q, Gaussian(s)) for q, s, n in kinds for _ in range(n)]
    tree = explain(Composed([*releases, *[Laplace(12.0)] * 5]), 1e-5)
    counts = [n for _, _, n in kinds]
    whole = composed(counts, 5)
    assert tree.epsilon == pytest.approx(whole, rel=2e-3)
    saved = {node.text: node.saved for node in tree.children}
    assert len(saved) == 4
    for i, event in enumerate((releases[0], releases[60], releases[100])):
        fewer = [n - (j == i) for j, n in enumerate(counts)]
        expected = whole - composed(fewer, 5)
        assert saved[explain(event, 1e-5).text] == pytest.approx(expected, rel=0.02)
    assert saved[explain(Laplace(12.0), 1e-5).text] == pytest.approx(
        whole - composed(counts, 4), rel=0.02
    )


def asked(monkeypatch, event, delta=1e-5):
    """The tree, and for how many events `epsilon` was asked."""
    module, events = sys.modules["privtune.accounting.costs"], []
    real = module.epsilon
    monkeypatch.setattr(
        module, "epsilon", lambda e, *args, **more: events.append(e) or real(e, *args, **more)
    )
    return explain(event, delta), events


def test_many_charges_of_few_kinds_are_composed_once(monkeypatch):
    kinds = [PoissonSampled(0.002 * i, Gaussian(1.0 + 0.05 * i)) for i in range(1, 13)]
    tree, events = asked(monkeypatch, Composed(kinds * 5))
    assert len(events) == 1 + len(kinds)
    assert tree.children[:12] == tree.children[12:24]  # equal parts, equally explained
    assert all(0.0 < part.saved < tree.epsilon for part in tree.children)


def test_what_little_is_left_is_accounted_by_itself(monkeypatch):
    training, small = steps(0.05, 0.8, 200), PoissonSampled(0.01, Gaussian(2.0))
    event = Composed([training, small, small, Laplace(50.0)])
    tree, events = asked(monkeypatch, event)
    rest = Composed([small, small, Laplace(50.0)])
    assert rest in events
    assert tree.children[0].saved == tree.epsilon - epsilon(rest, 1e-5).epsilon


def test_without_its_only_part_a_composition_costs_nothing():
    training = steps(0.01, 1.0, 100)
    tree = explain(Composed([training]), 1e-5)
    assert tree.children[0].saved == tree.epsilon == epsilon(training, 1e-5).epsilon


def test_without_protection_nothing_else_is_saved():
    tree = explain(Composed([steps(0.01, 1.0, 100), NonPrivate(), Laplace(9.0)]), 1e-5)
    assert [part.saved for part in tree.children] == [0.0, math.inf, 0.0]


def test_where_no_distribution_is_composed_each_rest_is_accounted():
    parts = [Laplace(100.0 + i) for i in range(66)]  # more kinds than are composed
    tree = explain(Composed(parts), 1e-5)
    assert tree.method == "rdp"
    left = epsilon(Composed(parts[1:]), 1e-5)
    assert tree.children[0].saved == tree.epsilon - left.epsilon


def test_where_the_common_lattice_is_too_coarse_for_the_whole_each_rest_is_accounted():
    large, small = ApproximateDP(3.526, 1e-20), steps(0.0077, 6.68, 42)
    parts = [Gaussian(64.26), Gaussian(58.26), large, small]
    delta = 1.4577e-6
    tree = explain(Composed(parts), delta)
    assert epsilons_on_one_lattice(without(parts), delta, tree.epsilon)[0] > 1.02 * tree.epsilon
    for i, part in enumerate(tree.children):
        left = epsilon(Composed((*parts[:i], *parts[i + 1 :])), delta)
        assert part.saved == tree.epsilon - left.epsilon
    assert tree.children[3].saved < 1e-3 * tree.epsilon  # on the common one it seemed 2% of ε


def test_a_selection_that_is_left_alone_has_its_own_account():
    best = PrivateSelection(steps(0.02, 1.0, 300), Geometric(5))
    tree = explain(Composed([best, Laplace(20.0)]), 1e-5)
    assert tree.children[1].saved == tree.epsilon - epsilon(best, 1e-5).epsilon


def test_under_replace_one_parts_are_left_out_as_they_are_charged():
    event = Composed([Laplace(10.0), Laplace(15.0), Gaussian(12.0), Laplace(10.0), Gaussian(20.0)])
    replaced = Adjacency.REPLACE_ONE
    tree = explain(event, 1e-5, adjacency=replaced)
    for i, part in enumerate(tree.children):
        rest = Composed([*event.events[:i], *event.events[i + 1 :]])
        left = epsilon(rest, 1e-5, adjacency=replaced).epsilon
        assert part.saved == pytest.approx(tree.epsilon - left, abs=2e-3 * tree.epsilon)


def test_what_does_not_fit_on_one_lattice_is_refused():
    rare = Repeated(10**8, PoissonSampled(1e-8, Gaussian(0.35)))
    with pytest.raises(GridError):
        epsilons_on_one_lattice(without((rare, Laplace(5.0))), 1e-5, 0.2)
