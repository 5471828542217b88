"""What every accountant promises; an implementation inherits all of it."""

from __future__ import annotations

import math

import pytest

from lightning_dp.accounting import (
    AbstractAccountant,
    Gaussian,
    OpacusPRVAccountant,
    OpacusRDPAccountant,
    PLDAccountant,
    PoissonGaussian,
    PoissonRound,
    StreamingRDPAccountant,
)

DELTA = 1e-5
MIXED = [(PoissonGaussian(1.2, 0.01), 150), (PoissonGaussian(0.9, 0.02), 50), (Gaussian(8.0), 2)]


class AccountantContract:
    """Not run itself: only subclasses begin with Test."""

    accountant: AbstractAccountant
    relations = ("add_remove", "replace_one")
    slack = 1e-9  # relative, for comparisons of an accountant with itself
    least_delta = 1e-9

    def epsilon(self, z: float, q: float, steps: int, delta: float = DELTA) -> float:
        return self.accountant.epsilon([(PoissonGaussian(z, q), steps)], delta)

    def test_more_noise_costs_less(self) -> None:
        values = [self.epsilon(z, 0.01, 200) for z in (0.7, 0.71, 0.8, 1.0, 1.5, 3.0)]
        assert values == sorted(values, reverse=True)
        assert values[0] > 2 * values[3] > 0

    def test_larger_samples_cost_more(self) -> None:
        values = [self.epsilon(1.0, q, 200) for q in (0.002, 0.01, 0.0101, 0.1, 0.5, 1.0)]
        assert values == sorted(values)
        assert values[-1] > 10 * values[1]

    def test_more_steps_cost_more(self) -> None:
        values = [self.epsilon(1.0, 0.01, steps) for steps in (0, 50, 100, 200, 1000, 1100)]
        assert values == sorted(values)
        assert values[-1] > 1.5 * values[1]

    def test_a_smaller_delta_costs_more(self) -> None:
        values = [self.epsilon(1.0, 0.01, 200, d) for d in (1e-2, 1e-4, 1e-5, self.least_delta)]
        assert values == sorted(values)
        assert values[-1] > 1.2 * values[1]

    def test_exchanging_a_record_costs_at_least_as_much_as_adding_one(self) -> None:
        history = [(Gaussian(5.0), 3)]
        alone = self.accountant.epsilon(history, DELTA, "add_remove")
        assert self.accountant.epsilon(history, DELTA, "replace_one") > 2 * alone * 0.99

    def test_n_times_an_event_is_n_events(self) -> None:
        event = PoissonGaussian(1.1, 0.02)
        at_once = self.accountant.epsilon([(event, 12)], DELTA)
        assert self.accountant.epsilon([(event, 1)] * 12, DELTA) == at_once
        assert at_once > self.accountant.epsilon([(event, 6)], DELTA)
        round_ = PoissonRound((2.2, 2.2, 2.2, 2.2), 0.02)
        assert self.accountant.epsilon([(round_, 12)], DELTA) == pytest.approx(at_once, rel=1e-12)

    def test_the_order_of_the_steps_is_irrelevant(self) -> None:
        forwards = self.accountant.epsilon(MIXED, DELTA)
        assert self.accountant.epsilon(MIXED[::-1], DELTA) == pytest.approx(forwards, rel=1e-12)

    @pytest.mark.parametrize("history", [[], [(Gaussian(1.0), 0)], [(Gaussian(0.0), 0)]])
    def test_nothing_costs_nothing(self, history: list[object]) -> None:
        for relation in self.relations:
            assert self.accountant.epsilon(history, DELTA, relation) == 0.0
            assert self.accountant.delta(history, 1.0, relation) == 0.0

    @pytest.mark.parametrize("event", [Gaussian(0.0), PoissonGaussian(0.0, 0.01)])
    def test_no_noise_costs_everything(self, event: PoissonGaussian) -> None:
        assert self.accountant.epsilon([*MIXED, (event, 1)], DELTA) == math.inf
        assert self.accountant.delta([*MIXED, (event, 1)], 5.0) == 1.0

    def test_delta_is_the_inverse_of_epsilon(self) -> None:
        epsilon = self.accountant.epsilon(MIXED, DELTA)
        assert self.accountant.delta(MIXED, epsilon) == pytest.approx(DELTA, rel=0.01)
        # Not off by two: twice the epsilon is far less likely to be exceeded.
        assert self.accountant.delta(MIXED, 1.3 * epsilon) < DELTA / 5

    def test_never_below_and_at_most_a_fifth_above_full_batches(self) -> None:
        exact = 17.8565868  # delta(mu = sqrt(10)) = 1e-5
        value = self.accountant.epsilon([(Gaussian(1.0), 10)], DELTA)
        assert exact * (1 - 1e-6) <= value <= 1.2 * exact

    @pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
    def test_refuses_a_delta_outside_0_1(self, delta: float) -> None:
        with pytest.raises(ValueError, match=r"delta must be in \(0, 1\)"):
            self.accountant.epsilon(MIXED, delta)

    @pytest.mark.parametrize("epsilon", [-1.0, math.inf, math.nan])
    def test_refuses_an_illegal_epsilon(self, epsilon: float) -> None:
        with pytest.raises(ValueError, match="epsilon must be finite and at least 0"):
            self.accountant.delta(MIXED, epsilon)

    @pytest.mark.parametrize("count", [-1, 1.5, math.nan, "2", True, None])
    def test_refuses_an_illegal_count(self, count: object) -> None:
        with pytest.raises(ValueError, match="count must be an integer"):
            self.accountant.epsilon([(Gaussian(1.0), count)], DELTA)

    @pytest.mark.parametrize("entry", [Gaussian(1.0), (1.0, 1), (Gaussian(1.0), 1, 1), None])
    def test_refuses_what_is_not_a_pair(self, entry: object) -> None:
        with pytest.raises(ValueError, match="a history holds pairs"):
            self.accountant.epsilon([entry], DELTA)

    def test_refuses_an_unknown_relation(self) -> None:
        for call in (self.accountant.epsilon, self.accountant.delta):
            for history in (MIXED, []):
                with pytest.raises(ValueError, match="relation must be"):
                    call(history, 0.5, "swap")


class TestPLD(AccountantContract):
    accountant = PLDAccountant()
    least_delta = 1e-12


class TestStreamingRDP(AccountantContract):
    accountant = StreamingRDPAccountant()
    least_delta = 1e-12


class TestOpacusRDP(AccountantContract):
    accountant = OpacusRDPAccountant()

    def test_refuses_to_guess_replace_one_of_samples(self) -> None:
        with pytest.raises(ValueError, match="no bound for replace-one"):
            self.accountant.epsilon(MIXED, DELTA, "replace_one")


class TestOpacusPRV(AccountantContract):
    accountant = OpacusPRVAccountant()

    def test_refuses_to_guess_replace_one_of_samples(self) -> None:
        with pytest.raises(ValueError, match="no bound for replace-one"):
            self.accountant.epsilon(MIXED, DELTA, "replace_one")
